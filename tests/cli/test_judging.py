"""`vlrl judge check`: figures by hand of a judge that errs in known ways, over real HTTP."""

import json

import pytest

from tests.cli.test_training import call
from tests.evaluation.http_stand_in import served
from tests.services.stub import quotes, text_of
from vlrl.services.judge_prompts import _TASKS

SAMPLE = {"id": "1", "question": "2 + 2?", "answer": "4", "answer_type": "text"}
ANSWERS = [("4", True), ("four", True), ("vier", True), ("5", False), ("6", False), ("seven", False), ("8", False)]
SAID = {"4": "yes", "four": "yes", "vier": "no", "5": "no", "6": "yes", "seven": "no", "8": None}
"""By the judge: one of three right ones is missed, one of four wrong ones accepted, one has no verdict."""


def script(body, n):
    said = quotes(body)
    if "first" in said:  # the larger number, and whatever is first where one is "x"
        first = said["second"] != "x" and (said["first"] == "x" or int(said["first"]) > int(said["second"]))
        return json.dumps({"better": "first" if first or "x" in said.values() else "second"})
    verdict = SAID[said["answer"].split("\n")[0]]
    if text_of(body).startswith(_TASKS[1]) and said["answer"] == "5":
        verdict = "yes"  # one wording of three changes one verdict
    return 400 if verdict is None else json.dumps({"verdict": verdict})


@pytest.fixture
def files(tmp_path):
    rows = [{"sample": SAMPLE, "answer": f"<answer>{text}</answer>", "correct": right} for text, right in ANSWERS]
    rows += [{"sample": SAMPLE, "responses": ["9", "1"], "better": 1},
             {"sample": SAMPLE, "responses": ["2", "3"], "better": 1},
             {"sample": SAMPLE, "responses": ["x", "3"], "better": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "qa.yaml").write_text("task: {name: qa}\nmodel: {name: none}\n")
    return tmp_path


def test_a_judge_and_a_rule_against_labels(files, capsys):
    with served(script, models=("critic",)) as server:
        words = ["judge", "check", files / "rows.jsonl", "--config", files / "qa.yaml",
                 f"services.judge.url={server.url}", "services.judge.model=critic",
                 "services.judge.retries=0", "services.judge.price_out=1e6"]
        found = json.loads(call(capsys, *words, "--json")[0])
        assert found["judge"] == {
            "answers": 7, "unanswered": 1, "agreement": pytest.approx(4 / 6), "false_positives": 1,
            "false_positive_rate": pytest.approx(1 / 3), "false_negatives": 1,
            "false_negative_rate": pytest.approx(1 / 3)}
        assert found["rule"]["false_negatives"] == 2 and found["rule"]["false_positives"] == 0  # "four" and "vier"
        assert found["reworded"] == pytest.approx(1 / 12)
        assert found["injected_accepted"] == pytest.approx(1 / 3)  # the one that it accepts anyway
        # orders: 9 > 1 right twice; 3 > 2 wrong twice; of "x" the first place decides: once right
        assert found["pairs"] == {"pairs": 3, "unanswered": 0, "agreement": pytest.approx(3 / 6),
                                  "order_decides": pytest.approx(1 / 3), "position_bias": pytest.approx(4 / 6 - 0.5)}
        assert found["cost"]["calls"] == len(server.asked) == 7 * 3 + 4 + 6
        assert found["cost"]["price"] == found["cost"]["tokens_out"] == 3 * (len(server.asked) - 4)
        text, _ = call(capsys, *words)
        assert "33.3%" in text and "the order decides 33.3%, first place +16.7%" in text
    text, _ = call(capsys, "judge", "check", files / "rows.jsonl", "--config", files / "qa.yaml")
    assert "rule" in text and "2 (66.7%)" in text and "cost" not in text


def test_bad_rows_are_named(files, capsys):
    for row, said in (
            ({"sample": SAMPLE, "answer": "4"}, "row 1: correct=None must be true or false"),
            ({"sample": SAMPLE, "answer": 4, "correct": True}, "row 1: answer='4' must be a string"),
            ({"sample": SAMPLE, "responses": ["4"], "better": 1}, "responses must be two strings"),
            ({"sample": SAMPLE, "responses": ["4", "5"], "better": True}, "better=True must be 1 or 2"),
            ({"id": "none", "answer": "4", "correct": True}, "is not a sample of train or heldout")):
        (files / "rows.jsonl").write_text(json.dumps(row) + "\n")
        _, error = call(capsys, "judge", "check", files / "rows.jsonl", "--config", files / "qa.yaml", code=1)
        assert said in error
