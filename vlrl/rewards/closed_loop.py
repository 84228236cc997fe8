"""Rewards of driving in closed loop, one decision at a time. Pure.

CaRL (2504.17838) pays what a decision adds to the completion of the route, times soft penalties, and a hard infraction
ends the episode: r_t = (completion_t - completion_{t-1}) * product of factors in [0, 1]. The form is the paper's; the
numbers below are those of this module where no source is named. Metres, seconds, radians.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

SPEED_SLACK = 0.1
"""Share of the limit by which it may be exceeded for free."""
SPEED_SPAN = 0.4
"""Share of the limit, beyond that, at which nothing is paid."""
LEAST_TTC = 0.95
"""Seconds to a collision with what is ahead, below which a decision counts half; nuPlan's bound."""
BRAKING, PUSHING, SIDEWAYS = -4.05, 2.40, 4.89
"""m/s^2 along and across the vehicle within which it is comfortable; nuPlan's bounds."""
HALF = 0.5
"""The factor of a soft infraction that is there or is not."""


def carl(before: float, now: float, factors: Iterable[float]) -> float:
    """Returns CaRL's reward of a decision, in [0, 1]: the completion gained, times the factors.

    `before` and `now` are shares of the route in [0, 1]; driving back earns nothing.
    """
    return max(0.0, now - before) * math.prod(factors)


def speed_factor(speed: float, limit: float) -> float:
    """Returns 1 up to a tenth above the limit > 0, falling to 0 at half above it."""
    over = speed / limit - 1 - SPEED_SLACK
    return min(1.0, max(0.0, 1 - over / SPEED_SPAN))


def gap_factor(ttc: float) -> float:
    """Returns 0.5 where the least time to a collision was below 0.95 s, else 1; infinity = none is ahead."""
    return HALF if ttc < LEAST_TTC else 1.0


def comfort_factor(along: Iterable[float], across: Iterable[float]) -> float:
    """Returns 1 where all accelerations, in m/s^2 along and across, lie within the bounds, else 0.5."""
    gentle = all(BRAKING <= a <= PUSHING for a in along) and all(abs(a) <= SIDEWAYS for a in across)
    return 1.0 if gentle else HALF


def time_to_collision(gap: float, closing: float) -> float:
    """Returns seconds until a gap in metres is used up at a speed in m/s; infinity where it does not shrink."""
    if closing <= 0:
        return math.inf
    return max(0.0, gap) / closing


def target_speed(limit: float, gap: float, near: float = 4.0, far: float = 24.0) -> float:
    """Returns the speed that a shaped reward wants: the limit on a free road, falling to 0 from `far` to `near` metres
    before what is ahead.
    """
    return limit * min(1.0, max(0.0, (gap - near) / (far - near)))


def shaped(speed: float, wanted: float, limit: float, off_centre: float, turned: float, ended: bool) -> float:
    """Returns a sum of terms for one decision, at most 1, in the manner of rewards before CaRL (Roach, 2108.08265).

    1 - |speed - wanted| / limit, less half of the metres from the middle of the lane (at most 1), less the radians
    between vehicle and lane (at most 1); -1 - speed / limit where a collision or leaving the road ended it.
    """
    if ended:
        return -1 - speed / limit
    return 1 - abs(speed - wanted) / limit - 0.5 * min(1.0, abs(off_centre)) - min(1.0, abs(turned))
