"""tools/evaluation/reasoning_judge.py: verdicts of a server on right answers, CoT-pass@k of them; asked once."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.test_evaluating import sums  # noqa: F401  # a fixture
from tests.cli.test_training import call
from tests.evaluation.http_stand_in import served
from tests.evaluation.test_summary import means, result, row
from vlrl.tools.evaluation.reasoning_judge import read_verdict


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


@given(st.text())
def test_any_text_has_a_verdict_or_none(text):
    assert read_verdict(text) in (True, False, None)
    assert read_verdict(text + '{"verdict": "no"}') is False


def test_cot_pass_at_k_of_planted_verdicts():
    """Three answers, of which two are right; the majority accepts one, any both, all none. Then a sample with none."""
    planted = [[(True, [True, True, False]), (True, [False, False, True]), (False, [])], [(False, [])] * 3]
    rows = [row(n, "x", right, i, verdicts=verdicts) for n, given in enumerate(planted)
            for i, (right, verdicts) in enumerate(given)]
    found = means(result(rows, 3))
    assert found["cot_pass@1"] == pytest.approx((1 / 3 + 0) / 2) and found["cot_pass@2"] == pytest.approx(2 / 3 / 2)
    assert found["cot_pass@3"] == 0.5 and found["cot_pass@3/all"] == 0
    assert found["cot_pass@1/any"] == pytest.approx(1 / 3)
    assert found["judge/sound_frac"] == 0.5 and found["pass@1"] == pytest.approx(1 / 3)
    # a right answer without a verdict is left out: one of two others is accepted
    rows[1]["verdicts"] = []
    assert means(result(rows[:3], 3))["cot_pass@2"] == 1 and "cot_pass@3" not in means(result(rows[:3], 3))
    assert means(result([row(0, "x", True, verdicts=[True])]))["cot_pass@1"] == 1
    assert not any(name.startswith(("cot", "judge")) for name in means(result([row(0, "x", True)])))


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
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["judge"]["answers"] == 6
