"""`@part` declares which reward parts a function for `task.parts` gives; see extra_parts.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "vlrl_part"


@dataclass(frozen=True)
class PartSpec:
    """The parts a function gives, and the services it needs."""

    weights: Mapping[str, float]
    """Part -> its weight unless task.rewards sets another; 0 = a metric."""
    needs: Collection[str] = ()
    readings: Callable[..., Sequence[Any]] | None = None
    """(task, sample, answers, *, options) -> what a service of log-probabilities evaluates for it; None = the
    answers."""
    replaces_outcome: bool = False
    """Whether its first part decides whether an answer is right, and takes the weight of the task's own outcome
    parts."""


def part(weights: Mapping[str, float], needs: Collection[str] = (),
         readings: Callable[..., Sequence[Any]] | None = None, replaces_outcome: bool = False) -> Callable[[F], F]:
    """Marks `function(task, sample, answers, services, *, options)` as giving these parts of every answer.

    `readings(task, sample, answers, *, options)` says what a service of log-probabilities evaluates for it before, as
    Task.readings does; by default the answers. With `replaces_outcome` an answer is not rewarded by both it and the
    task's own rule: see PartSpec."""
    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, PartSpec(dict(weights), tuple(needs), readings, replaces_outcome))
        return function

    return mark
