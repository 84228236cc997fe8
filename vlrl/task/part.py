"""`@part`: says of a function for `task.parts` which reward parts it gives; see extra_parts.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "vlrl_part"


@dataclass(frozen=True)
class PartSpec:
    """What a function gives, and of which services."""

    weights: Mapping[str, float]
    """Part -> its weight where task.rewards does not say another; 0 = a metric."""
    needs: Collection[str] = ()
    readings: Callable[..., Sequence[Any]] | None = None
    """(task, sample, answers, *, options) -> what a service of log-probabilities is to read for it; None = the answers.
    """
    replaces_outcome: bool = False
    """Whether its first part says whether an answer is right, and so takes the weight of the task's own parts that
    do."""


def part(weights: Mapping[str, float], needs: Collection[str] = (),
         readings: Callable[..., Sequence[Any]] | None = None, replaces_outcome: bool = False) -> Callable[[F], F]:
    """Marks `function(task, sample, answers, services, *, options)` as one that gives these parts of every answer.

    `readings(task, sample, answers, *, options)` says what a service of log-probabilities reads for it before, as
    Task.readings does; without it these are the answers. With `replaces_outcome` an answer is not paid by it and by the
    task's own rule: see Offer."""
    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, PartSpec(dict(weights), tuple(needs), readings, replaces_outcome))
        return function

    return mark
