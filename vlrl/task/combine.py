"""How the parts of an answer become its reward: `task.combine`. No torch.

    sum                     the weighted sum of all parts
    product                 the product of the weighted parts
    gate:format             the other parts count only where `format` is above 0
    max:rule,judge          the larger of the two weighted parts, and the weighted rest
    my_rules.py:reward      anyone's own function (parts, weights) -> float

A part of weight 0 is left out of products and maxima. A part that an answer does not have (a variant's, or one that
needs an absent service) is left out too; a gate that is not there stands open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import pydantic

from vlrl.config.base import refuse_bool
from vlrl.config.registry import resolve
from vlrl.errors import ConfigError, did_you_mean

Weight = float | Sequence[Sequence[float]]
"""A number, or [[step, weight], ...] joined by straight lines and constant outside."""
_Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_WEIGHT = pydantic.TypeAdapter(_Finite | Annotated[list[tuple[_Finite, _Finite]], pydantic.Field(min_length=1)])

Numbers = Mapping[str, float]
Combine = Callable[[Numbers, Numbers], float]
"""(raw parts of one answer, the weights of the step) -> its reward."""


def weighted(parts: Numbers, weights: Numbers) -> dict[str, float]:
    """Weight times value of every part."""
    return {name: weights[name] * value for name, value in parts.items() if name in weights}


def total(parts: Numbers, weights: Numbers) -> float:
    """Returns the weighted sum."""
    return sum(weighted(parts, weights).values())


def product(parts: Numbers, weights: Numbers) -> float:
    """Returns the product of the weighted parts; 0 without any."""
    counted = [value for name, value in weighted(parts, weights).items() if weights[name]]
    return math.prod(counted) if counted else 0.0


def gate(parts: Numbers, weights: Numbers, part: str) -> float:
    """Returns the weighted sum where `part` is above 0, else what `part` itself pays."""
    shut = part in parts and not parts[part] > 0
    return total({part: parts[part]} if shut else parts, weights)


def largest(parts: Numbers, weights: Numbers, *names: str) -> float:
    """Returns the largest of the weighted parts `names`, plus the weighted sum of the others."""
    values = weighted(parts, weights)
    rivals = [values.pop(name) for name in names if weights.get(name) and name in values]
    return max(rivals, default=0.0) + sum(values.values())


COMBINE: dict[str, tuple[Callable[..., float], int, int | None]] = {
    "sum": (total, 0, 0), "product": (product, 0, 0), "gate": (gate, 1, 1), "max": (largest, 2, None)}
"""Ways to combine by name, and how many parts they name: at least, at most."""


def make_combine(given: str, known: Collection[str]) -> Combine:
    """Returns the function that `task.combine` stands for. Raises ConfigError for a name or a part that is not
    `known`.
    """
    head, colon, rest = given.partition(":")
    if head not in COMBINE:
        return resolve("task.combine", given, COMBINE)
    function, least, most = COMBINE[head]
    names = [name.strip() for name in rest.split(",")] if colon else []
    if not least <= len(names) <= (len(names) if most is None else most) or len({*names}) < len(names):
        example = {"gate": "gate:format", "max": "max:rule,judge"}.get(head, head)
        raise ConfigError(f"task.combine={given!r} names {len(names)} parts: write it as {example}")
    for name in names:
        if name not in known:
            raise ConfigError(f"task.combine={given!r}: the task has no part {name!r}.{did_you_mean(name, known)} "
                              f"Its parts: {', '.join(known)}.")
    return partial(_combined, function, names)


def _combined(function: Callable[..., float], names: Collection[str], parts: Numbers, weights: Numbers) -> float:
    return function(parts, weights, *names)


# --- weights ----------------------------------------------------------------------------------------------------------


def weight_at(weight: Weight, step: int) -> float:
    """Returns a weight, or the value at `step` of the line through [[step, weight], ...]."""
    if isinstance(weight, (int, float)):
        return float(weight)
    import numpy as np

    steps, values = zip(*weight, strict=True)
    return float(np.interp(step, steps, values))


def checked_weights(known: Mapping[str, Weight], given: Mapping[str, Any]) -> dict[str, Weight]:
    checked: dict[str, Weight] = {}
    for part, weight in {**known, **given}.items():
        if part not in known:
            raise ConfigError(f"unknown setting 'task.rewards.{part}'.{did_you_mean(part, known)} "
                              f"This task's parts: {', '.join(known)}.")
        try:
            checked[part] = found = _WEIGHT.validate_python(refuse_bool(float, weight))
            in_order = not isinstance(found, list) or all(a[0] < b[0] for a, b in pairwise(found))
        except ValueError:
            in_order = False
        if not in_order:
            raise ConfigError(f"task.rewards.{part}={weight!r}: give a finite number, or [[step, weight], ...] with "
                              "steps that rise")
    return checked
