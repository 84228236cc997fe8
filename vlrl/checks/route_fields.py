"""Rules of the fields that describe a vehicle's route: `plan` and `trajectory`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlrl.data.values import short
from vlrl.errors import did_you_mean
from vlrl.rewards.driving import HEADS, trajectory_problem


def plan_problem(row: Mapping[str, Any]) -> str | None:
    given = row["plan"]
    if not isinstance(given, Mapping):
        return f"plan={short(given)} must be {{\"speed\": ..., \"path\": ...}}"
    for head, known in HEADS.items():
        words = given.get(head)
        several = words if isinstance(words, list) else [words]
        wrong = next((w for w in several if w not in known), None) if several else words
        if wrong is not None or not several or words is None:
            return (f"plan.{head}={short(words)} must be one of {', '.join(known)}, or a list of them."
                    f"{did_you_mean(str(wrong), known)}")
    return None


def trajectory_field_problem(row: Mapping[str, Any]) -> str | None:
    problem = trajectory_problem(row["trajectory"])
    return f"trajectory={short(row['trajectory'])}: {problem}" if problem else None
