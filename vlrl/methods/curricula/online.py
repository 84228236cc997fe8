"""Samplers that weight every prompt by its results so far.

With many prompts and a small budget most prompts are seen at most once, so the results of a single prompt say little.
`PassRates` therefore shrinks a prompt's pass rate towards the results of its kind: a category of prompts, or a tier,
which is a range of the pass rates measured before the run. The results of all answered groups count, also of groups
that are filtered out before training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from vlrl.algo.state import Saved
from vlrl.config.base import Beta, Fraction
from vlrl.curriculum.base import Categories, Prompts, as_uniform
from vlrl.curriculum.drawing import Adaptive, Cycle, next_distinct, weighted
from vlrl.curriculum.types import Outcome
from vlrl.errors import ConfigError
from vlrl.methods.curricula.bandits import Bins, FieldName, categories, weight_metrics
from vlrl.methods.curricula.ordered import LEAST

Buffer = Annotated[int, Field(ge=1, le=100_000)]
Power = Annotated[float, Field(ge=0, le=100)]
Strength = Annotated[float, Field(ge=0, le=1e6)]
Tiers = Annotated[int, Field(ge=1, le=100)]
_LEVEL_DECAY = 0.9
"""Decay, per group of completions, of the drift of a category or tier of prompts (see PassRates)."""


class PassRates(Saved):
    """The estimated pass rate of every prompt.

        rate_i = (count_i mean_i + strength * (start_i + drift(kind of i))) / (count_i + strength)

    start_i is the initial estimate, which counts like `strength` groups. mean_i is the mean pass rate of the prompt's
    groups, and count_i their number, at most `most`; beyond `most` groups mean_i is an exponential average with decay 1
    - 1 / most. A kind is a category or tier of prompts; its drift is an exponential average of (pass rate - start_i)
    over its groups, with decay 0.9 per group. Without `kinds` the drift is 0. Takes 24 bytes per prompt."""

    saved = ("mean", "count", "drift")

    def __init__(self, start: np.ndarray, kinds: Categories | None, strength: float, most: float = math.inf):
        self.start, self.kinds, self.strength, self.most = start.astype(np.float32), kinds, strength, most
        self.mean, self.count = (np.zeros(len(start), dtype=np.float32) for _ in range(2))
        self.drift = np.zeros(len(kinds.names) if kinds else 1)
        self.sizes = np.bincount(kinds.indices, minlength=len(kinds.names)) if kinds else np.zeros(1)
        self._own, self._open = (np.zeros(len(start), dtype=np.float32) for _ in range(2))
        self._weigh(slice(None))

    def _weigh(self, indices: Any) -> None:
        """Updates the two terms of rate_i for the prompts `indices`: the term from the prompt's own groups, and the
        weight of the expected rate."""
        known = self.count[indices] + np.float32(self.strength)
        self._own[indices] = self.count[indices] * self.mean[indices] / np.maximum(known, 1e-30)
        self._open[indices] = np.where(known > 0, self.strength / np.maximum(known, 1e-30), 1.0)

    def expected(self) -> np.ndarray:
        """[N] in [0, 1]: for each prompt, the pass rate predicted by its initial estimate and the drift of its kind,
        without the prompt's own groups."""
        if self.kinds is None:
            return self.start.copy()
        rates = self.drift.astype(np.float32)[self.kinds.indices]
        rates += self.start
        return np.clip(rates, 0, 1, out=rates)

    def values(self) -> np.ndarray:
        """[N] float32 in [0, 1]: the estimated pass rate of each prompt."""
        rates = self.expected()
        rates *= self._open
        rates += self._own
        return rates

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Updates the estimates with the pass rates of new groups."""
        known = [(o.draw.index, o.pass_rate) for o in outcomes if o.pass_rate == o.pass_rate]
        for index, rate in known:
            self.count[index] = min(self.count[index] + 1, self.most)
            self.mean[index] += (rate - self.mean[index]) / self.count[index]
        if not known:
            return
        index, rate = (np.array(part) for part in zip(*known, strict=True))
        self._weigh(index)
        if self.kinds is not None:
            groups = np.bincount(self.kinds.indices[index], minlength=len(self.drift))
            away = np.bincount(self.kinds.indices[index], rate - self.start[index], minlength=len(self.drift))
            met = groups > 0
            self.drift[met] += (1 - _LEVEL_DECAY ** groups[met]) * (away[met] / groups[met] - self.drift[met])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._weigh(slice(None))


class RateWeighted(Adaptive):
    """Base class of samplers that draw each prompt with a weight that depends on its estimated pass rate. Rejected
    prompts are drawn only when no other prompt is left."""

    def __init__(self, prompts: Prompts, rates: PassRates):
        super().__init__(prompts)
        self.rates = rates

    def weights(self, rates: np.ndarray) -> np.ndarray:
        """[N] non-negative sampling weights, from estimated pass rates [N]."""
        raise NotImplementedError

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        return weighted(self._weighed(self.rates.values()), count, rng)

    def _weighed(self, rates: np.ndarray) -> np.ndarray:
        weights = np.maximum(self.weights(rates), np.float32(LEAST))
        weights[self.history.rejected] = LEAST
        return weights

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        self.rates.learn(outcomes)

    def state(self) -> dict[str, Any]:
        return self.rates.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self.rates.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """The mean estimated pass rate of all prompts, and the probability of each category or tier of prompts in the
        next draws."""
        rates, kinds = self.rates.values(), self.rates.kinds
        out = {"curriculum/expected_pass_rate": float(rates.mean())}
        if kinds and len(kinds.names) > 1:
            shares = np.bincount(kinds.indices, self._weighed(rates), minlength=len(kinds.names))
            out |= weight_metrics(kinds.names, shares / shares.sum(), self.rates.sizes)
        return out


@as_uniform(floor=1)
class Prioritised(RateWeighted):
    """Draws prompts in proportion to how often they fail.

        weight_i = max(1 - s_i, floor)        s_i = (sum of pass rates + strength * prior) / (groups + strength)

    "Kimi k1.5: Scaling Reinforcement Learning with LLMs" (2501.12599), section 2.3.4, has the weights 1 - s_i; the
    prior, its strength and the floor are ours. Prompts that cannot be learned are drawn most often.

    prior     in [0, 1], the pass rate of unseen prompts
    strength  0..1e6, number of groups that the prior counts for
    floor     in [0, 1], minimum weight, so that solved prompts are still drawn at times
    by        a field of the rows: the prior of a prompt then follows the pass rate of its category, so that unseen
              prompts are weighted too; a numeric field is cut into `bins` (ours; not in the paper)"""

    def __init__(self, prompts: Prompts, prior: Fraction = 0.5, strength: Strength = 1.0, floor: Fraction = 0.0,
                 by: FieldName | None = None, bins: Bins = 5):
        kinds = categories(prompts, by, bins) if by else None
        super().__init__(prompts, PassRates(np.full(prompts.size, prior), kinds, strength))
        self.floor = floor

    def weights(self, rates: np.ndarray) -> np.ndarray:
        return np.maximum(1 - rates, np.float32(self.floor))


@as_uniform(floor=1)
class Rlcs(RateWeighted):
    """Reinforcement learning with curriculum sampling: prefers prompts of medium difficulty for the current policy.

        weight_i = max(4 p_i (1 - p_i), floor)

    p_i is the average of the prompt's observed pass rates, shrunk towards the prompt's offline rate: the pass rate
    measured before the run, which counts for `strength` groups. Rows with similar offline rates form a tier. A tier's
    drift is the average difference between the observed pass rates of its prompts and their offline rates. The drift
    corrects the offline rates, so unseen prompts of a tier that has become easy lose weight too. For a row without an
    offline rate, the mean offline rate of the other rows is used instead, or one half if there is none. All rows
    without an offline rate share one drift; with `by`, each category of these rows has a drift.

    "GLM-4.1V-Thinking" (2507.01006), section on RLCS, names the signals; the formula of the weight and the constants
    are ours. The paper's expansion ratio is curriculum.oversample=ema, and its choice of groups is
    curriculum.select=nearest_half.

    tier_by   pass_at_k: a field in [0, 1]; difficulty: a number, higher = harder, scaled to [0, 1] if necessary
    tiers     1..100 tiers of equal width
    decay     in [0, 1), decay of a prompt's average pass rate
    strength  0..1e6, number of groups that the offline rate counts for
    floor     in [0, 1], minimum weight, so that no prompt is lost
    by        a field of the rows whose values are the categories of rows without the offline field; a numeric field is
              cut into `bins`"""

    def __init__(self, prompts: Prompts, tier_by: Literal["pass_at_k", "difficulty"] = "pass_at_k", tiers: Tiers = 5,
                 decay: Beta = 0.5, strength: Strength = 1.0, floor: Fraction = 0.05, by: FieldName | None = None,
                 bins: Bins = 5):
        offline = offline_rates(prompts, tier_by)
        lacking = np.isnan(offline)
        kinds = _kinds(offline, lacking, tiers, categories(prompts, by, bins) if by and lacking.any() else None)
        middle = 0.5 if lacking.all() else float(np.nanmean(offline))
        super().__init__(prompts, PassRates(np.where(lacking, middle, offline), kinds, strength, 1 / (1 - decay)))
        self.floor = floor

    def weights(self, rates: np.ndarray) -> np.ndarray:
        values = 1 - rates
        values *= rates
        values *= 4
        return np.maximum(values, np.float32(self.floor), out=values)


def offline_rates(prompts: Prompts, tier_by: str) -> np.ndarray:
    """[N] the pass rate of each row, as measured before the run; NaN if the row lacks the field `tier_by`. A difficulty
    d is converted to the pass rate 1 - d, after all values are scaled to [0, 1] if any is outside. Raises
    ConfigError for a pass_at_k outside [0, 1]."""
    numbers = prompts.numbers(tier_by)
    numbers[~np.isfinite(numbers)] = np.nan
    outside = np.flatnonzero((numbers < 0) | (numbers > 1))
    if not len(outside):
        return numbers if tier_by == "pass_at_k" else 1 - numbers
    if tier_by == "pass_at_k":
        raise ConfigError(f"curriculum.tier_by='pass_at_k': {len(outside)} of {prompts.size} rows have a value outside "
                          f"[0, 1], such as {numbers[outside[0]]:g} in row {outside[0]}. Measure pass rates with `vlrl "
                          "data difficulty`, or set curriculum.tier_by=difficulty")
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    return (high - numbers) / (high - low) if high > low else np.where(np.isnan(numbers), np.nan, 0.5)


def _kinds(offline: np.ndarray, lacking: np.ndarray, tiers: int, untiered: Categories | None) -> Categories:
    """Groups the prompts: those with an `offline` pass rate into `tiers` equal ranges, those without (`lacking` [N]
    bool) by their category in `untiered`, or into one group if `untiered` is None. Leaves out empty groups."""
    edges = np.linspace(0, 1, tiers + 1)
    names = [f"pass_{low:.3g}-{high:.3g}" for low, high in itertools.pairwise(edges)]
    tier = np.minimum((np.where(lacking, 0, offline) * tiers).astype(np.int32), tiers - 1)
    of = np.where(lacking, tiers + (untiered.indices if untiered else 0), tier)
    every = (*names, *(untiered.names if untiered else ("untiered",)))
    met, of = np.unique(of, return_inverse=True)
    return Categories(tuple(every[kind] for kind in met), of.astype(np.int32))


@as_uniform(share=0)
class SelectiveReplay(Adaptive):
    """Draws part of the prompts from a buffer of prompts with a recent nonzero advantage, and the rest from shuffled
    passes over all prompts.

        P(j) proportional to A_j ^ alpha, over the buffer

    A_j is the mean |advantage| of the prompt's last group. A prompt enters the buffer, or moves to the end of the
    buffer, when its last group has an advantage other than 0. A prompt leaves the buffer when all advantages of its
    last group are 0, or when `buffer` other prompts have entered since. Selective sample replay of "VL-Rethinker"
    (2504.08837). The paper replays stored completions; here the current policy answers the prompt again, so replay
    costs rollouts but needs no off-policy correction.

    share   in [0, 1], share of draws from the buffer; a smaller share if the buffer has too few prompts
    alpha   0..100; 0 = all prompts of the buffer equally
    buffer  1..100,000 prompts
    scale   whether A is divided by the standard deviation of its group; false suits graded rewards"""

    def __init__(self, prompts: Prompts, share: Fraction = 0.5, alpha: Power = 1.0, buffer: Buffer = 1024,
                 scale: bool = True):
        super().__init__(prompts)
        self.share, self.alpha, self.most, self.scale = share, alpha, buffer, scale
        self.pool: dict[int, float] = {}
        """|A| of the prompts in the buffer, by prompt index, the oldest first."""
        self.passes = Cycle(np.arange(prompts.size, dtype=np.int32), prompts.seed, 5)

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        wanted = min(int(self.share * count + rng.random()), len(self.pool))
        again: list[int] = []
        if wanted:
            paid = np.array([*self.pool.values()])
            weights = np.maximum((paid / paid.max()) ** self.alpha, LEAST)
            again = np.array([*self.pool])[weighted(weights, wanted, rng)].tolist()
        return rng.permutation([*again, *next_distinct(self.passes, count - wanted, {*again})])

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        for o in outcomes:
            self.pool.pop(o.draw.index, None)
            if paid := o.advantage(self.scale):
                self.pool[o.draw.index] = paid
        for index in [*itertools.islice(self.pool, max(0, len(self.pool) - self.most))]:
            del self.pool[index]

    def state(self) -> dict[str, Any]:
        return {"drawn": self.passes.drawn, "held": np.array([*self.pool], dtype=np.int64),
                "paid": np.array([*self.pool.values()])}

    def restore(self, state: dict[str, Any]) -> None:
        self.passes.drawn = int(state["drawn"])
        self.pool = dict(zip(np.asarray(state["held"]).tolist(), np.asarray(state["paid"]).tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        return {"curriculum/buffer": float(len(self.pool)), "curriculum/epoch": self.passes.drawn / self.prompts.size}
