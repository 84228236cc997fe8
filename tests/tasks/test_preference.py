"""The preference task: recipes by hand, both orders, what an evaluation tells, cheats, bounds."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.tables import each, refused
from tests.tasks import scaffold
from tests.tasks.scaffold import assert_ok, scores, think
from vlrl.config.schema import DataSettings
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.services.missing import unserved_parts
from vlrl.task import load
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.tools.tasks.score_rows import score_row

ROW = {"id": "r1", "question": "What is it?", "responses": ["a cat {second}", "a dog"], "answer": 2}
built = partial(scaffold.built, "preference")


def judging(*replies):
    """A judge that gives these replies, and the questions it was asked."""
    asked = []

    def judge(questions):
        asked.extend(questions)
        return list(replies[:len(questions)])
    return Services(given={"judge": judge}), asked


def scored(*texts, services=None, **options):
    return scores(built(**options), ROW, *texts, services=services)


TABLES = {
    "direct": {"2": (1, 1), " 2\n": (1, 1), "2.": (1, 0), "Response 2": (1, 0), "1": (0, 1), "1 2": (0, 0), "": (0, 0),
               "2 1": (0, 0), "22": (0, 0), "12": (0, 0), "two": (0, 0), "both": (0, 0), think("2"): (0, 0),
               "The answer is 2": (0, 0), "2" * 9999: (0, 0)},
    "r1_reward": {think("2"): (1, 1), think(" 2 "): (1, 1), think("Response 2."): (1, 1), think("[[2]]"): (1, 1),
                  think("1"): (0, 1), think("1 2"): (0, 1), think("2 or 1"): (0, 1), think(""): (0, 1),
                  "<think>so</think>\n<answer>2</answer>": (1, 0), think("2") + "\n": (1, 0), "2": (0, 0),
                  "<answer>2</answer>": (1, 0), "<think>2": (0, 0), "<think>so</think>2": (0, 0),
                  "<think><answer>2</answer>": (0, 0), think("1", "<answer>2</answer>"): (0, 0),
                  think("2", "<answer>1</answer>"): (1, 0), "<answer>2</answer><answer>1</answer>": (0, 0),
                  "<answer>1</answer><answer>2</answer>": (0, 0), think("2") + "<answer>2</answer>": (0, 0),
                  think("-2"): (0, 1), think("2.0"): (0, 1), "": (0, 0)}}


@each("recipe", TABLES)
def test_recipes_by_hand(recipe):
    for text, (accuracy, format) in TABLES[recipe].items():
        (found,) = scored(text, recipe=recipe)
        assert found.parts == {"accuracy": accuracy, "format": format}, text
        assert found.reward == accuracy + format * {"direct": 0.1, "r1_reward": 0.5}[recipe]


def test_consistency_of_right_answers():
    """accuracy (1 + .5 consistency) + .5 format; wrong answers are not asked about."""
    services, asked = judging("It does: 1.0", "-1.0", "0.0", "no idea", "1.0 or rather -1.0")
    why = "one\ntwo\nthree\nfour"
    texts = [think("2", why), think("1"), *[think("2")] * 3, "<answer>2</answer>"]
    found = scored(*texts, recipe="r1_reward", services=services)
    assert [s.parts["consistency"] for s in found] == [1, 0, -1, 0, 0, -1]
    assert [s.reward for s in found] == [2, 0.5, 1, 1.5, 1.5, 0.5]
    assert len(asked) == 5 and "two\nthree\nfour\n" in asked[0] and "one" not in asked[0].split("\n")
    assert "response 2 is better" in asked[0] and "1.0" in asked[0]
    assert [s.parts["consistency"] for s in scored("1", "", recipe="r1_reward", services=judging()[0])] == [0, 0]


def test_without_a_judge_or_with_one_that_fails():
    row = {"sample": ROW, "completions": [think("1"), think("2")]}
    for completions in (row["completions"], [think("1")]):
        found = score_row(built(recipe="r1_reward"), {**row, "completions": completions}, Path())
        assert found["skipped"] == ["consistency"] and found["weights"] == {"accuracy": 1.0, "format": 0.5}
    task = built(recipe="r1_reward")
    with pytest.raises(ConfigError, match=r"needs the service 'judge'.* task\.rewards\.consistency=0"):
        unserved_parts(task, (), [task.sample_from_row(ROW)])
    assert unserved_parts(load("preference", {"recipe": "r1_reward", "rewards": {"consistency": 0}}), (), []) == [
        "consistency"]
    def judge(_questions):
        raise RuntimeError("gone")
    task = built(recipe="r1_reward")
    for failing, words in ((judge, "gone"), (lambda questions: [], "ValueError")):
        services = Services(given={"judge": failing})
        (found,) = score_group(task, task.sample_from_row(ROW), [parse_answer(think("2"))], 0, services)
        assert found.reward is None and words in (found.error or "")


def test_prompts_and_orders(data):
    task = built()
    (message,) = task.messages(task.sample_from_row(ROW))
    assert message["content"][-1]["text"].startswith(
        "[Question]: What is it?\n\n[Response 1]: a cat {second}\n\n[Response 2]: a dog\n\nWhich response")
    as_is, swapped, both = (samples(data, order=order)[1] for order in ("as_is", "swapped", "both"))
    assert [len(found) for found in (as_is, swapped, both)] == [6, 6, 12]
    assert [s.id for s in both[:4]] == ["r0", "r0-swapped", "r1", "r1-swapped"] == [s["id"] for s in both[:4]]
    for i in range(6):
        a, b = as_is[i], both[2 * i + 1]
        assert both[2 * i].row == a.row and b.row == swapped[i].row
        assert b["responses"] == a["responses"][::-1] and b["answer"] == 3 - a["answer"] and b["pair"] == a.id
    task, _ = samples(data)
    shown = task.messages(both[1])[0]["content"][-1]["text"]
    assert "[Response 1]: second 0\n\n[Response 2]: first 0\n\n" in shown
    assert [task.score(s, parse_answer("1"))["accuracy"] for s in both[:2]] == [1, 0]


test_rows_that_cannot_be_used = refused(DataError, lambda change: built().sample_from_row({**ROW, **change}), [
    ({"question": " "}, "question=' '"), ({"responses": ["a"]}, "responses="),
    ({"responses": "a b"}, "two non-empty strings"),
    ({"responses": ["a", ""]}, "two non-empty strings"), ({"responses": ["a", "a"]}, "neither can be better"),
    ({"answer": 0}, "answer=0"), ({"answer": True}, "answer=True"), ({"answer": "2"}, "answer='2'"),
    ({"answer": None}, "answer=None"), ({"answer": [1]}, "answer=")], start="row 'r1': .*")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**ROW, "id": f"r{i}", "answer": 1 + i % 2, "category": "abc"[i % 3],
                                        "responses": [f"first {i}", f"second {i}"]}) + "\n" for i in range(6)))
    return DataSettings(train=str(path))


def samples(data, **options):
    task = load("preference", options)
    task.data = data
    return task, task.samples("train")


def test_summary_by_hand(data):
    task, found = samples(data, order="both")
    said = [1, 2, 1, 1, None, 1, 2, 2, 2, 2, 1, 1]  # right, right; wrong, right; -, wrong; right, wrong; ...
    records = [{"sample": s.row, "parsed": a, "parts": {"accuracy": float(a == s["answer"])}}
               for s, a in zip(found, said, strict=True)]
    right = [r["parts"]["accuracy"] for r in records]
    assert right == [1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1]
    assert task.summarize(records) == pytest.approx({
        "accuracy/a": 3 / 4, "accuracy/b": 2 / 4, "accuracy/c": 1 / 4,
        "position_bias": (6 - 5) / 11,  # eleven answers, six of them 1, where 1 is right in five
        "pairs/agreement": 1 / 6, "pairs/accuracy": 1 / 6})
    assert task.summarize(records[::2]).keys() == {"accuracy/a", "accuracy/b", "accuracy/c", "position_bias"}
    assert task.summarize([]) == {}
    silent = task.summarize([{**record, "parsed": None} for record in records])
    assert silent["pairs/agreement"] == 0 and "position_bias" not in silent


@pytest.mark.slow
@pytest.mark.parametrize("order", ["as_is", "both"])
@pytest.mark.parametrize("recipe", TABLES)
def test_the_contract(recipe, order, data):
    task, _ = samples(data, recipe=recipe, order=order)
    assert_ok(task, samples=6)
