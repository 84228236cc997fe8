"""Samplers that stop drawing some prompts, either for a while (Lifecycle) or for good (Limr)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from vlrl.config.base import Beta, Fraction
from vlrl.curriculum.base import Prompts
from vlrl.curriculum.drawing import Adaptive, Cycle, next_distinct, weighted
from vlrl.curriculum.types import Outcome

log = logging.getLogger(__name__)

Epochs = Annotated[int, Field(ge=1, le=20)]
Steps = Annotated[int, Field(ge=1, le=1_000_000)]
Visits = Annotated[int, Field(ge=1, le=100)]
_NEVER = np.iinfo(np.int32).max
_MOST_RESTS = 10
_BEST = 0.1


class Lifecycle(Adaptive):
    """Prompts go through a life cycle: they are new, then active, and rest for a while after several visits of little
    use. A visit is one answered group of the prompt.

        use of a visit = p (1 - p) + max(0, reward - reward of the previous visit)
        utility_i <- decay utility_i + (1 - decay) use        (utility_i begins with the first use)

    p is the pass rate of the visit. Of the draws, the fraction `fresh` goes to prompts that were never drawn, in
    shuffled order, while there are any. The other draws are active prompts, each with weight utility_i + floor. After
    `patience` visits in a row that leave the utility below `low`, a prompt rests for `rest` steps. The prompt is then
    active again with utility `low`. If its next visit leaves the utility below `low`, the prompt rests for twice as
    long. If active and new prompts are too few, the resting prompts whose rest ends first are drawn. "FaVChat:
    Hierarchical Prompt-Query Guided Facial Video Understanding with Data-Efficient GRPO" (2503.09158) has a utility per
    instance and a life cycle; the formulas and constants are ours.

    fresh     in [0, 1], share of new prompts among the draws while there are any
    decay     in [0, 1), decay of the utility
    low       in [0, 1]; p (1 - p) is at most 0.25, and 0.11 for one correct completion of 8
    patience  1..100 visits
    rest      1..1,000,000 steps; the rest doubles at most 10 times
    floor     in [0, 1], added to the utility of an active prompt"""

    saved = ("utility", "before", "due", "lows", "rests")

    def __init__(self, prompts: Prompts, fresh: Fraction = 0.5, decay: Beta = 0.5, low: Fraction = 0.05,
                 patience: Visits = 2, rest: Steps = 50, floor: Fraction = 0.02):
        super().__init__(prompts)
        self.fresh, self.decay, self.low, self.patience = fresh, decay, low, patience
        self.rest, self.floor, self._step = rest, floor, 0
        self.passes = Cycle(np.arange(prompts.size, dtype=np.int32), prompts.seed, 6)
        self.utility = np.zeros(prompts.size, dtype=np.float32)
        self.before = np.full(prompts.size, np.nan, dtype=np.float32)
        """[N] mean reward of each prompt's last group; NaN = never answered."""
        self.due = np.full(prompts.size, _NEVER, dtype=np.int32)
        """[N] the step from which each prompt can be drawn again; _NEVER for prompts that were never answered."""
        self.lows, self.rests = (np.zeros(prompts.size, dtype=np.int8) for _ in range(2))

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        self._step = step
        unseen = max(0, self.prompts.size - self.passes.drawn)
        weights = (self.utility + np.float32(self.floor)) * (self.due <= step)
        wanted = min(int(self.fresh * count + rng.random()), unseen)
        active = min(count - wanted, int(np.count_nonzero(weights)))
        new = self.passes.take(min(count - active, unseen))
        picked = [*new.tolist(), *(weighted(weights, active, rng).tolist() if active else [])]
        picked += self._resting(step, weights, count - len(picked)).tolist()
        return rng.permutation([*picked, *next_distinct(self.passes, count - len(picked), {*picked})])

    def _resting(self, step: int, weights: np.ndarray, most: int) -> np.ndarray:
        if not most:
            return np.zeros(0, dtype=np.int64)
        resting = np.flatnonzero((self.due < _NEVER) & (weights == 0))
        return resting[np.argsort(self.due[resting], kind="stable")[:most]]

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        for o in outcomes:
            if (p := o.pass_rate) == p:
                self._visited(o.draw.index, p, o.reward, step)

    def _visited(self, i: int, p: float, reward: float, step: int) -> None:
        gain = max(0.0, reward - float(self.before[i]))  # 0 if `before` is NaN: max keeps its first argument
        use = p * (1 - p) + gain
        first = bool(np.isnan(self.before[i]))
        self.utility[i] = use if first else self.decay * self.utility[i] + (1 - self.decay) * use
        self.before[i], self.due[i] = reward, 0
        self.lows[i] = self.lows[i] + 1 if self.utility[i] < self.low else 0
        if not self.lows[i]:
            self.rests[i] = 0
        if self.lows[i] >= self.patience:
            self.due[i] = min(step + self.rest * 2 ** int(self.rests[i]), _NEVER - 1)
            self.rests[i] = min(self.rests[i] + 1, _MOST_RESTS)
            self.utility[i], self.lows[i] = self.low, self.patience - 1

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "drawn": self.passes.drawn, **super().state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._step, self.passes.drawn = int(state["step"]), int(state["drawn"])
        super().restore(state)

    def metrics(self) -> dict[str, float]:
        """The shares of all prompts that are new (never drawn), active, and resting."""
        visited, active = np.count_nonzero(self.due < _NEVER), np.count_nonzero(self.due <= self._step)
        counts = {"new": max(0, self.prompts.size - self.passes.drawn), "active": active, "resting": visited - active}
        return {f"curriculum/{name}": count / self.prompts.size for name, count in counts.items()}


