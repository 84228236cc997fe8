"""Plans that are checked against lists of constraints: process rewards from "share of constraints satisfied" to "all
satisfied". No plan makes a function raise.

    parts = levels({"commonsense": [True, False], "hard": [True]})
    # {"commonsense_micro": .5, "commonsense_macro": 0, "hard_micro": 1, "hard_macro": 1, "pass": 0}

Planner-R1 (2509.25779) rewards the weighted sum of these parts for a plan that can be parsed. The weights change over
three stages: first all parts count, then only the macro parts and `pass`, finally only `pass`
(`task.rewards.hard_micro=[[0, 1], [100, 1], [101, 0]]`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def levels(satisfied: Mapping[str, Collection[bool]]) -> dict[str, float]:
    """The reward parts of a plan. For each kind of constraint: `<kind>_micro`, the share of constraints satisfied, and
    `<kind>_macro`, 1 if all are satisfied. For the plan: `pass`, 1 if all constraints of all kinds are satisfied. A
    kind without constraints counts as satisfied."""
    shares: dict[str, float] = {}
    for kind, each in satisfied.items():
        shares[f"{kind}_micro"] = sum(map(bool, each)) / len(each) if each else 1.0
        shares[f"{kind}_macro"] = float(all(each))
    return {**shares, "pass": float(all(map(all, satisfied.values())))}


def gained(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """The increase of each reward part from `before` to `now`; with `before={}` the values of `now`. If every turn
    returns these increases as `Step.parts`, they add up to the parts of the last turn, so undoing and redoing
    something earns nothing."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
