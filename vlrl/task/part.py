"""`@part`: says of a function for `task.parts` which reward parts it gives; see extra_parts.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "vlrl_part"


@dataclass(frozen=True)
class Offer:
    """What a function gives, and of which services."""

    weights: Mapping[str, float]
    """Part -> its weight where task.rewards does not say another; 0 = a metric."""
    needs: Collection[str] = ()
    readings: Callable[..., Sequence[Any]] | None = None
    """(task, sample, answers, *, options) -> what a service of log-probabilities is to read for it; None = the answers.
    """


def part(weights: Mapping[str, float], needs: Collection[str] = (),
         readings: Callable[..., Sequence[Any]] | None = None) -> Callable[[F], F]:
    """Marks `function(task, sample, answers, services, *, options)` as one that gives these parts of every answer.

    `readings(task, sample, answers, *, options)` says what a service of log-probabilities reads for it before, as
    Task.readings does; without it these are the answers."""
    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, Offer(dict(weights), tuple(needs), readings))
        return function

    return mark
