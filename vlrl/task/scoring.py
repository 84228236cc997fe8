"""Completions -> reward parts, under every safety the Task contract promises. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vlrl.config.registry import place
from vlrl.errors import TaskError, TrainingError
from vlrl.rewards.scalar import finite_number
from vlrl.rewards.worker import ending_forked_copies
from vlrl.task.base import Task, reaches
from vlrl.task.environment import has_environment
from vlrl.task.interface import check_parts, check_shape
from vlrl.task.services import Services, without_absent_parts
from vlrl.types import Answer, Parts, Sample, StepValues

_MOST_MARKS = 1000
LARGEST = 1e12
"""Of a part or reward; squares and sums of larger ones leave the range of the numbers that a GPU computes with."""
_watch: Callable[[int], str | None] | None = None
"""Told before a task's code is called for so many answers; a text that comes back is stored as the error instead."""


@contextmanager
def watching(watch: Callable[[int], str | None]) -> Iterator[None]:
    """`watch` is told of every call of a task's code, and may refuse it; see subprocess_scorer.py."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


@dataclass(frozen=True)
class AnswerScore:
    """One answer's parts, reward and outcome; `error` says why a part or the reward has no value."""

    parts: Parts
    reward: float | None
    parsed: Any = None
    error: str | None = None
    correct: bool | None = None
    """What Task.correct says; None where the answer is unscorable."""
    steps: tuple[tuple[int, float], ...] = ()
    """Of the first part that is given by steps: where each ends, in characters of the completion, and its value."""


MarkedScores = list[tuple[AnswerScore, list[Any] | None]]
"""Scored answers with what task.overlay draws of them."""


def score_group(task: Task, sample: Sample, answers: Sequence[Answer], step: int,
                services: Services | None = None) -> list[AnswerScore]:
    """Scores the answers to one sample. Without `services` there are no answers of variants either, and parts that need
    a service are left out.

    None as a part makes the rollout unscorable (reward None); so do, with an `error`, a part that is no finite number
    and a scorer that raises: 0 could be the best reward of the group. Raises TaskError when what the scorers
    return has the wrong shape, or parts and `rewards` do not name the same things: that is the task's bug, not the
    model's.
    """
    if not answers:
        return []
    task = task.of(sample)
    if services is None:
        services = Services()
        task, _ = without_absent_parts(task, sample, answers, services)
    weights = task.weights_at(step)
    single = [_guarded(lambda a=a: _own_parts(task, sample, a)) for a in answers]
    together, group_error = _guarded(lambda: task.score_group(sample, answers, services), len(answers))
    groups = [] if group_error else _checked_groups(task, together, len(answers))
    out = []
    for i, (answer, (own, error)) in enumerate(zip(answers, single, strict=True)):
        parts = None
        if error is None and group_error is None:
            check_shape(task, own, "score")
            parts = {**own, **(groups[i] if groups else {})}
            check_parts(task, parts)
        out.append(_finish(task, sample, answer, parts, error or group_error, weights))
    return out


def score_all(task: Task, sample: Sample, answers: Sequence[Answer], others: Sequence[Answer], step: int,
              services: Services) -> tuple[MarkedScores, dict[str, float]]:
    """Returns the answers of a group and then those aside, each with its marks (see score_group, score_alone,
    overlay_marks), and the weight of every part.
    """
    task, _ = without_absent_parts(task, sample, answers, services)
    scored = [*score_group(task, sample, answers, step, services), *score_alone(task, sample, others, step)]
    return [(s, overlay_marks(task, sample, s.parsed)) for s in scored], task.of(sample).weights_at(step)


def score_alone(task: Task, sample: Sample, answers: Sequence[Answer], step: int) -> list[AnswerScore]:
    """Scores answers that are in no group, those of a variant: with the parts of `score`; score_group's are left out.
    """
    task = task.of(sample)
    weights = task.weights_at(step)
    out = []
    for answer in answers:
        own, error = _guarded(lambda a=answer: _own_parts(task, sample, a))
        if error is None:
            check_shape(task, own, "score")
        out.append(_finish(task, sample, answer, own if error is None else None, error, weights))
    return out


def _own_parts(task: Task, sample: Sample, answer: Answer) -> Any:
    """Returns what `score` says; with an environment, over the sums of the episode's turns, where a part that a turn
    does not name counts 0.
    """
    own = task.score(sample, answer)
    if not has_environment(task) or not isinstance(own, Mapping):
        return own
    names = dict.fromkeys([*task.weights, *(name for turn in answer.turns for name in turn.parts)])
    return {**{name: sum(turn.parts.get(name, 0.0) for turn in answer.turns) for name in names}, **own}


def without_score(scored: AnswerScore, error: str | None) -> AnswerScore:
    """Returns the scores without a value where the environment failed: its errors are never paid."""
    if error is None:
        return scored
    reason = error if error.startswith("reset:") else f"environment: {error}"
    return AnswerScore(dict.fromkeys(scored.parts), None, scored.parsed, reason)


