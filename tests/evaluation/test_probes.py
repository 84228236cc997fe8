"""tools/evaluation/probes.py: what is taken away or worded otherwise, what is read in the answers, and the numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.cli.test_evaluating import sums, worked_out  # noqa: F401  # a fixture
from tests.cli.test_training import call
from tests.evaluation.http_stand_in import served
from vlrl.config import validate
from vlrl.data import media
from vlrl.tools.evaluation.probes import NotApplicable, abstains, probe, same_answer
from vlrl.tools.evaluation.rows import read_rows
from vlrl.types import Media, Sample


def sample(question="", *sources, **row):
    return Sample(id="s", row={**({"question": question} if question else {}), **row},
                  media=tuple(Media(source=s) for s in sources))


def test_blank_and_other_pictures():
    """Blank ones keep size and mean colour; others are those of the next sample that fits."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (7, 5, 3), np.uint8))
    asked = probe("blank_media", [sample("Where?", picture)], 0)
    limits = validate({"task": "x", "model": {"name": "x"}}).limits
    loaded, plain = (media.load(one.media[0], limits) for one in (asked, sample("Where?", picture)))
    shown = np.asarray(loaded.frames[0]).reshape(-1, 3)
    assert loaded.size == (5, 7) and len(np.unique(shown, axis=0)) == 1 and loaded.sha256 != plain.sha256
    assert np.abs(shown[0] - np.asarray(picture).mean(axis=(0, 1))).max() <= 0.5
    with pytest.raises(NotApplicable, match="no image"):
        probe("blank_media", [sample("Where?")], 0)
    a, b = Path("a.png"), Path("b.png")
    samples = [sample("1", a), sample("2", Path("a.png")), sample("3", a, b), sample("4", b), sample("5")]
    assert probe("other_media", samples, 0).media[0].source == b
    assert probe("other_media", samples, 3).media[0].source == a
    assert probe("other_media", samples, 0).row == samples[0].row
    with pytest.raises(NotApplicable, match="no other sample"):
        probe("other_media", samples, 2)


def test_premises_and_words_that_are_replaced():
    for row, expected in (
            ({"question": "Ann has 3 cats. They are old. How many legs have they?"},
            "They are old. How many legs have they?"), ({"question": "It is a dog. Who owns it?"}, "Who owns it?"),
            ({"question": "What is 2.5 + 4?"}, "What is some + 4?"), ({"instruction": "Open page 7"}, "Open page some"),
            ({"question": "How many of 3?", "without_premise": "How many?"}, "How many?")):
        asked = probe("no_premise", [Sample(id="s", row={**row, "answer": "x"})], 0)
        assert expected in asked.row.values() and asked.row["answer"] == "x", (row, expected)
    for row, expected in (
            ({"question": "How many cats?"}, "I would like to know this, please: how many cats"),
            ({"expression": "USB port."}, "I would like to know this, please: USB port"),
            ({"question": "How?", "paraphrases": ["In what way?", "x"]}, "In what way?")):
        assert expected in probe("reworded", [Sample(id="s", row=row)], 0).row.values(), (row, expected)
    for name in ("no_premise", "reworded"):
        with pytest.raises(NotApplicable, match="none of the fields"):
            probe(name, [sample(label="cat")], 0)
    with pytest.raises(NotApplicable, match="states no fact"):
        probe("no_premise", [sample("What is this?")], 0)


def test_what_abstains_and_what_is_the_same_answer():
    for text, says in (
            ("It cannot be determined.", True), ("I can't tell from this.", True),
            ("There is not enough information", True), ("unknown", True),
            ("No image was given, so the number is not known", True), ("The image is blank.", True), ("4", False),
            ("There is no cat; the answer is 0", False), ("<think>not enough? no.</think>12", False),
            ("an unknown man in a hat", False)):
        assert abstains(text, text) == says and abstains(text, None), (text, says)
    assert same_answer("12", 12.0) and same_answer("A cat.", "a cat")
    assert not same_answer("12", "13") and not same_answer(None, None)
    assert same_answer([0, 0, 10, 10], [0, 0, 10, 8]) and not same_answer([0, 0, 10, 10], [0, 0, 10, 4])
    assert same_answer([10, 10], [13, 14], (100, 100)) and not same_answer([10, 10], [18, 10], (100, 100))
    assert same_answer([10, 10], [10, 10]) and not same_answer([10, 10], [10, 11])
    assert not same_answer([1, 2], [1, 2, 3, 4])


@given(st.text(max_size=200), st.sampled_from(["no_premise", "reworded"]))
def test_any_question(text, name):
    try:
        asked = probe(name, [sample(text)], 0)
    except NotApplicable:
        return
    assert asked["question"] != text and isinstance(abstains(text, text), bool)


def test_a_model_that_does_not_read_its_premise(sums, tmp_path, capsys):  # noqa: F811
    """It reads the first number where there is one, else it says 5 whatever was asked; and is right as it is."""
    def script(body, number):
        text = str(body["messages"][-1]["content"])
        return "5 or so, I guess" if "some+1" in text else worked_out(body, number)

    with served(script) as server:
        words = ["eval", *sums, "--endpoint", server.url, "--probe", "no_premise", "--probe", "reworded"]
        found = json.loads(call(capsys, *words, "-o", tmp_path / "out", "--json")[0])
        asked = [str(body["messages"][-1]["content"]) for *_, body in server.asked]
    assert len(asked) == 36 and sum("some+1?" in text for text in asked) == 12
    plain, without, other = (r["metrics"] for r in found["results"])
    assert "probe/same_frac" not in plain and plain["accuracy"]["mean"] == 1
    assert other["probe/same_frac"]["mean"] == 1 and other["probe/correct_change"]["mean"] == 0
    assert without["probe/same_frac"]["mean"] == 0 and without["probe/abstained_frac"]["mean"] == 0
    assert without["probe/correct_change"]["mean"] == -1 and without["probe/length_ratio"]["mean"] == 1
    rows = read_rows(tmp_path / "out" / "answers.jsonl")
    assert {r["setting"] for r in rows} == {"greedy", "greedy, no_premise", "greedy, reworded"}
    with served(worked_out) as server:  # samples without a picture
        words = ["eval", *sums, "--endpoint", server.url, "--probe", "blank_media", "-o", tmp_path / "blank", "--json"]
        plain, blank = json.loads(call(capsys, *words)[0])["results"]
    assert (plain["n"], plain["left_out"], blank["n"], blank["left_out"]) == (12, 0, 0, 12) and not blank["metrics"]
