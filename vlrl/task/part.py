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
    """The declaration of a function for `task.parts`: the reward parts that it returns, and the services that it needs.
    """

    weights: Mapping[str, float]
    """Reward part -> its weight unless `task.rewards` sets another one. A part of weight 0 is only a metric."""
    needs: Collection[str] = ()
    readings: Callable[..., Sequence[Any]] | None = None
    """A function (task, sample, answers, *, options) that returns the texts whose log-probabilities a service computes
    before scoring (see Task.readings); None = the answers."""
    replaces_outcome: bool = False
    """Whether the function's first part decides if an answer is correct, instead of the task's outcome parts. It also
    takes over the weight of those parts."""


def part(weights: Mapping[str, float], needs: Collection[str] = (),
         readings: Callable[..., Sequence[Any]] | None = None, replaces_outcome: bool = False) -> Callable[[F], F]:
    """Decorates `function(task, sample, answers, services, *, options)`, which returns these reward parts for each
    answer of a group.

    `readings(task, sample, answers, *, options)` returns the texts whose log-probabilities a service computes before
    the function is called, like Task.readings; by default, these are the answers. With `replaces_outcome`, the
    function's first part replaces the task's rule, so that an answer is not rewarded by both; see PartSpec."""
    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, PartSpec(dict(weights), tuple(needs), readings, replaces_outcome))
        return function

    return mark
