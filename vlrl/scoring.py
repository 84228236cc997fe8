"""Completions -> reward parts, under every safety the Task contract promises. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.errors import TaskError
from vlrl.task import Task, check_parts
from vlrl.types import Answer, Parts, Sample


@dataclass(frozen=True)
class Scored:
    """One answer's parts and reward; `error` says why a part was set to 0."""

    parts: Parts
    reward: float | None
    parsed: Any = None
    error: str | None = None


def score_group(task: Task, sample: Sample, answers: Sequence[Answer], step: int, services: Any = None) -> list[Scored]:
    """Scores the answers to one sample.

    A part that is NaN or a scorer that raises gives 0 and an `error`; None makes the rollout unscorable (reward None).
    Raises TaskError when parts and `rewards` do not name the same things: that is the task's bug, not the model's.
    """
    weights = task.weights_at(step)
    single = [_guarded(lambda a=a: task.score(sample, a)) for a in answers]
    together = _guarded(lambda: task.score_group(sample, answers, services))
    groups: Sequence[Parts] = together[0] if together[0] is not None else []
    if groups and len(groups) != len(answers):
        raise TaskError(f"task '{task.name}': score_group returned {len(groups)} results for {len(answers)} answers")
    out = []
    for i, (answer, (own, error)) in enumerate(zip(answers, single, strict=True)):
        parts = None if own is None or together[1] else {**own, **(groups[i] if groups else {})}
        out.append(_finish(task, sample, answer, parts, error or together[1], weights))
    return out


def _finish(task: Task, sample: Sample, answer: Answer, parts: Parts | None, error: str | None,
            weights: dict[str, float]) -> Scored:
    parsed, parse_error = _guarded(lambda: task.parse(sample, answer))
    if parts is None:
        return Scored(dict.fromkeys(weights, 0.0), 0.0, parsed, error)
    check_parts(task, parts)
    clean: Parts = {}
    for name, value in parts.items():
        if value is not None and not math.isfinite(value):
            clean[name], error = 0.0, error or f"part '{name}' was {value}"
        else:
            clean[name] = None if value is None else float(value)
    error = error or parse_error
    known = {name: value for name, value in clean.items() if value is not None}
    if len(known) < len(clean):
        return Scored(clean, None, parsed, error)
    return Scored(clean, float(task.combine(known, weights)), parsed, error)


def _guarded(call: Any) -> tuple[Any, str | None]:
    """The call's result, or the error it raised as text; a TaskError is the author's to mend and passes through."""
    try:
        return call(), None
    except TaskError:
        raise
    except Exception as error:  # a task's code may raise anything on hostile text; it is stored and counted
        return None, f"{type(error).__name__}: {error}"[:500]
