"""Converts completions to reward parts and rewards. Enforces the guarantees of the Task contract. Imports no torch."""

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
"""Largest absolute value of a part or reward. Squares and sums of larger values could be out of range on a GPU."""
_watch: Callable[[int], str | None] | None = None
"""The function `watch` given to `watching`; None outside of `watching`."""


@contextmanager
def watching(watch: Callable[[int], str | None]) -> Iterator[None]:
    """Context manager in which `watch(number of answers)` is called before each call of task code. If `watch` returns a
    string, the task code is not called, and the string is stored as the error; see subprocess_scorer.py."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


@dataclass(frozen=True)
class AnswerScore:
    """The reward parts, the reward and the correctness of one answer. `error` says why a part or the reward has no
    value."""

    parts: Parts
    reward: float | None
    parsed: Any = None
    error: str | None = None
    correct: bool | None = None
    """The result of Task.correct; None if the answer could not be scored."""
    steps: tuple[tuple[int, float], ...] = ()
    """(end, value) of each reasoning step, if a reward part has one value per step. `end` is a character offset in the
    completion. If several parts have values per step, those of the first part are used."""


MarkedScores = list[tuple[AnswerScore, list[Any] | None]]
"""The score of each answer, with the marks that task.overlay returns for the viewer (None if the call failed)."""


def score_group(task: Task, sample: Sample, answers: Sequence[Answer], step: int,
                services: Services | None = None) -> list[AnswerScore]:
    """Scores the answers to one sample. Without `services`, there are no answers to variants, and reward parts that
    need a service are left out.

    A part that is None makes the rollout unscorable: its reward is None. The same holds if a part is not a finite
    number or a scoring method raises; then `error` is set as well. The reward is not set to 0 because 0 could be the
    best reward of the group.

    Raises TaskError if a scoring method returns the wrong type, or part names other than those in `rewards`. These are
    bugs of the task and do not depend on the model's text."""
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
    """Scores the answers of a group with `score_group`, and the `others` (answers to variants) with `score_alone`.
    Returns two values: a list with (score, overlay marks) of each answer and then of each of the others, and the
    weights at `step` (reward part -> weight)."""
    task, _ = without_absent_parts(task, sample, answers, services)
    scored = [*score_group(task, sample, answers, step, services), *score_alone(task, sample, others, step)]
    return [(s, overlay_marks(task, sample, s.parsed)) for s in scored], task.of(sample).weights_at(step)


def score_alone(task: Task, sample: Sample, answers: Sequence[Answer], step: int) -> list[AnswerScore]:
    """Scores answers that do not belong to a group, such as those to a variant. Only the parts from `score` are
    available."""
    task = task.of(sample)
    weights, out = task.weights_at(step), []
    for answer in answers:
        own, error = _guarded(lambda a=answer: _own_parts(task, sample, a))
        if error is None:
            check_shape(task, own, "score")
        out.append(_finish(task, sample, answer, own, error, weights))
    return out


def _own_parts(task: Task, sample: Sample, answer: Answer) -> Any:
    """The reward parts from `score`. In an environment, the sums of the parts of all turns are added for the parts that
    `score` does not return; a part that is missing in a turn counts as 0 in this turn."""
    own = task.score(sample, answer)
    if not has_environment(task) or not isinstance(own, Mapping):
        return own
    names = dict.fromkeys([*task.weights, *(name for turn in answer.turns for name in turn.parts)])
    return {**{name: sum(turn.parts.get(name, 0.0) for turn in answer.turns) for name in names}, **own}


def without_score(scored: AnswerScore, error: str | None) -> AnswerScore:
    """Returns the score `scored` of an episode, unchanged if `error` is None. If `error` says why the episode's
    environment failed, the score gets this error and loses its reward, because such an episode must not be rewarded."""
    if error is None:
        return scored
    reason = error if error.startswith("reset:") else f"environment: {error}"
    return AnswerScore(dict.fromkeys(scored.parts), None, scored.parsed, reason)


def overlay_marks(task: Task, sample: Sample, parsed: Any) -> list[Any] | None:
    """The marks that `task.overlay` returns for a parsed answer, at most 1,000; None if the call fails."""
    marks, error = _guarded(lambda: list(itertools.islice(task.overlay(sample, parsed), _MOST_MARKS)))
    return None if error else marks


def sample_metrics(task: Task, sample: Sample, answer: Answer, parts: Parts) -> tuple[dict[str, float], str | None]:
    """Returns (the finite numbers in the result of `task.metrics`, a description of the first problem in this result).
    The description is None if there is no problem.

    A metric of None means "not measured for this sample": it is left out and is not a problem."""
    metrics, error = _guarded(lambda: task.metrics(sample, answer, parts))
    if error is None and not isinstance(metrics, Mapping):
        error = f"returned {type(metrics).__name__}, expected {{name: number}}"
    out: dict[str, float] = {}
    for name, given in ({} if error else metrics).items():
        value, problem = finite_number(given)
        if value is not None and isinstance(name, str):
            out[name] = value
        elif problem or not isinstance(name, str):
            error = error or f"{name!r} {problem or 'is not a name'}"
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
    correct, problem = (reaches(task.criterion, clean), None) if task.overridden else _guarded(
        lambda: task.correct(sample, answer, clean))
    steps = next((given for given in parts.values() if isinstance(given, StepValues)), None)
    ends = (max(0, end - len(answer.opened)) for end in steps.ends) if steps else ()  # offsets in the completion
    return AnswerScore(clean, reward, parsed, error or (problem and f"correct: {problem}"),
                       None if correct is None else bool(correct),
                       tuple(zip(ends, steps.values, strict=False)) if steps else ())


def _combined(task: Task, parts: dict[str, float], weights: dict[str, float]) -> tuple[float | None, str | None]:
    given, problem = _guarded(lambda: task.combine(parts, weights))
    if problem is None:
        value, problem = finite_number(given)
        if value is not None:
            return value, None
    return None, f"combine: {problem or 'returned None'}"


def _too_large(values: Mapping[str, float]) -> str | None:
    name = next((name for name, value in values.items() if abs(value) > LARGEST), None)
    return None if name is None else (f"{name} was {values[name]:g}, larger than the {LARGEST:g} up to which means "
                                      "and variances of rewards can be computed")


def _guarded(call: Any, answers: int = 1) -> tuple[Any, str | None]:
    """Calls task code. Returns (result, None), or (None, error text) if the code raises. A TaskError is raised again,
    because it is a bug that the author of the task has to fix.

    `answers` is the number of answers that the code handles. Inside `watching`, this number determines how long the
    code may run."""
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
