"""Samplers that draw by the difficulty of each prompt: from easy to hard, or mostly near one difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlrl.config.base import Fraction, Rate
from vlrl.curriculum.base import Prompts
from vlrl.curriculum.drawing import Adaptive, Sequential, weighted
from vlrl.curriculum.types import Outcome
from vlrl.errors import ConfigError

LEAST = 1e-12
"""Minimum weight of a prompt that is not dropped, so that a prompt far from the mean can still be drawn."""


def required_field(prompts: Prompts, by: str, name: str, otherwise: str = "") -> np.ndarray:
    """[N] float32 values of the numeric field `by`; NaN for a row without the field. Raises ConfigError if no row has
    the field. `name` is the sampler that the message names, and `otherwise` is added to the end of the message."""
    values = prompts.numbers(by)
    if prompts.size and np.isnan(values).all():
        raise ConfigError(f"curriculum.by={by!r}: none of the {prompts.size} training rows has a number in that field, "
                          f"but curriculum.name={name} orders the rows by it. Set data.difficulty to the file "
                          f"of `vlrl data difficulty CONFIG`, or set curriculum.by to another field{otherwise}.")
    return values


class EasyToHard(Sequential):
    """Draws the prompts sorted by a field of the rows, in repeated passes in the same order. Rows with equal values
    keep the order of the data, and rows without the field come last.

    The label curriculum of Kimi k1.5 (2501.12599, section 2.3.4) and SARI (2504.15900).

    by: the name of a numeric field, such as `difficulty`, where 1 is the hardest. descending: the largest value first.
    Raises ConfigError if no row has the field."""

    def __init__(self, prompts: Prompts, by: str = "difficulty", descending: bool = False):
        super().__init__(prompts)
        values = required_field(prompts, by, "easy_to_hard")
        self._order = np.argsort(-values if descending else values, kind="stable").astype(np.int32)  # nan is last

    def order(self, epoch: int) -> np.ndarray:
        return self._order


class Gaussian(Adaptive):
    """Draws prompts with a weight proportional to exp(-(d - mean)^2 / (2 std^2)), where d is the prompt's difficulty.
    After each epoch solved prompts are dropped; once all are dropped, all come back.

    d is the value of the field `by`. In a row without the field it is 1 - pass rate of the prompt's last group, and
    `mean` before the first group. An epoch has as many draws as there are remaining prompts. A prompt is solved if the
    pass rate of its last group is at least `solved`. Rejected prompts are dropped too; until the epoch ends they are
    drawn only when no other prompt is left.

    Time-R1 (2503.13377, TimeRFT) uses std .2 and a mean of .3, in units of the initial model's tIoU. That is a mean
    difficulty 1 - tIoU of .7. The paper's code drops prompts with a tIoU above .7 after each epoch
    (curriculum.pass_at=0.7).

    mean: any number; std: above 0; both in the unit of the field. solved: in [0, 1]."""

    saved = ("left", "epoch", "drawn", "length")

    def __init__(self, prompts: Prompts, mean: float = 0.7, std: Rate = 0.2, by: str = "difficulty",
                 solved: Fraction = 1.0):
        super().__init__(prompts)
        self.mean, self.std, self.solved = mean, std, solved
        self.field = prompts.numbers(by)
        self.left = np.ones(prompts.size, dtype=bool)
        """[N] whether each prompt is still drawn, that is, not dropped."""
        self.epoch, self.drawn, self.length = 0, 0, prompts.size
        """Number of completed epochs; number of draws in the current epoch; length of the current epoch in draws."""
        self._weights: np.ndarray | None = None

    def weigh(self, indices: np.ndarray) -> np.ndarray:
        """[n] the current sampling weights of the prompts `indices` [n]; 0 for dropped prompts."""
        known = self.field[indices].astype(np.float64)
        observed = np.where(np.isnan(known), 1.0 - self.history.pass_rate[indices].astype(np.float64), known)
        away = (np.where(np.isnan(observed), self.mean, observed) - self.mean) / self.std
        weights = np.maximum(np.exp(-0.5 * away * away), LEAST) * self.left[indices]
        return np.where(self.history.rejected[indices], np.minimum(weights, LEAST), weights)

    def weights(self) -> np.ndarray:
        """[N] sampling weights of all prompts; 0 for dropped prompts."""
        if self._weights is None:
            self._weights = self.weigh(np.arange(self.prompts.size))
        return self._weights

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        if self.drawn >= self.length:
            self._next_epoch()
        self.drawn += count
        return weighted(self.weights(), count, rng)

    def _next_epoch(self) -> None:
        self.left &= ~(self.history.pass_rate >= self.solved)
        self.left[self.history.rejected] = False
        if not self.left.any():
            self.left[:] = True
        self.epoch, self.drawn, self.length = self.epoch + 1, 0, int(self.left.sum())
        self._weights = None

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        indices = np.unique(np.array([o.draw.index for o in outcomes], dtype=np.int64))
        self.weights()[indices] = self.weigh(indices)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._weights = None

    def metrics(self) -> dict[str, float]:
        return {"curriculum/epoch": self.epoch + self.drawn / self.length, "curriculum/left": float(self.left.mean())}
