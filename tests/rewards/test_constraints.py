"""Constraints that hold, one by one and all together, and what turns gain of them."""

import random

import pytest

from vlrl.rewards.constraints import gained, levels


def test_by_hand():
    assert levels({"common": [True, False, True, True], "hard": [True, True]}) == {
        "common_micro": 0.75, "common_macro": 0.0, "hard_micro": 1.0, "hard_macro": 1.0, "pass": 0.0}
    assert levels({"hard": [True], "soft": []}) == {
        "hard_micro": 1.0, "hard_macro": 1.0, "soft_micro": 1.0, "soft_macro": 1.0, "pass": 1.0}
    assert levels({}) == {"pass": 1.0}
    assert gained({"a": 0.5, "b": 1.0}, {"a": 0.75, "b": 0.0}) == {"a": 0.25, "b": -1.0}


def test_turns_add_up_to_the_last_as_written_down_again():
    draw = random.Random(0)
    for _ in range(200):
        kinds = {name: draw.randint(0, 4) for name in ("x", "y", "z")[:draw.randint(1, 3)]}
        before, total = {}, dict.fromkeys(levels({k: [] for k in kinds}), 0.0)
        for _turn in range(draw.randint(1, 5)):
            held = {name: [draw.random() < 0.6 for _ in range(n)] for name, n in kinds.items()}
            now = levels(held)
            total = {name: total[name] + value for name, value in gained(before, now).items()}
            before = now
        wanted = {"pass": 1.0}
        for name, each in held.items():
            wrong = each.count(False)
            wanted[f"{name}_micro"] = 1 - wrong / max(len(each), 1)
            wanted[f"{name}_macro"] = 0.0 if wrong else 1.0
            wanted["pass"] = min(wanted["pass"], wanted[f"{name}_macro"])
        assert total == pytest.approx(wanted, abs=1e-6)
