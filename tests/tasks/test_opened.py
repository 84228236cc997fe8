"""Every recipe under a chat template that begins the answer: what a model writes there earns what the whole does.

Public reports of a format part that stayed 0 under such templates: trl#6966, ms-swift#6408."""

import pickle
import re
from dataclasses import replace
from functools import cache

import pytest

from tests.e2e.recipe_scores import CASES, think
from tests.tables import each
from vlrl.config import load
from vlrl.data.coordinates import Coordinates
from vlrl.rewards.text import EnvironmentAction, completion_for, parse_answer
from vlrl.task import load as load_task
from vlrl.task.tool_calls import calls_of
from vlrl.tasks import _web_actions  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
from vlrl.tools.tasks.score_rows import score_row
from vlrl.training.build_task import make_task
from vlrl.types import PastAction, Sample

BEGINNINGS = ("<think>", "<think>\n", "<think>\n\n</think>\n\n")


@cache
def task_of(name):
    return make_task(load(f"configs/{name}.yaml"))


def paid(name, completions, **line):
    case, task = CASES[name], task_of(name)
    rewards = score_row(task, {"sample": dict(case.sample), "completions": completions, **case.line, **line}, None)
    return [r["reward"] for r in rewards["rewards"]]


def written(given):
    return given["text"] if isinstance(given, dict) else given


def changed(given, text):
    return {**given, "text": text} if isinstance(given, dict) else text


@each("name", CASES)
def test_what_the_prompt_opened_is_paid_with_the_answer(name):
    """trl#6966: think-format reward always 0 because the template already opens <think>."""
    given = [(text, written(text), reward) for text, _, reward in CASES[name].scores]
    thinks = any("<think>" in text for _, text, _ in given)
    for opened in BEGINNINGS:
        rewards = paid(name, [changed(one, completion_for(text, opened)) for one, text, _ in given], opened=opened)
        for (_, text, expected), reward in zip(given, rewards, strict=True):
            assert reward == pytest.approx(expected) if text.startswith("<think>") or not thinks else (
                reward >= expected - 1e-9), (opened, text)  # an empty block has a form that a bare answer has not
    doubled = paid(name, [one for one, *_ in given], opened="<think>\n")
    assert all(reward <= expected + 1e-9 for (_, text, expected), reward in zip(given, doubled, strict=True)
               if text.startswith("<think>") and thinks)


@each("name", CASES)
def test_thinking_that_was_cut_earns_no_more_than_silence(name):
    """Thinking that names the answer, and never ends."""
    bare = [re.sub("</?answer>", "", written(text).rpartition("</think>")[2]) for text, *_ in CASES[name].scores]
    *cut, nothing = paid(name, [*(f"perhaps {text}, or" for text in bare), ""], opened="<think>\n")
    assert max(cut) <= nothing + 1e-9


def test_actions_behind_their_thinking():
    assert paid("qa/vision_r1_ptst", [think("5").removeprefix("<think>")]) == [0.0]
    task = load_task("recall", {})
    sample = task.samples("train")[0]
    turns = ("next", "next", task.oracle(sample))
    answer = parse_answer(f"Now.\n</think>\n\n{turns[-1]}", opened="<think>\n")
    assert task.score(sample, answer) == {"accuracy": 1.0, "format": 1.0}
    assert task.score(sample, parse_answer(turns[-1], opened="<think>\n")) == {"accuracy": 0.0, "format": 0.0}
    task = load_task("repair", {"base": "digits"})
    sample = task.samples("train")[0]
    right = task.other.oracle(sample)
    for text, done in ((f"I see.\n</think>\n\n{right}", True), (f"I see {right}", False), (right, False)):
        world = task.environment(sample)
        world.reset(0)
        action = EnvironmentAction(text, "<think>\n")
        assert world.step(pickle.loads(pickle.dumps(action))).done == done  # as it reaches another process
        turns = (PastAction(action=action, done=done),)
        assert task.score(sample, replace(parse_answer(text, opened="<think>\n"), turns=turns))["solved"] == done
    task = load_task("web", {})
    sample = Sample(id="1", row={"scale": 1.0, "width": 100, "height": 100, "processed_size": [100, 100]})
    task.coordinates = Coordinates()
    for form, text in (("call", "click(30, 40)"), ("ui_tars", "Thought: There.\nAction: click(start_box='(30,40)')")):
        action = EnvironmentAction(f"It is there.</think>\n{text}", "<think>")
        read = _web_actions.read(_web_actions.FORMS[form], task, sample, action)
        assert (read.verb, read.point) == ("click", (30, 40)) and _web_actions.FORMS[form].strict(action)
        with pytest.raises(_web_actions.UnreadableAction):
            _web_actions.read(_web_actions.FORMS[form], task, sample, EnvironmentAction(f"perhaps {text}", "<think>"))
    call = '<tool_call>{"name": "zoom", "arguments": {}}</tool_call>'
    assert [c.name for c in calls_of(EnvironmentAction(f"Look.</think>{call}", "<think>"))] == ["zoom"]
    assert calls_of(EnvironmentAction(f"Perhaps {call}", "<think>")) == []


