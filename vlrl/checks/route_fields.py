"""The rule of where a vehicle goes: `trajectory` of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlrl.data.values import short
from vlrl.rewards.driving import trajectory_problem

Row = Mapping[str, Any]


def trajectory(row: Row) -> str | None:
    problem = trajectory_problem(row["trajectory"])
    return f"trajectory={short(row['trajectory'])}: {problem}" if problem else None
