"""Rewards plans by the constraints that they satisfy: by the share of satisfied constraints, and for satisfying all. No
plan makes a function raise.

    parts = levels({"commonsense": [True, False], "hard": [True]})
    # {"commonsense_micro": .5, "commonsense_macro": 0, "hard_micro": 1, "hard_macro": 1, "pass": 0}

Planner-R1 (2509.25779) rewards the weighted sum of these parts for a plan that can be parsed. The weights change over
three stages: first all parts count, then only the macro parts and `pass`, finally only `pass`
(`task.rewards.hard_micro=[[0, 1], [100, 1], [101, 0]]`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def levels(satisfied: Mapping[str, Collection[bool]]) -> dict[str, float]:
    """The reward parts of a plan. `satisfied` maps each kind of constraint to one bool per constraint of this kind.
    `<kind>_micro` is the share of satisfied constraints (1 if there are none). `<kind>_macro` is 1 if all
    constraints of the kind are satisfied, else 0. `pass` is 1 if all constraints of all kinds are satisfied, else 0."""
    shares: dict[str, float] = {}
    for kind, each in satisfied.items():
        shares[f"{kind}_micro"] = sum(map(bool, each)) / len(each) if each else 1.0
        shares[f"{kind}_macro"] = float(all(each))
    return {**shares, "pass": float(all(map(all, satisfied.values())))}


def gained(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """The increase of each reward part from `before` ({} at the start) to `now`. If an environment returns the
    increases as `Step.parts` of every turn, they add up to the parts after the last turn. Undoing and redoing
    something therefore earns nothing."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
