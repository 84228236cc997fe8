"""Guidance for retries (algo.guided.words): each function maps `FirstAnswers` to a text that is added after the
question, or to None if there should be no retry.

Guidance is part of the prompt and never trained on. Evaluations do not use guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from vlrl.config.base import Share
from vlrl.config.registry import failure
from vlrl.errors import TaskError, VlrlError
from vlrl.rewards.text import answer_offset, parse_answer
from vlrl.task import Task
from vlrl.task.interface import given_answer
from vlrl.types import Answer, Sample

_Shares = Annotated[tuple[Share, ...], Field(min_length=1)]


@dataclass(frozen=True, eq=False)
class FirstAnswers:
    """The G completions of a prompt without guidance, on which a retry is based."""

    task: Task
    sample: Sample
    answers: Sequence[Answer]
    """[G] the completions."""
    correct: Sequence[bool | None]
    """[G] whether each completion is correct; None = unknown."""
    level: int = 0
    """Number of earlier retry rounds of this prompt in this step."""

    @property
    def wrong(self) -> Answer | None:
        """The first completion known to be wrong; None if there is none."""
        return next((a for a, right in zip(self.answers, self.correct, strict=True) if right is False), None)


Guidance = Callable[..., str | None]
"""A function (FirstAnswers, options) -> guidance text, or None for no retry."""


def task_guidance(t: FirstAnswers) -> str | None:
    """Returns the text of Task.guidance in the first retry round, None in later rounds or if there is no text.
    Agent-RLVR (arXiv 2506.11425)."""
    return guidance_of(t.task, t.sample, t.answers) if t.level == 0 else None


def hint(t: FirstAnswers, shares: _Shares = (0.25, 0.5, 0.75)) -> str | None:
    """Returns guidance with the beginning of the given solution; None if no solution is given or all of `shares` are
    used up. The first retry round shows the fraction shares[0] of the solution's characters, the next round (if no
    retry is correct) the fraction shares[1], and so on. The hint never contains the final answer, which is our
    choice.

    GHPO: Adaptive Guidance for Stable and Efficient LLM Reinforcement Learning (arXiv 2507.10628)."""
    text = given_answer(t.task, t.sample) if t.level < len(shares) else None
    if not text:
        return None
    begun = text[:min(int(shares[t.level] * len(text)), answer_offset(text))].rstrip()
    return f"This is how a correct solution begins. Go on from there:\n{begun}" if begun else None


def true_answer(t: FirstAnswers) -> str | None:
    """Returns guidance that states the true answer and asks to explain it; None if the answer is unknown, or in a later
    retry round. ExPO: Unlocking Hard Reasoning with Self-Explanation-Guided Reinforcement Learning (arXiv
    2507.02834); the wording is ours."""
    answer = _final(t) if t.level == 0 else None
    return answer and (f"The correct answer is: {answer}\nExplain step by step how to find it, and end with it in the "
                       "form that is asked for.")


def solution(t: FirstAnswers) -> str | None:
    """Returns guidance that shows the given solution and asks to rewrite it in the policy's own words; None if no
    solution is given, or in a later retry round. EGSR (arXiv 2505.08364); the wording is ours."""
    text = given_answer(t.task, t.sample) if t.level == 0 else None
    return text and f"This is a correct solution:\n{text}\nSolve the problem again in your own words."


def critique(t: FirstAnswers) -> str | None:
    """Returns guidance that quotes the first wrong completion, says that it is wrong, and gives the true answer if that
    is known. Returns None if no completion is known to be wrong, and in later retry rounds.

    Critique-GRPO: Advancing LLM Reasoning with Natural Language and Numerical Feedback (arXiv 2506.03106), with its
    rule-based critiques; the wording is ours."""
    if t.level or t.wrong is None:
        return None
    right = _final(t)
    return (f"This answer was given:\n{t.wrong.text}\nIt is wrong{f'; the correct answer is: {right}' if right else ''}"
            "\nFind the mistake, and answer the question again.")


WORDS: dict[str, Guidance] = {"task": task_guidance, "hint": hint, "answer": true_answer, "solution": solution,
                           "critique": critique}


def guidance_of(task: Task, sample: Sample, answers: Sequence[Answer]) -> str | None:
    """Returns the text of Task.guidance for a retry; None if the task has no guidance or an empty text. Raises
    TaskError if `guidance` fails, or returns anything but a string or None."""
    task = task.of(sample)
    try:
        guidance: Any = task.guidance(sample, answers)
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': guidance() failed for sample '{sample.id}': {failure(error)}") from error
    if guidance is not None and not isinstance(guidance, str):
        raise TaskError(f"task '{task.name}': guidance() returned {type(guidance).__name__} for sample "
                        f"'{sample.id}', but it must return a string or None")
    return guidance or None


def _final(t: FirstAnswers) -> str | None:
    text = given_answer(t.task, t.sample)
    return parse_answer(text).final or None if text else None
