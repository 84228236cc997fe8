"""forms.py: forms of answers by hand, over the evaluations of a run, and `vlrl compare --forms`."""

import json
import math
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation.test_pairs import group
from vlrl.cli.main import main
from vlrl.errors import RunError
from vlrl.store import RunFolder
from vlrl.tools.experiments.forms import Forms, form, forms_over_steps, most_frequent


def test_forms_of_answers():
    for text, expected in (
            ("<think>It is left of 2 cars.</think><answer>[190, 45.5]</answer>",
            "<think>a.</think><answer>[0, 0]</answer>"), ("[1,-2,+3,4.5]", "[0,0,0,0]"), ("click(3, 4)", "a(0, 0)"),
            ("", ""), ("The  answer\nis 4.", "a."),
            ('{"bbox_2d": [1, 2], "label": "red car"}', '{"a": [0, 0], "a": "a"}'), ("abc3", "a"),
            ("42<|im_end|>", "0<|im_end|>"), ("ACCELERATE, STRAIGHT", "a"), ("3 < 4", "0 < 0"), ("日本 3 語", "a"),
            ("(a" * 100, "(a" * 58 + "(...")):
        assert form(text) == expected, (text, expected)
    for piece in ("a ", "<", "a-", "1.", "<a", "a,", "<|", "a_", "+"):
        before = time.process_time()
        form(piece * 100_000)
        assert time.process_time() - before < 2, piece


@given(st.text(max_size=300))
def test_no_text_breaks_it(text):
    found = form(text)
    assert len(found) <= 120 and not any(c.isdecimal() and c != "0" for c in found.split("<")[0])


def test_shares_and_entropy():
    point = Forms(0, Counter({"[0]": 3, "a": 1}))
    assert point.answers == 4 and point.share("[0]") == 0.75 and point.share("none") == 0
    assert point.entropy == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-12)
    assert Forms(0, Counter({"a": 5})).entropy == 0
    later = Forms(9, Counter({"late": 9, "[0]": 1}))
    assert most_frequent([point, later]) == ["late", "[0]", "a"] and most_frequent([point, later], 1) == ["late"]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "r")
    for step, texts in ((0, ["[1, 2]", "left", "right", "left of 3"]), (8, ["[5, 6]", "[7, 8]", "[9, 9]", "up"])):
        groups = []
        for i, text in enumerate(texts):
            made = group(str(i))
            (rollout,) = made.rollouts
            written = replace(rollout.completion, text=text)
            groups.append(replace(made, rollouts=(replace(rollout, completion=written),)))
        folder.write_rollouts(step, 0, groups, split="heldout")
    return folder


def test_over_the_evaluations_of_a_run(run, capsys, tmp_path):
    first, last = forms_over_steps(run)
    assert (first.step, last.step) == (0, 8)
    assert first.forms == {"[0, 0]": 1, "a": 3} and last.forms == {"[0, 0]": 3, "a": 1}
    assert main(["compare", "--forms", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[str(run.path)]
    assert [(p["step"], p["answers"], p["forms"]) for p in found] == [
        (0, 4, {"a": 3, "[0, 0]": 1}), (8, 4, {"[0, 0]": 3, "a": 1})]
    assert main(["compare", "--forms", str(run.path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["[0,", "0]", "25.0%", "75.0%"] in rows and ["different", "forms", "2", "2"] in rows
    with pytest.raises(RunError, match="no evaluated answers of split 'heldout'"):
        forms_over_steps(RunFolder(tmp_path))
    with pytest.raises(RunError, match=r"of split 'other'.* Evaluated splits: heldout"):
        forms_over_steps(run, "other")
    assert main(["compare", "--forms", str(run.path), "vs", str(run.path)]) == 2
    for words, said in (
            (["--weights"], "--forms"), (["--metric", "iou"], "--metric"), (["--seeds", "3"], "--seeds"),
            (["--sequential"], "--sequential")):
        assert main(["compare", "--forms", str(run.path), *words]) == 2, (words, said)
        assert said in capsys.readouterr().err, (words, said)
