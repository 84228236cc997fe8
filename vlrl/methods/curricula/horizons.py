"""Rules of `episode.horizon`: the turn limit of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from vlrl.algo.state import Saved
from vlrl.config.base import Positive
from vlrl.curriculum.types import Outcome


def add(step: int, start: Positive, every: Positive, by: Positive = 1) -> int:
    """start + by * floor(step / every): the additive schedule of TTI, one iteration being `every` steps."""
    return start + by * (step // every)


def multiply(step: int, start: Positive, every: Positive) -> int:
    """start * (1 + floor(step / every)): the multiplicative schedule of TTI (start times the iteration)."""
    return start * (1 + step // every)


class Success(Saved):
    """`start` turns, plus `by` each time the mean pass rate of the last `window` groups of episodes with the current
    limit is at least `at`; then the window is emptied. The rule is ours.

    An episode that needs more turns than its limit is not correct, so a task whose shortest solution is longer than
    `start` never advances."""

    saved = ("turns", "recent")

    def __init__(self, start: Positive, at: float = 0.5, window: Positive = 64, by: Positive = 1):
        if not 0 < at <= 1:
            raise ValueError(f"at={at:g} must be a pass rate above 0 and at most 1")
        self.turns, self.at, self.by = start, at, by
        self.recent = deque[float](maxlen=window)

    def __call__(self, step: int) -> int:
        return self.turns

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Adds the groups of episodes of one step."""
        mine = [o.pass_rate for o in outcomes if o.draw.max_turns == self.turns]
        self.recent.extend(rate for rate in mine if rate == rate)
        if len(self.recent) == self.recent.maxlen and float(np.mean(self.recent)) >= self.at:
            self.turns += self.by
            self.recent.clear()
