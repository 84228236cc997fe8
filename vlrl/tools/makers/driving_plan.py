"""Derives the plan of a driven trajectory: a meta-action (speed word and path word) as defined by AlphaDrive (arXiv
2503.07608)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STANDING = 0.5
"""Speed in m/s below which a vehicle counts as standing."""
TURN = math.radians(25)
"""Minimum change of heading, in radians, that counts as a turn."""
_STRAIGHT = math.radians(12)  # maximum change of heading without a turn
_SAME, _FASTER = 0.8, 1.5  # m/s of change: at most that of KEEP, at least that of ACCELERATE and DECELERATE
_LANE, _IN_LANE = 2.4, 1.0  # m to the side: at least that of a lane change, at most that of STRAIGHT


@dataclass(frozen=True)
class Plan:
    """A meta-action with its two words, speed and path. `margin` in [0, 1] is the distance of the trajectory from any
    other meta-action; 0 = borderline."""

    speed: str
    path: str
    margin: float


def plan_of(positions: np.ndarray, headings: np.ndarray, speeds: Sequence[float] | np.ndarray) -> Plan | None:
    """The plan that a driven trajectory shows; None if the trajectory lies between two plans.

    `positions` [n, 2] in metres are the positions and `headings` [n] in radians the headings of the vehicle, in its
    frame at the start: x ahead, y to the left, headings counter-clockwise. `speeds` [n] are in m/s."""
    speed, path = _speed(float(speeds[0]), float(speeds[-1])), _path(positions, headings)
    return Plan(speed[0], path[0], round(min(1.0, speed[1], path[1]), 3)) if speed and path else None


def _speed(before: float, after: float) -> tuple[str, float] | None:
    change = after - before
    if after < STANDING:
        return "STOP", 1 - after / STANDING
    if change <= -_FASTER:
        return ("DECELERATE", min(-change / _FASTER - 1, after / STANDING - 2)) if after > 2 * STANDING else None
    if change >= _FASTER:
        return "ACCELERATE", change / _FASTER - 1
    return ("KEEP", 1 - abs(change) / _SAME) if abs(change) <= _SAME and after > 2 * STANDING else None


def _path(positions: np.ndarray, headings: np.ndarray) -> tuple[str, float] | None:
    turned, aside = float(headings[-1]), float(positions[-1, 1])
    if abs(turned) >= TURN:
        return "LEFT_TURN" if turned > 0 else "RIGHT_TURN", abs(turned) / TURN - 1
    if abs(turned) > _STRAIGHT:
        return None
    if abs(aside) >= _LANE:
        return "LEFT_CHANGE" if aside > 0 else "RIGHT_CHANGE", (abs(aside) - _LANE) / (_LANE - _IN_LANE)
    if np.abs(positions[:, 1]).max() <= _IN_LANE:
        return "STRAIGHT", 1 - float(np.abs(positions[:, 1]).max()) / _IN_LANE
    return None
