"""Every recipe under a chat template that begins the answer: what a model writes there earns what the whole does.

Public reports of a format part that stayed 0 under such templates: trl#6966, ms-swift#6408.
"""

import re
from functools import cache

import pytest

from tests.e2e.recipe_scores import CASES, think
from vlrl.config import load
from vlrl.rewards.text import written_after
from vlrl.tools.score_rows import score_row
from vlrl.training.build_task import make_task

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


@pytest.mark.parametrize("name", CASES)
def test_what_the_prompt_opened_is_paid_with_the_answer(name):
    """trl#6966: think-format reward always 0 because the template already opens <think>."""
    given = [(text, written(text), reward) for text, _, reward in CASES[name].scores]
    thinks = any("<think>" in text for _, text, _ in given)
    for opened in BEGINNINGS:
        rewards = paid(name, [changed(one, written_after(text, opened)) for one, text, _ in given], opened=opened)
        for (_, text, expected), reward in zip(given, rewards, strict=True):
            assert reward == pytest.approx(expected) if text.startswith("<think>") or not thinks else (
                reward >= expected - 1e-9), (opened, text)  # an empty block has a form that a bare answer has not
    doubled = paid(name, [one for one, *_ in given], opened="<think>\n")
    assert all(reward <= expected + 1e-9 for (_, text, expected), reward in zip(given, doubled, strict=True)
               if text.startswith("<think>") and thinks)


@pytest.mark.parametrize("name", CASES)
def test_thinking_that_was_cut_earns_no_more_than_silence(name):
    """Thinking that names the answer, and never ends."""
    bare = [re.sub("</?answer>", "", written(text).rpartition("</think>")[2]) for text, *_ in CASES[name].scores]
    *cut, nothing = paid(name, [*(f"perhaps {text}, or" for text in bare), ""], opened="<think>\n")
    assert max(cut) <= nothing + 1e-9


def test_the_beginning_is_part_of_a_row():
    assert paid("qa/vision_r1_ptst", [think("5").removeprefix("<think>")]) == [0.0]