class Limr(Adaptive):
    """Records the pass rates of all prompts for some epochs, then keeps the prompts whose pass rates follow the mean
    learning curve.

        s_i = 1 - sum_k (r_i^k - mean^k)^2 / sum_k (1 - mean^k)^2        kept where s_i > threshold

    r_i^k is the pass rate when the prompt is drawn for the k-th time, and mean^k the mean of all prompts' k-th pass
    rates. The sums are over the draws with an answer. During the first `epochs` epochs all prompts are drawn, in
    shuffled passes; after that only the kept prompts are. If no prompt is above the threshold, the best tenth is kept,
    with a warning. "LIMR: Less is More for RL Scaling" (2502.11886), section 2; its threshold is 0.6, the number of
    epochs is ours. This sampler pays off in long runs only, because the recording epochs cost as much as any other.

    epochs     1..20; 4 bytes per prompt and epoch
    threshold  below 1"""

    def __init__(self, prompts: Prompts, epochs: Epochs = 3, threshold: Annotated[float, Field(lt=1)] = 0.6):
        super().__init__(prompts)
        self.epochs, self.threshold = epochs, threshold
        self.passes = Cycle(np.arange(prompts.size, dtype=np.int32), prompts.seed, 7)
        self.rates = np.full((epochs, prompts.size), np.nan, dtype=np.float32)
        self.chosen: np.ndarray | None = None

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        if self.chosen is None and self.passes.drawn >= self.epochs * self.prompts.size:
            self._choose(self._above_threshold())
        return next_distinct(self.passes, count, set())

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        for o in outcomes if self.chosen is None else ():
            if o.draw.visit < self.epochs:
                self.rates[o.draw.visit, o.draw.index] = o.pass_rate

    def scores(self) -> np.ndarray:
        """[N] s_i of each prompt, at most 1; NaN for a prompt that was never answered."""
        known = ~np.isnan(self.rates)
        mean = np.where(known, self.rates, 0).sum(axis=1, keepdims=True) / np.maximum(known.sum(axis=1), 1)[:, None]
        away, most = (np.where(known, v ** 2, 0).sum(axis=0, dtype=np.float64) for v in (self.rates - mean, 1 - mean))
        score = 1 - np.divide(away, most, out=np.zeros(self.prompts.size), where=most > 0)
        return np.where(known.any(axis=0), score, np.nan)

    def _above_threshold(self) -> np.ndarray:
        scores = self.scores()
        chosen, known = np.flatnonzero(scores > self.threshold), np.flatnonzero(~np.isnan(scores))
        if not len(chosen):
            best = known[np.argsort(-scores[known], kind="stable")[:math.ceil(_BEST * len(known))]]
            chosen = np.sort(best) if len(best) else np.arange(self.prompts.size)
            log.warning("curriculum.threshold=%s: no prompt has a higher score, so the %d of %d prompts with the best "
                        "scores are kept", self.threshold, len(chosen), self.prompts.size)
        return chosen

    def _choose(self, chosen: np.ndarray) -> None:
        self.chosen, self.rates = chosen.astype(np.int32), self.rates[:, :0]
        self.passes = Cycle(self.chosen, self.prompts.seed, 8)

    def state(self) -> dict[str, Any]:
        return {"rates": self.rates, "chosen": self.chosen, "drawn": self.passes.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        if state["chosen"] is not None:
            self._choose(np.asarray(state["chosen"]))
        else:
            self.rates[...] = np.asarray(state["rates"])
        self.passes.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        """The share of prompts that are kept (1 while recording), and the number of passes over the kept prompts."""
        count = self.prompts.size if self.chosen is None else len(self.chosen)
        return {"curriculum/kept": count / self.prompts.size, "curriculum/epoch": self.passes.drawn / count}
