"""`@part`: says of a function for `task.parts` which reward parts it gives; see extra_parts.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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


def part(weights: Mapping[str, float], needs: Collection[str] = ()) -> Callable[[F], F]:
    """Marks `function(task, sample, answers, services, *, options)` as one that gives these parts of every answer."""
    def mark(function: F) -> F:
        setattr(function, ATTRIBUTE, Offer(dict(weights), tuple(needs)))
        return function

    return mark
