"""Schedules for `episode.horizon`: each gives the turn limit of episodes in a training step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from vlrl.algo.state import Saved
from vlrl.config.base import Positive
from vlrl.curriculum.types import Outcome


def add(step: int, start: Positive, every: Positive, by: Positive = 1) -> int:
    """The additive schedule of TTI (arXiv 2506.07976): the turn limit is start + by * floor(step / every). An iteration
    of TTI is `every` steps."""
    return start + by * (step // every)


def multiply(step: int, start: Positive, every: Positive) -> int:
    """The multiplicative schedule of TTI (2506.07976): the turn limit is start * (1 + floor(step / every))."""
    return start * (1 + step // every)


class Success(Saved):
    """Raises the turn limit when the policy succeeds. The limit is `start` at first, and rises by `by` whenever the
    mean pass rate of the last `window` groups of episodes with the current limit reaches `at`. After each rise a new
    window begins. The rule is ours.

    An episode that needs more turns than its limit is not correct, so the limit never rises for a task whose shortest
    solution is longer than `start`."""

    saved = ("turns", "recent")

    def __init__(self, start: Positive, at: float = 0.5, window: Positive = 64, by: Positive = 1):
        if not 0 < at <= 1:
            raise ValueError(f"at={at:g} must be a pass rate above 0 and at most 1")
        self.turns, self.at, self.by = start, at, by
        self.recent = deque[float](maxlen=window)

    def __call__(self, step: int) -> int:
        return self.turns

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Records the pass rates of a step's groups of episodes, and raises the turn limit once the last `window`
        groups reach `at`."""
        mine = [o.pass_rate for o in outcomes if o.draw.max_turns == self.turns]
        self.recent.extend(rate for rate in mine if rate == rate)
        if len(self.recent) == self.recent.maxlen and float(np.mean(self.recent)) >= self.at:
            self.turns += self.by
            self.recent.clear()
