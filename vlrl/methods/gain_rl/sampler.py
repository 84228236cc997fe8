"""GAIN-RL: prompts are ordered by the angles between the hidden states of their tokens, and drawn with weights from a
Gaussian window that moves along the order as the policy learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vlrl.config.base import Fraction, NonNegative, Rate
from vlrl.curriculum.base import Prompts
from vlrl.curriculum.drawing import Adaptive, weighted
from vlrl.curriculum.types import Outcome
from vlrl.errors import ConfigError

_REACH = 6
"""The window is cut off at this many standard deviations from the centre of the window."""
_LEAST = 1e-300
"""Weight of the prompts farthest from the window: positive, so that they can be drawn when no others are left, but
below all other weights."""


class GainRL(Adaptive):
    """Draws prompts with Gaussian weights over their positions in the order of decreasing angle ("Angles Don't Lie",
    2506.02281, section 3):

        weight of the k-th prompt = exp(-(k - m)^2 / (2 s^2)),   m = 0 at the start
        m <- m + n/2 tanh(sensitivity (accuracy - target)) + n/2 tanh(angle_sensitivity angle)

    where accuracy is the mean pass rate and angle the mean angle of the n prompts that were answered. An update
    increases m by at least 0 and at most n. s is `spread` positions, at most a quarter of the prompts (this bound is
    ours). A row may have an `angle` field; the angles of other rows are measured with the initial policy
    (vlrl/methods/gain_rl/angle.py), and unusable prompts come last. The paper measures the angles of trained prompts
    again with the trained policy; here each prompt keeps one angle. Constants are those of the released code."""

    measures = "angle"
    saved = ("mean", "angles", "unknown")

    def __init__(self, prompts: Prompts, spread: Rate = 1000.0, target: Fraction = 0.5,
                 sensitivity: NonNegative = 2.0, angle_sensitivity: NonNegative = 2.0):
        super().__init__(prompts)
        self.spread = min(spread, prompts.size / 4)
        self.target, self.sensitivity, self.angle_sensitivity = target, sensitivity, angle_sensitivity
        self.mean = 0.0
        """Centre m of the window, a position in the order."""
        self.angles = prompts.numbers("angle")
        self.unknown = np.isnan(self.angles)
        self._order: np.ndarray | None = None

    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.unknown)

    def measured(self, indices: np.ndarray, values: np.ndarray) -> None:
        self.angles[indices], self.unknown[indices] = values, False
        self._order = None
        if np.isnan(self.angles).all():
            raise ConfigError(f"curriculum.name='gain_rl' orders prompts by the angles between their hidden "
                              f"states, but none of the {len(self.angles)} prompts can be measured: each prompt is "
                              "too long (limits.prompt_tokens), or its media cannot be read. `vlrl data check` lists "
                              "these prompts.")

    @property
    def order(self) -> np.ndarray:
        """[N] indices of the prompts by decreasing angle."""
        if self._order is None:
            self._order = np.argsort(-self.angles, kind="stable")  # nan goes last
        return self._order

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        reach = max(_REACH * self.spread, count)
        first, end = max(0, math.floor(self.mean - reach)), min(self.prompts.size, math.ceil(self.mean + reach) + 1)
        away = (np.arange(first, end) - self.mean) / self.spread
        places, weights = self.order[first:end], np.maximum(np.exp(-0.5 * away * away), _LEAST)
        weights[self.history.rejected[places]] = _LEAST
        return places[weighted(weights, count, rng)]

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        known = [o for o in outcomes if not math.isnan(o.pass_rate)]
        if known:
            accuracy = float(np.mean([o.pass_rate for o in known]))
            angle = float(np.nan_to_num(self.angles[[o.draw.index for o in known]]).mean())
            move = 0.5 * (math.tanh(self.sensitivity * (accuracy - self.target)) +
                          math.tanh(self.angle_sensitivity * angle))
            self.mean = min(self.mean + len(known) * min(max(move, 0.0), 1.0), self.prompts.size - 1.0)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._order = None

    def metrics(self) -> dict[str, float]:
        return {"curriculum/window": self.mean / self.prompts.size}
