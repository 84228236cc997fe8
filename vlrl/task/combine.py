"""How the parts of an answer become its reward: `task.combine`. No torch.

    sum                     the weighted sum of all parts
    product                 the product of the weighted parts
    gate:format             the other parts count only if `format` is above 0
    gate:accuracy>=0.8      the same from 0.8 on: the gated accumulation of G-RA
    tool_star:format,accuracy,tools     -1, 0 or the weighted sum: by format, then by accuracy
    max:rule,judge          the larger of the two weighted parts, plus the weighted rest
    my_rules.py:reward      an own function (parts, weights) -> float

A part of weight 0 is left out of products and maxima. So is a part that an answer does not have (a variant's, or one
that needs an absent service); a gate on a missing part is open. If a gate is closed, the turns of an episode earn
nothing either."""

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
    return {name: weights[name] * value for name, value in parts.items() if name in weights}


def total(parts: Numbers, weights: Numbers) -> float:
    """The weighted sum."""
    return sum(weighted(parts, weights).values())


def product(parts: Numbers, weights: Numbers) -> float:
    """The product of the weighted parts; 0 without any."""
    counted = [value for name, value in weighted(parts, weights).items() if weights[name]]
    return math.prod(counted) if counted else 0.0


def gate(parts: Numbers, weights: Numbers, condition: str) -> float:
    """The weighted sum if the part of a condition is above 0 ("format") or reaches a value ("accuracy>=0.8"), else the
    weighted value of that part alone.

    With reward parts of turns this is gated reward accumulation, G-RA (arXiv 2508.10548): they accumulate only if the
    outcome reaches a threshold."""
    part, _ = read_condition(condition)
    return total(parts if open_gate(parts, condition) else {part: parts[part]}, weights)


def open_gate(parts: Numbers, *conditions: str) -> bool:
    """Whether the parts meet every condition; a condition on a missing part is met."""
    return all(part not in parts or (parts[part] > 0 if least is None else parts[part] >= least)
               for part, least in map(read_condition, conditions))


def read_condition(text: str) -> tuple[str, float | None]:
    """The part of a gate and its minimum; None = anything above 0. Raises ValueError if that is not a finite number."""
    part, mark, least = (piece.strip() for piece in text.partition(">="))
    if mark and not math.isfinite(float(least)):
        raise ValueError(f"{least} is not a finite number")
    return part, float(least) if mark else None


def tool_star(parts: Numbers, weights: Numbers, form: str, right: str, tools: str) -> float:
    """-1 times the weight of `form` if that is not above 0; else 0 if `right` is not; else the weighted sum of the
    others, with `tools` never below 0.

    The hierarchical reward of Tool-Star (arXiv 2505.16410) section 3.3, with weights of 1 and 0.1 on `tools`, which is
    1 if several tools were used: -1, 0, or max(accuracy + 0.1, accuracy)."""
    if not open_gate(parts, form):
        return -weights.get(form, 0.0)
    if not open_gate(parts, right):
        return 0.0
    paid = {name: value for name, value in weighted(parts, weights).items() if name != form}
    return sum(paid.values()) - min(paid.get(tools, 0.0), 0.0)


def largest(parts: Numbers, weights: Numbers, *names: str) -> float:
    """The largest of the weighted parts `names`, plus the weighted sum of the others."""
    values = weighted(parts, weights)
    rivals = [values.pop(name) for name in names if weights.get(name) and name in values]
    return max(rivals, default=0.0) + sum(values.values())


COMBINE: dict[str, tuple[Callable[..., float], int, int | None]] = {
    "sum": (total, 0, 0), "product": (product, 0, 0), "gate": (gate, 1, 1), "max": (largest, 2, None),
    "tool_star": (tool_star, 3, 3)}
"""Combinations by name, with the minimum and maximum number of parts in their argument."""
GATES = {"gate": 1, "tool_star": 2}
"""How many of the parts named by a gating combination are conditions."""
_EXAMPLES = {"gate": "gate:format", "max": "max:rule,judge", "tool_star": "tool_star:format,accuracy,tools"}


def make_combine(given: str, known: Collection[str]) -> Combine:
    """The function that `task.combine` stands for. Raises ConfigError for an unknown name or a part not in `known`."""
    head = given.partition(":")[0]
    if head not in COMBINE:
        return resolve("task.combine", given, COMBINE)
    function, least, most = COMBINE[head]
    names = _names(given)
    if not least <= len(names) <= (len(names) if most is None else most) or len({*names}) < len(names):
        raise ConfigError(f"task.combine={given!r} names {len(names)} parts: write it as {_EXAMPLES.get(head, head)}")
    for name in names:
        part = _part(given, name) if head == "gate" else name
        if part not in known:
            raise ConfigError(f"task.combine={given!r}: the task has no part {part!r}.{did_you_mean(part, known)} "
                              f"Its parts: {', '.join(known)}.")
    return partial(_combined, function, names)


def make_gate(given: str) -> Callable[[Numbers], bool]:
    """A function that tells whether an answer's parts leave the gate of a `task.combine` open; always, without a
    gate."""
    return partial(_opened, _names(given)[:GATES.get(given.partition(":")[0], 0)])


def _names(given: str) -> list[str]:
    _, colon, rest = given.partition(":")
    return [name.strip() for name in rest.split(",")] if colon else []


def _part(given: str, condition: str) -> str:
    try:
        return read_condition(condition)[0]
    except ValueError:
        raise ConfigError(f"task.combine={given!r}: the value after >= is not a finite number: write it as "
                          "gate:accuracy>=0.8") from None


def _opened(conditions: Collection[str], parts: Numbers) -> bool:
    return open_gate(parts, *conditions)


def _combined(function: Callable[..., float], names: Collection[str], parts: Numbers, weights: Numbers) -> float:
    return function(parts, weights, *names)


# --- weights ----------------------------------------------------------------------------------------------------------


def weight_at(weight: Weight, step: int) -> float:
    """A weight, or the value at `step` of the line through [[step, weight], ...]."""
    if isinstance(weight, (int, float)):
        return float(weight)
    import numpy as np

    steps, values = zip(*weight, strict=True)
    return float(np.interp(step, steps, values))


def checked_weights(known: Mapping[str, Weight], given: Mapping[str, Any]) -> dict[str, Weight]:
    checked: dict[str, Weight] = {}
    for part, weight in {**known, **given}.items():
        if part not in known:
            raise ConfigError(f"unknown setting 'task.rewards.{part}'.{did_you_mean(part, known)} This task's parts: "
                              f"{', '.join(known)}. Further ones come by task.parts=[path/file.py:name], "
                              "docs/services.md.")
        try:
            checked[part] = value = _WEIGHT.validate_python(refuse_bool(float, weight))
            in_order = not isinstance(value, list) or all(a[0] < b[0] for a, b in pairwise(value))
        except ValueError:
            in_order = False
        if not in_order:
            raise ConfigError(f"task.rewards.{part}={weight!r}: give a finite number, or [[step, weight], ...] with "
                              "steps that rise")
    return checked
