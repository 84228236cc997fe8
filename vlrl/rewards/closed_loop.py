"""Rewards for closed-loop driving, computed for one decision at a time. Units are metres, seconds and radians.

CaRL (2504.17838) rewards the increase in route completion after a decision, multiplied by soft penalty factors: r_t =
(completion_t - completion_{t-1}) * product of factors in [0, 1]. A hard infraction ends the episode. The formula is the
paper's; constants without a named source were chosen for vlrl."""

from __future__ import annotations

import math
from collections.abc import Iterable

SPEED_SLACK = 0.1  # the speed limit may be exceeded by this fraction without a penalty
SPEED_SPAN = 0.4  # beyond the slack, the speed factor falls to 0 over this fraction of the speed limit
LEAST_TTC = 0.95  # Time to collision in seconds; below it, the reward of a decision is halved. The value is nuPlan's.
BRAKING, PUSHING, SIDEWAYS = -4.05, 2.40, 4.89
"""Largest comfortable accelerations in m/s^2: braking, speeding up, and sideways. The values are nuPlan's."""
HALF = 0.5
"""Penalty factor for a soft infraction that either occurs or does not, such as too short a time to collision."""


def carl(before: float, now: float, factors: Iterable[float]) -> float:
    """CaRL's reward for one decision, in [0, 1]: the gain in route completion multiplied by the penalty factors.

    `before` and `now` are the completed fractions of the route before and after the decision. Driving backwards earns
    0."""
    return max(0.0, now - before) * math.prod(factors)


def speed_factor(speed: float, limit: float) -> float:
    """The penalty factor for speed: 1 up to 10 % above the speed limit (which must be > 0), then falling linearly to 0
    at 50 % above it."""
    over = speed / limit - 1 - SPEED_SLACK
    return min(1.0, max(0.0, 1 - over / SPEED_SPAN))


def gap_factor(ttc: float) -> float:
    """The penalty factor for following too closely: 0.5 if `ttc`, the smallest time to collision, is below 0.95 s, else
    1. A `ttc` of infinity means that nothing is ahead."""
    return HALF if ttc < LEAST_TTC else 1.0


def comfort_factor(along: Iterable[float], across: Iterable[float]) -> float:
    """The penalty factor for comfort: 1 if all accelerations along and across the vehicle (m/s^2) are within the
    comfort bounds, else 0.5."""
    gentle = all(BRAKING <= a <= PUSHING for a in along) and all(abs(a) <= SIDEWAYS for a in across)
    return 1.0 if gentle else HALF


def time_to_collision(gap: float, closing: float) -> float:
    """Seconds until a gap in metres closes at a closing speed in m/s; infinity if the gap does not shrink."""
    if closing <= 0:
        return math.inf
    return max(0.0, gap) / closing


def target_speed(limit: float, gap: float, near: float = 4.0, far: float = 24.0) -> float:
    """The target speed for `shaped`: the speed limit on a free road, falling to 0 as the gap to the next obstacle
    shrinks from `far` to `near` metres."""
    return limit * min(1.0, max(0.0, (gap - near) / (far - near)))


def shaped(speed: float, wanted: float, limit: float, off_centre: float, turned: float, ended: bool) -> float:
    """A shaped reward for one decision, at most 1, similar to rewards before CaRL (Roach, 2108.08265).

    It is 1 - |speed - wanted| / limit - min(1, |off_centre|) / 2 - min(1, |turned|). `wanted` is the target speed,
    `limit` the speed limit, `off_centre` the distance from the lane centre in metres, and `turned` the angle between
    vehicle and lane in radians. If a collision or leaving the road `ended` the episode, the reward is -1 - speed /
    limit."""
    if ended:
        return -1 - speed / limit
    return 1 - abs(speed - wanted) / limit - 0.5 * min(1.0, abs(off_centre)) - min(1.0, abs(turned))
