"""tools/evaluation: probes, which take away or word otherwise, and a judge's verdicts on the reasoning of answers."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.cli.test_evaluating import sums, worked_out  # noqa: F401  # a fixture
from tests.cli.test_training import call
from tests.evaluation.http_stand_in import served
from tests.evaluation.test_summary import means, result
from tests.evaluation.test_summary import row as row_of
from vlrl.config import validate
from vlrl.data import media
from vlrl.tools.evaluation.probes import NotApplicable, abstains, probe, same_answer
from vlrl.tools.evaluation.reasoning_judge import read_verdict
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


@settings(max_examples=40)
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
        return "5 or so, I guess" if "some+1" in str(body["messages"][-1]["content"]) else worked_out(body, number)

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


def test_verdicts(sums, capsys):  # noqa: F811
    for text, verdict in (
            ('Step 1 is fine.\n{"verdict": "yes"}', True), ('{"verdict": "yes"} or rather {"verdict": "NO"}', False),
            ("{'verdict' : 'no'}", False), ("yes", None), ("", None), ('{"verdict": "maybe"}', None),
            ("verdict: yes", None)):
        assert read_verdict(text) is verdict, (text, verdict)
    for words, said, code in (
            (("--judge-votes", 3), "needs --judge", 2),
            (("--judge", "nowhere"), "--judge 'nowhere' is not the address", 1),
            (("--judge", "http://127.0.0.1:1/v1", "--judge-key-env", "NOT_SET_HERE"), "--judge-key-env NOT_SET_HERE",
            1)):
        assert said in call(capsys, "eval", *sums, *words, code=code)[1], (words, said, code)


@settings(max_examples=40)
@given(st.text())
def test_any_text_has_a_verdict_or_none(text):
    assert read_verdict(text) in (True, False, None) and read_verdict(text + '{"verdict": "no"}') is False


def test_cot_pass_at_k_of_planted_verdicts():
    """Three answers, of which two are right; the majority accepts one, any both, all none. Then a sample with none."""
    planted = [[(True, [True, True, False]), (True, [False, False, True]), (False, [])], [(False, [])] * 3]
    rows = [row_of(n, "x", right, i, verdicts=verdicts) for n, given in enumerate(planted)
            for i, (right, verdicts) in enumerate(given)]
    found = means(result(rows, 3))
    assert found["cot_pass@1"] == pytest.approx((1 / 3 + 0) / 2) and found["cot_pass@2"] == pytest.approx(2 / 3 / 2)
    assert found["cot_pass@3"] == 0.5 and found["cot_pass@3/all"] == 0
    assert found["cot_pass@1/any"] == pytest.approx(1 / 3)
    assert found["judge/sound_frac"] == 0.5 and found["pass@1"] == pytest.approx(1 / 3)
    # a right answer without a verdict is left out: one of two others is accepted
    rows[1]["verdicts"] = []
    assert means(result(rows[:3], 3))["cot_pass@2"] == 1 and "cot_pass@3" not in means(result(rows[:3], 3))
    assert means(result([row_of(0, "x", True, verdicts=[True])]))["cot_pass@1"] == 1
    assert not any(name.startswith(("cot", "judge")) for name in means(result([row_of(0, "x", True)])))


@pytest.mark.slow
def test_a_judge_is_asked_for_right_answers_once(sums, tmp_path, capsys):  # noqa: F811
    """Answers to even questions are right, to 0, 4 and 8 by a reason that the judge accepts; 10 is not read."""
    def answers(body, number):
        n = int(re.search(r"(\d+)\+1", body["messages"][-1]["content"][-1]["text"])[1])
        return f"<think>{'reckoned' if n % 4 == 0 else 'guessed'} {n}</think>{n + 1 if n % 2 == 0 else 0}"

    turns = itertools.count()

    def judge(body, number):
        text = body["messages"][-1]["content"][-1]["text"]
        assert "That its final result is correct" in text and body["max_tokens"] == 1024 and body["temperature"] == 1
        if "guessed 10" in text:
            return "I cannot say"
        if "guessed 6" in text and next(turns) == 0:
            return 400
        return f'Well. {{"verdict": "{"yes" if "reckoned" in text else "no"}"}}'

    with served(answers) as server, served(judge, models=("critic",)) as second:
        words = ["eval", *sums, "--endpoint", server.url, "--judge", second.url, "-o", tmp_path / "out"]
        found = json.loads(call(capsys, *words, "--json")[0])
        assert len(second.asked) == 6 * 3 and all("+1?" in str(body["messages"]) for *_, body in second.asked)
        asked = [body["messages"][-1]["content"][-1]["text"] for *_, body in second.asked]
        assert all("Correct result: 3\n" in text for text in asked if "guessed 2" in text)
        cost = found["judge"]
        assert (cost["model"], cost["votes"], cost["answers"], cost["calls"], cost["cached"]) == ("critic", 3, 6, 18, 0)
        assert (cost["unread"], cost["unanswered"], cost["tokens"]) == (3, 1, 17 * 3)
        metrics = found["results"][0]["metrics"]
        assert metrics["cot_pass@1"]["mean"] == 3 / 12 and metrics["correct_frac"]["mean"] == 6 / 12
        assert metrics["judge/sound_frac"]["mean"] == 0.5
        second.asked.clear()
        again = json.loads(call(capsys, *words, "--json")[0])
        assert len(second.asked) == 3 and again["judge"]["cached"] == 15  # the answer that lacked a verdict
        assert again["results"] == found["results"] and len(server.asked) == 12
    assert len([*(tmp_path / "out").glob("verdicts-*.jsonl")]) == 1
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["judge"]["answers"] == 6
