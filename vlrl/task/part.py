"""The decorator `@part`, which declares the reward parts that a function for `task.parts` returns; see extra_parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "vlrl_part"


@dataclass(frozen=True)
class PartSpec:
    """The declaration of a function for `task.parts`: its reward parts, and the services that it needs."""

    weights: Mapping[str, float]
    """Reward part -> its weight unless `task.rewards` sets another one. A part of weight 0 is only a metric."""
    needs: Collection[str] = ()
    readings: Callable[..., Sequence[Any]] | None = None
    """The function that returns the texts whose log-probabilities a service computes, see `part`. None = the final
    answers."""
    replaces_outcome: bool = False
    """Whether the function's first part decides if an answer is correct, instead of the task's outcome parts. If so,
    this first part also takes over the weight of the outcome parts."""


def part(weights: Mapping[str, float], needs: Collection[str] = (),
         readings: Callable[..., Sequence[Any]] | None = None, replaces_outcome: bool = False) -> Callable[[F], F]:
    """Decorates a function (task, sample, answers, services, *, options) that returns reward parts for each answer of a
    group. `weights` maps each of these parts to its default weight, and `needs` names the services that the function
    uses.

    `readings(task, sample, answers, *, options)` returns the texts whose log-probabilities a service computes before
    the function is called, like Task.readings; by default, these are the answers. With `replaces_outcome`, the
    function's first part takes the place of the task's outcome parts, which are then not rewarded; see PartSpec."""
    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, PartSpec(dict(weights), tuple(needs), readings, replaces_outcome))
        return function

    return mark
