"""Plans held against lists of constraints: process rewards from "each one" to "all of them". Pure; never raises.

    parts = levels({"commonsense": [True, False], "hard": [True]})
    # {"commonsense_micro": .5, "commonsense_macro": 0, "hard_micro": 1, "hard_macro": 1, "pass": 0}

Planner-R1 (2509.25779) pays their weighted sum where the plan can be read, in three stages of weights: all of them,
then the macro parts and `pass`, then `pass` alone (`task.rewards.hard_micro=[[0, 1], [100, 1], [101, 0]]`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def levels(satisfied: Mapping[str, Collection[bool]]) -> dict[str, float]:
    """Returns for each kind of constraints `<kind>_micro`, the share that holds, and `<kind>_macro`, 1 where all do;
    and `pass`, 1 where all of all kinds do. A kind without constraints holds.
    """
    shares: dict[str, float] = {}
    for kind, each in satisfied.items():
        shares[f"{kind}_micro"] = sum(map(bool, each)) / len(each) if each else 1.0
        shares[f"{kind}_macro"] = float(all(each))
    return {**shares, "pass": float(all(map(all, satisfied.values())))}


def gained(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Returns what each part has grown by; without a `before` ({}) all of it. As `Step.parts` of every turn they add
    up to the parts of the last one: undoing and doing again earns nothing.
    """
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
