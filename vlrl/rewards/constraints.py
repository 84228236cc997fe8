"""Plans checked against lists of constraints: process rewards from "each one" to "all of them". Pure; never raises.

    parts = levels({"commonsense": [True, False], "hard": [True]})
    # {"commonsense_micro": .5, "commonsense_macro": 0, "hard_micro": 1, "hard_macro": 1, "pass": 0}

Planner-R1 (2509.25779) rewards their weighted sum if the plan can be read, with weights in three stages: all parts,
then the macro parts and `pass`, then `pass` alone (`task.rewards.hard_micro=[[0, 1], [100, 1], [101, 0]]`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def levels(satisfied: Mapping[str, Collection[bool]]) -> dict[str, float]:
    """`<kind>_micro` (the share of constraints satisfied) and `<kind>_macro` (1 if all are) of each kind, and `pass` (1
    if all constraints of all kinds are satisfied). A kind without constraints is satisfied."""
    shares: dict[str, float] = {}
    for kind, each in satisfied.items():
        shares[f"{kind}_micro"] = sum(map(bool, each)) / len(each) if each else 1.0
        shares[f"{kind}_macro"] = float(all(each))
    return {**shares, "pass": float(all(map(all, satisfied.values())))}


def gained(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """The increase of each part over `before` ({} = the full values). As `Step.parts` of every turn the increases sum
    to the parts of the last turn, so undoing and redoing earns nothing."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
