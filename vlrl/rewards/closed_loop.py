"""Rewards of closed-loop driving, one decision at a time. Pure; metres, seconds, radians.

CaRL (2504.17838) rewards the route completion that a decision adds, times soft penalties; a hard infraction ends the
episode: r_t = (completion_t - completion_{t-1}) * product of factors in [0, 1]. The form is the paper's; numbers
without a named source are our own."""

from __future__ import annotations

import math
from collections.abc import Iterable

SPEED_SLACK = 0.1
"""Share of the speed limit by which it may be exceeded without penalty."""
SPEED_SPAN = 0.4
"""Share of the speed limit, beyond the slack, over which the factor falls to 0."""
LEAST_TTC = 0.95
"""Time to collision in seconds below which a decision counts half; nuPlan's bound."""
BRAKING, PUSHING, SIDEWAYS = -4.05, 2.40, 4.89
"""Comfortable accelerations along and across the vehicle in m/s^2; nuPlan's bounds."""
HALF = 0.5
"""The factor of a binary soft infraction."""


def carl(before: float, now: float, factors: Iterable[float]) -> float:
    """CaRL's reward of one decision, in [0, 1]: the route completion gained, times the factors.

    `before` and `now` are shares of the route in [0, 1]; driving back earns nothing."""
    return max(0.0, now - before) * math.prod(factors)


def speed_factor(speed: float, limit: float) -> float:
    """1 up to a tenth above the limit (> 0), falling linearly to 0 at half above it."""
    over = speed / limit - 1 - SPEED_SLACK
    return min(1.0, max(0.0, 1 - over / SPEED_SPAN))


def gap_factor(ttc: float) -> float:
    """0.5 if the smallest time to collision was below 0.95 s, else 1; infinity = nothing ahead."""
    return HALF if ttc < LEAST_TTC else 1.0


def comfort_factor(along: Iterable[float], across: Iterable[float]) -> float:
    """1 if all accelerations (m/s^2 along and across) are within the bounds, else 0.5."""
    gentle = all(BRAKING <= a <= PUSHING for a in along) and all(abs(a) <= SIDEWAYS for a in across)
    return 1.0 if gentle else HALF


def time_to_collision(gap: float, closing: float) -> float:
    """Seconds until a gap in metres closes at a speed in m/s; infinity if it does not shrink."""
    if closing <= 0:
        return math.inf
    return max(0.0, gap) / closing


def target_speed(limit: float, gap: float, near: float = 4.0, far: float = 24.0) -> float:
    """The target of the shaped reward: the speed limit on a free road, falling to 0 between `far` and `near` metres
    from the next obstacle."""
    return limit * min(1.0, max(0.0, (gap - near) / (far - near)))


def shaped(speed: float, wanted: float, limit: float, off_centre: float, turned: float, ended: bool) -> float:
    """A sum of terms for one decision, at most 1, in the manner of rewards before CaRL (Roach, 2108.08265).

    1 - |speed - wanted| / limit, minus half the metres from the lane centre (at most 1), minus the radians between
    vehicle and lane (at most 1); -1 - speed / limit if a collision or leaving the road ended the drive."""
    if ended:
        return -1 - speed / limit
    return 1 - abs(speed - wanted) / limit - 0.5 * min(1.0, abs(off_centre)) - min(1.0, abs(turned))
