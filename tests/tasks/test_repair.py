"""Repair: attempts are judged by another task, and the message says nothing of its target."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, refused
from vlrl.data.coordinates import make
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group
from vlrl.tasks.repair import WORDS, JudgedAttempt, level  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
from vlrl.types import PastAction


def repair(**given) -> Any:
    task = load("repair", {"base": "grounding", "base_settings": {"drawn": True, "count": 40}, **given})
    task.coordinates = make("norm1000")
    return task


def played(task, sample, actions):
    world, steps = task.environment(sample), []
    assert not world.reset(3).text
    for action in actions:
        steps.append(world.step(action))
        if steps[-1].done:
            break
    return steps


def scored(task, sample, actions):
    steps = played(task, sample, actions)
    turns = tuple(PastAction(action=a, parts=s.parts) for a, s in zip(actions, steps, strict=False))
    return score_group(task, sample, [replace(parse_answer(turns[-1].action), turns=turns)], 0)[0]


def half(task, sample):
    """A box with half of the target's area."""
    box = task.other.coordinates.from_original(sample, sample["boxes"][0]["box"])
    return f"[{box[0]}, {box[1]}, {box[2]}, {(box[1] + box[3]) / 2}]"


def test_a_second_attempt_after_a_message():
    task = repair()
    sample = task.samples("train")[0]
    right, wrong = task.oracle(sample), half(task, sample)
    steps = played(task, sample, [wrong, right])
    assert [s.done for s in steps] == [False, True]
    assert steps[0].observation.text.startswith("That is not right. ") and "partly right" in steps[0].observation.text
    assert steps[1].observation.text == ""
    (first,), (second,) = ([task.judged(sample, parse_answer(a)).reward] for a in (wrong, right))
    result = scored(task, sample, [wrong, right])
    assert result.parts == pytest.approx({"final": second, "first": first, "improvement": second - first,
                                          "solved": 1.0})
    assert result.correct and result.reward == pytest.approx(second) and second > first
    paid = scored(repair(rewards={"improvement": 2.0}), sample, [wrong, right])
    assert paid.reward == pytest.approx(second + 2 * (second - first))
    turns = (PastAction(action=wrong), PastAction(action=right))
    metrics = task.metrics(sample, replace(parse_answer(right), turns=turns), result.parts)
    assert metrics == {"attempts": 2.0, "repaired": 1.0}


def test_the_reward_is_that_of_the_other_task():
    task, other = repair(), load("grounding", {"drawn": True, "count": 40})
    other.coordinates = make("norm1000")
    for sample, plain in zip(task.samples("heldout")[:5], other.samples("heldout")[:5], strict=True):
        assert sample.row == plain.row and task.messages(sample) == other.messages(plain)
        for text in (other.oracle(plain), half(task, sample), "no box", ""):
            single = score_group(other, plain, [parse_answer(text)], 0)[0]
            result = scored(task, sample, [text, text])
            assert result.parts["final"] == result.parts["first"] == single.reward
            assert result.parts["improvement"] == 0 and result.correct == single.correct


def test_it_ends_when_right_or_after_the_last_attempt():
    task = repair(attempts=4)
    sample = task.samples("train")[1]
    assert len(played(task, sample, [task.oracle(sample), "more"])) == 1
    assert len(played(task, sample, ["no"] * 9)) == 4
    assert [s.observation.text == "" for s in played(task, sample, ["no"] * 9)] == [False, False, False, True]
    made_worse = scored(repair(), sample, [half(task, sample), "no"])
    assert made_worse.parts["improvement"] < 0 and made_worse.reward == made_worse.parts["final"] == 0
    task = repair()
    task.other.score = lambda sample, answer: {"iou": None}  # pyright: ignore
    sample = task.other.samples("train")[0]
    (step,) = played(task, sample, ["[1, 2, 3, 4]"])
    assert step.done and scored(task, sample, ["[1, 2, 3, 4]"]).reward is None
    assert task.judged(sample, parse_answer("")) == JudgedAttempt({"iou": None}, None, None)
    rows = [{"id": "a", "plan": {"speed": "STOP", "path": "STRAIGHT"}}]
    task = load("repair", {"base": "driving", "base_settings": {"recipe": "alphadrive"}})
    task.other.samples = lambda split: [task.sample_from_row(row) for row in rows]  # pyright: ignore
    with pytest.raises(ConfigError, match=r"its part 'speed' compares the answers of a group.*rewards: {speed: 0}"):
        task.samples("train")
    task = repair(prompt="Where is {expression}?")
    sample = task.samples("train")[0]
    assert task.templates == ("Where is {expression}?",)
    assert task.messages(sample)[-1]["content"][-1]["text"] == f"Where is {sample['expression']}?"


@settings(max_examples=40)
@given(st.integers(0, 39), st.text() | st.lists(st.integers(0, 1000), max_size=5).map(str),
       st.sampled_from(["parts", "verdict"]))
def test_the_message_is_one_of_a_few_whatever_the_target(place, text, message):
    """So no target can be in it: all messages are known without any sample."""
    task = repair(message=message)
    parts = [name for name, weight in task.other.weights.items() if weight]
    known = {f"That is not right. {'; '.join(f'{n}: {w}' for n, w in zip(parts, words, strict=True))}. Answer again."
             for words in product(WORDS, repeat=len(parts))}
    if message == "verdict":
        known = {"That is not right. Answer again."}
    (step, *_) = played(task, task.samples("train")[place], [text])
    assert step.observation.text in known | {""} and (step.observation.text == "") == step.done


test_how_right_a_part_is = by_hand(level, [
    (1.0, 1.0, 1.0, "right"), (0.99, 1.0, 1.0, "partly right"), (0.0, 1.0, 1.0, "wrong"), (-2.0, 1.0, 1.0, "wrong"),
    (1.0, 1.0, 2.0, "partly right"), (0.0, -1.0, 1.0, "right"), (0.5, -1.0, 1.0, "wrong")])
test_what_it_refuses = refused(ConfigError, lambda given: repair(**given), [
    ({"base": "recall", "base_settings": {}}, "task.base=recall: its episodes have several turns already"),
    ({"base": "repair", "base_settings": {}}, "repair takes a task with one answer"),
    ({"base": "nowhere"}, "no built-in task"), ({"base_settings": {"drawing": True}}, "unknown setting 'task.drawing'"),
    ({"attempts": 1}, "task.attempts")])