def overlay_marks(task: Task, sample: Sample, parsed: Any) -> list[Any] | None:
    """Returns what `task.overlay` draws of a parsed answer and of the target, at most 1,000 marks; None when it
    fails.
    """
    marks, error = _guarded(lambda: list(itertools.islice(task.overlay(sample, parsed), _MOST_MARKS)))
    return None if error else marks


def sample_metrics(task: Task, sample: Sample, answer: Answer, parts: Parts) -> tuple[dict[str, float], str | None]:
    """Returns the finite numbers among `task.metrics`, and the first thing that was wrong with it.

    None stands for "not measured here" and is left out without an error.
    """
    metrics, error = _guarded(lambda: task.metrics(sample, answer, parts))
    if error is None and not isinstance(metrics, Mapping):
        error = f"returned {type(metrics).__name__}, expected {{name: number}}"
    out: dict[str, float] = {}
    for name, given in ({} if error else metrics).items():
        value, problem = finite_number(given)
        if value is not None and isinstance(name, str):
            out[name] = value
        elif problem or not isinstance(name, str):
            error = error or f"{name!r} {problem or 'is no name'}"
    return out, error and f"metrics: {error}"


def _checked_groups(task: Task, groups: Any, count: int) -> Sequence[Parts]:
    if not isinstance(groups, (list, tuple)):
        raise TaskError(f"task '{task.name}': score_group returned {type(groups).__name__}, expected a list of "
                        "{part: number}, one per answer, or []")
    if groups and len(groups) != count:
        raise TaskError(f"task '{task.name}': score_group returned {len(groups)} results for {count} answers")
    for parts in groups:
        check_shape(task, parts, "score_group")
    return groups


def _finish(task: Task, sample: Sample, answer: Answer, parts: Parts | None, error: str | None,
            weights: dict[str, float]) -> AnswerScore:
    parsed, parse_error = _guarded(lambda: task.parse(sample, answer))
    if parts is None:
        return AnswerScore(dict.fromkeys(weights), None, parsed, error)
    clean: Parts = {}
    for name, given in parts.items():
        value, problem = finite_number(given)
        clean[name] = value
        error = error or (problem and f"part '{name}' {problem}")
    error = error or parse_error
    known = {name: value for name, value in clean.items() if value is not None}
    if len(known) < len(clean):
        return AnswerScore(clean, None, parsed, error)
    reward, problem = _combined(task, known, weights)
    problem = problem or _too_large({**{f"part '{k}'": v for k, v in known.items()}, "reward": reward or 0})
    if reward is None or problem:
        small = {name: value if abs(value) <= LARGEST else None for name, value in known.items()}
        return AnswerScore(small, None, parsed, error or problem)
    correct, problem = _correct(task, sample, answer, clean)
    steps = next((given for given in parts.values() if isinstance(given, StepValues)), None)
    return AnswerScore(clean, reward, parsed, error or problem, correct, _steps(steps, answer) if steps else ())


def _steps(steps: StepValues, answer: Answer) -> tuple[tuple[int, float], ...]:
    """Returns where each step ends in the completion, which begins behind what its prompt has opened, and its value."""
    ends = (max(0, end - len(answer.opened)) for end in steps.ends)
    return tuple(zip(ends, steps.values, strict=False))


def _correct(task: Task, sample: Sample, answer: Answer, parts: Parts) -> tuple[bool | None, str | None]:
    """Returns what the task says, or the settings in its place."""
    if task.overridden:
        return reaches(task.criterion, parts), None
    correct, problem = _guarded(lambda: task.correct(sample, answer, parts))
    return None if correct is None else bool(correct), problem and f"correct: {problem}"


def _combined(task: Task, parts: dict[str, float], weights: dict[str, float]) -> tuple[float | None, str | None]:
    """Returns the reward, or None and why."""
    given, problem = _guarded(lambda: task.combine(parts, weights))
    if problem is None:
        value, problem = finite_number(given)
        if value is not None:
            return value, None
    return None, f"combine: {problem or 'gave None'}"


def _too_large(values: Mapping[str, float]) -> str | None:
    """Returns why the first of these values cannot be averaged, or None."""
    name = next((name for name, value in values.items() if abs(value) > LARGEST), None)
    return None if name is None else (f"{name} was {values[name]:g}, beyond the {LARGEST:g} up to which means and "
                                      "variances of rewards can be computed")


def _guarded(call: Any, answers: int = 1) -> tuple[Any, str | None]:
    """Returns the call's result, or the error it raised as text; a TaskError is the author's to mend and passes
    through.

    The call deals with so many `answers`, which decides how long it may take.
    """
    refused = _watch(answers) if _watch else None
    if refused:
        return None, refused
    try:
        with ending_forked_copies():
            return call(), None
    except (TaskError, TrainingError):
        raise
    except (Exception, SystemExit) as error:  # a task's code may raise anything on hostile text: stored and counted
        at = place(error).removesuffix(": ")
        return None, f"{type(error).__name__}: {error}"[:500] + (f" ({at})" if at else "")
