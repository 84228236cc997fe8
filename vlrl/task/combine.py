"""Combines the reward parts of an answer into its reward, as set by `task.combine`. Imports no torch.

    sum                     the weighted sum of all parts
    product                 the product of the weighted parts
    gate:format             the other parts count only if `format` is above 0
    gate:accuracy>=0.8      the other parts count only if `accuracy` is at least 0.8 (gated reward accumulation, G-RA)
    tool_star:format,accuracy,tools     -1, 0 or the weighted sum: by format, then by accuracy
    max:rule,judge          the larger of the two weighted parts, plus the weighted sum of all other parts
    my_rules.py:reward      your own function (parts, weights) -> float

Products and maxima leave out parts of weight 0, and parts that an answer does not have (because it answers a variant,
or because a service is not available). A gate on a missing part is open. If a gate is closed, the turns of an episode
are not rewarded either."""

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
"""A constant weight, or a schedule [[step, weight], ...] with linear interpolation between the steps and constant
values outside."""
_Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_WEIGHT = pydantic.TypeAdapter(_Finite | Annotated[list[tuple[_Finite, _Finite]], pydantic.Field(min_length=1)])

Numbers = Mapping[str, float]
Combine = Callable[[Numbers, Numbers], float]
"""A function (raw parts of one answer, weights at the current step) -> reward of the answer."""


def weighted(parts: Numbers, weights: Numbers) -> dict[str, float]:
    return {name: weights[name] * value for name, value in parts.items() if name in weights}


def total(parts: Numbers, weights: Numbers) -> float:
    """The weighted sum of the parts."""
    return sum(weighted(parts, weights).values())


def product(parts: Numbers, weights: Numbers) -> float:
    """The product of the weighted parts, without parts of weight 0; 0 if no part remains."""
    counted = [value for name, value in weighted(parts, weights).items() if weights[name]]
    return math.prod(counted) if counted else 0.0


def gate(parts: Numbers, weights: Numbers, condition: str) -> float:
    """The weighted sum of all parts if the condition is met, else only the weighted part that the condition names. The
    condition "format" is met if the part `format` is above 0, the condition "accuracy>=0.8" if `accuracy` is at
    least 0.8.

    With per-turn reward parts, this is gated reward accumulation, G-RA (arXiv 2508.10548): the rewards of the turns
    accumulate only if the outcome reaches a threshold."""
    part, _ = read_condition(condition)
    return total(parts if open_gate(parts, condition) else {part: parts[part]}, weights)


def open_gate(parts: Numbers, *conditions: str) -> bool:
    """Whether the parts meet all conditions. A condition on a part that the answer does not have counts as met."""
    return all(part not in parts or (parts[part] > 0 if least is None else parts[part] >= least)
               for part, least in map(read_condition, conditions))


def read_condition(text: str) -> tuple[str, float | None]:
    """Parses a gate condition to (part, minimum); the minimum is None if the part only has to be above 0. Raises
    ValueError if the minimum is not a finite number."""
    part, mark, least = (piece.strip() for piece in text.partition(">="))
    if mark and not math.isfinite(float(least)):
        raise ValueError(f"{least} is not a finite number")
    return part, float(least) if mark else None


def tool_star(parts: Numbers, weights: Numbers, form: str, right: str, tools: str) -> float:
    """The hierarchical reward of Tool-Star (arXiv 2505.16410, section 3.3). `form`, `right` and `tools` are names of
    parts:
    - If the part `form` is not above 0: minus its weight.
    - Else, if the part `right` is not above 0: 0.
    - Else: the weighted sum of all parts except `form`, where `tools` counts at least 0.

    The paper uses weight 1 for `form` and `right` and 0.1 for `tools`, which is 1 if several tools were used. The
    reward is then -1, 0, or max(accuracy + 0.1, accuracy)."""
    if not open_gate(parts, form):
        return -weights.get(form, 0.0)
    if not open_gate(parts, right):
        return 0.0
    paid = {name: value for name, value in weighted(parts, weights).items() if name != form}
    return sum(paid.values()) - min(paid.get(tools, 0.0), 0.0)


def largest(parts: Numbers, weights: Numbers, *names: str) -> float:
    """The largest of the weighted parts called `names`, plus the weighted sum of all other parts."""
    values = weighted(parts, weights)
    rivals = [values.pop(name) for name in names if weights.get(name) and name in values]
    return max(rivals, default=0.0) + sum(values.values())


COMBINE: dict[str, tuple[Callable[..., float], int, int | None]] = {
    "sum": (total, 0, 0), "product": (product, 0, 0), "gate": (gate, 1, 1), "max": (largest, 2, None),
    "tool_star": (tool_star, 3, 3)}
"""Name -> (function that combines the parts, smallest and largest number of parts that the value of `task.combine` may
name after the colon; None = any number)."""
GATES = {"gate": 1, "tool_star": 2}
"""Name of a combination with a gate -> n: the first n names after the colon are conditions of the gate."""
_EXAMPLES = {"gate": "gate:format", "max": "max:rule,judge", "tool_star": "tool_star:format,accuracy,tools"}


def make_combine(value: str, parts: Collection[str]) -> Combine:
    """Returns the function that combines parts as a value of `task.combine` says. Raises ConfigError for an unknown
    name, and for a part that is not among the task's `parts`."""
    head = value.partition(":")[0]
    if head not in COMBINE:
        return resolve("task.combine", value, COMBINE)
    function, least, most = COMBINE[head]
    names = _names(value)
    if not least <= len(names) <= (len(names) if most is None else most) or len({*names}) < len(names):
        raise ConfigError(f"task.combine={value!r} names {len(names)} parts. Write it as {_EXAMPLES.get(head, head)}")
    for name in names:
        part = _part(value, name) if head == "gate" else name
        if part not in parts:
            raise ConfigError(f"task.combine={value!r}: the task has no part {part!r}.{did_you_mean(part, parts)} "
                              f"Its parts: {', '.join(parts)}.")
    return partial(_combined, function, names)


def make_gate(value: str) -> Callable[[Numbers], bool]:
    """Returns a function of an answer's parts that says whether the gate in a value of `task.combine` is open. If the
    value has no gate, the function always returns True."""
    return partial(_opened, _names(value)[:GATES.get(value.partition(":")[0], 0)])


def _names(value: str) -> list[str]:
    _, colon, rest = value.partition(":")
    return [name.strip() for name in rest.split(",")] if colon else []


def _part(value: str, condition: str) -> str:
    try:
        return read_condition(condition)[0]
    except ValueError:
        raise ConfigError(f"task.combine={value!r}: the value after >= is not a finite number: write it as "
                          "gate:accuracy>=0.8") from None


def _opened(conditions: Collection[str], parts: Numbers) -> bool:
    return open_gate(parts, *conditions)


def _combined(function: Callable[..., float], names: Collection[str], parts: Numbers, weights: Numbers) -> float:
    return function(parts, weights, *names)


def weight_at(weight: Weight, step: int) -> float:
    """The weight of a part at a step. A schedule [[step, weight], ...] is interpolated linearly; a constant weight is
    returned unchanged."""
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
                              f"{', '.join(known)}. Add further parts with "
                              "task.parts=[path/file.py:name] (docs/services.md).")
        try:
            checked[part] = value = _WEIGHT.validate_python(refuse_bool(float, weight))
            in_order = not isinstance(value, list) or all(a[0] < b[0] for a, b in pairwise(value))
        except ValueError:
            in_order = False
        if not in_order:
            raise ConfigError(f"task.rewards.{part}={weight!r}: give a finite number, or [[step, weight], ...] with "
                              "increasing steps")
    return checked
