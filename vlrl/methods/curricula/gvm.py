"""The GVM sampler, which gives larger groups to prompts where they reduce the variance of the gradient most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlrl.algo.effect import FunctionUse, idle_when
from vlrl.config.base import Count, Fraction, NonNegative, Positive
from vlrl.curriculum.base import AS_UNIFORM, Prompts
from vlrl.curriculum.drawing import Uniform
from vlrl.curriculum.types import Draw, Outcome

_HALVINGS = 200
_NEVER = 1e-6
"""Stands for a pass rate of 0 in the formula, to avoid a division by 0. The weight of the prompt is 0 anyway."""
_LEAST_SHARE = 1e-9
"""Smallest weight of a prompt in `apportion`, relative to the largest weight. So a prompt of weight 0 gets more than
`least` completions only when all other prompts have `most`."""


def _of_one_size(use: FunctionUse) -> str:
    size = use.config.rollout.group_size
    if not use.values["least"] == use.values["most"] == size:
        return ""
    return f"curriculum.least and most are rollout.group_size={size}{AS_UNIFORM}"


@idle_when(_of_one_size)
class GVM(Uniform):
    """Draws every prompt once per epoch, shuffled, and chooses the group size n_i of each prompt (GVM-RAFT, 2505.02391,
    section 3):

        n_i proportional to g_i / sqrt(p_i + alpha / p_i^(beta - 1)),   0 where p_i = 0
        sum of n_i = prompts * rollout.group_size,   least <= n_i <= most

    where n_i is rounded by largest remainder. p_i is the pass rate of the prompt's last group. g_i stands for the
    prompt's gradient norm: it is Outcome.surprise, sqrt(sum over tokens of (1 - p(token))^2), which is within a
    constant factor of the gradient norm with respect to the logits; the paper uses the full gradient. A prompt without
    results has p_i = `prior`, and its g_i is the mean of the known values. Before a step is drawn, `probe` completions
    of each of the step's prompts measure p_i and g_i. As in the paper's first stage, these completions are not trained
    on. With probe=0 the values of the prompt's last group are used.

    alpha and beta have the values of the released code; probe, least, most (null = 4 * rollout.group_size) and prior
    are ours."""

    saved = ("drawn", "surprise", "sizes")

    def __init__(self, prompts: Prompts, alpha: NonNegative = 1e-3, beta: NonNegative = 2.0, probe: Count = 4,
                 least: Positive = 2, most: Positive | None = None, prior: Fraction = 0.5):
        super().__init__(prompts)
        self.alpha, self.beta, self.probe, self.prior = alpha, beta, probe, prior
        self.least, self.most = least, 4 * prompts.group_size if most is None else most
        if not self.least <= prompts.group_size <= self.most:
            raise ValueError(f"least={least} <= rollout.group_size={prompts.group_size} <= most={self.most} must hold, "
                             "because rollout.group_size is the mean group size")
        self.surprise = np.full(prompts.size, np.nan, dtype=np.float32)
        """[N] Outcome.surprise of the last group of each prompt; NaN = never answered."""
        self.sizes: tuple[int, int] | None = None
        """The smallest and the largest group size in the last draws."""

    def next(self, count: int, step: int) -> list[Draw]:
        draws = self._sized(super().upcoming(count, step))
        self.drawn += count
        self.prompts.history.visit([d.index for d in draws])
        sizes = [d.group_size or 0 for d in draws]
        self.sizes = (min(sizes), max(sizes)) if sizes else self.sizes
        return draws

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """Returns what `next(count, step)` would return, and changes nothing. Returns [] if probe > 0, because the
        group sizes then depend on the probes' results."""
        return [] if self.probe else self._sized(super().upcoming(count, step))

    def probes(self, step: int) -> list[Draw]:
        """Returns the prompts of the next draws, each with `probe` completions. The history does not count probes."""
        count = self.prompts.per_step if self.probe else 0
        return [replace(draw, group_size=self.probe) for draw in super().upcoming(count, step)]

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        for outcome in outcomes:
            if len(outcome.scored):
                self.surprise[outcome.draw.index] = outcome.surprise

    def weights(self, indices: np.ndarray) -> np.ndarray:
        """[n] weights of the prompts `indices` [n]; group sizes are proportional to them."""
        rate = self.prompts.history.pass_rate[indices].astype(np.float64)
        rate = np.where(np.isnan(rate), self.prior, rate)
        right = np.maximum(rate, _NEVER)
        known = ~np.isnan(self.surprise)
        typical = float(self.surprise[known].mean(dtype=np.float64)) if known.any() else 1.0
        norm = self.surprise[indices].astype(np.float64)
        norm = np.where(np.isnan(norm), typical, norm)
        return np.where(rate > 0, norm / np.sqrt(right + self.alpha * right ** (1 - self.beta)), 0.0)

    def _sized(self, draws: Sequence[Draw]) -> list[Draw]:
        weights = self.weights(np.array([d.index for d in draws], dtype=np.int64))
        sizes = apportion(weights, len(draws) * self.prompts.group_size, self.least, self.most)
        return [replace(d, group_size=n) for d, n in zip(draws, sizes.tolist(), strict=True)]

    def metrics(self) -> dict[str, float]:
        sizes = {} if self.sizes is None else {"curriculum/group_size/min": float(self.sizes[0]),
                                                "curriculum/group_size/max": float(self.sizes[1])}
        return {**super().metrics(), **sizes}


def apportion(weights: np.ndarray, total: int, least: int, most: int) -> np.ndarray:
    """Divides `total` into n whole numbers from `least` to `most`, approximately proportional to the weights [n].
    Weights are multiplied by a constant and clipped to [least, most], with the constant chosen so that the sum is
    `total`. Fractions are rounded by largest remainder; of equal remainders the first are rounded up. Requires n *
    least <= total <= n * most. If all weights are 0 they count as equal."""
    count = len(weights)
    if not count:
        return np.zeros(0, dtype=np.int64)
    top = float(weights.max())
    shares = np.maximum(weights / top, _LEAST_SHARE) if top > 0 else np.ones(count)
    low, high = 0.0, most / float(shares.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if np.clip(middle * shares, least, most).sum() < total:
            low = middle
        else:
            high = middle
    exact = np.round(np.clip(high * shares, least, most), 9)
    sizes = np.floor(exact).astype(np.int64)
    short = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes
