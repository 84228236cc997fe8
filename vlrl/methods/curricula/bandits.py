"""Samplers over categories of prompts: each category has a share of the draws, which is learned from the results of its
prompts.

A category is one value of a field of the rows (`by`; "task" in a mixture), or one of `bins` ranges of a numeric field.
The results of all answered groups count, also of groups that are filtered out before training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from vlrl.config.base import Beta, Fraction, Positive, Rate
from vlrl.curriculum.base import Categories, Prompts, as_uniform
from vlrl.curriculum.drawing import Adaptive, Cycle, next_distinct, softmax
from vlrl.curriculum.types import Draw, Outcome
from vlrl.errors import ConfigError

FieldName = Annotated[str, Field(min_length=1)]
Bins = Annotated[int, Field(ge=2, le=100)]
Window = Annotated[int, Field(ge=1, le=10_000)]

MOST_CATEGORIES = 1000
_SHOWN = 50
"""Maximum number of categories whose shares are metrics."""
_RISE = 1e-3
"""The largest slope of pass rates that does not count as a rise, to allow for rounding."""


class CategorySampler(Adaptive):
    """Base class of samplers with a probability per category (`shares`). The number of draws per category is
    multinomial, and the prompts of a category are drawn in shuffled passes.

    No prompt is drawn twice in one call while others are left: draws that exceed the number of a category's prompts go
    to the other categories, and a category whose prompts are all rejected is drawn last. Raises ConfigError if all rows
    have the same value of the field, or if there are too many categories."""


    def __init__(self, prompts: Prompts, by: str, bins: int):
        super().__init__(prompts)
        self.categories = categories(prompts, by, bins)
        self.names, self.sizes = self.categories.names, np.array([len(m) for m in self.categories.members])
        self.cycles = [Cycle(members, prompts.seed, 4, c) for c, members in enumerate(self.categories.members)]

    def shares(self) -> np.ndarray:
        """[C] probability of each category."""
        raise NotImplementedError

    def draw_shares(self) -> np.ndarray:
        """[C] the share of the draws that each category gets: `shares`, except in a sampler that weights the loss
        instead of the draws."""
        return self.shares()

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        whole, rest = divmod(count, self.prompts.size)
        parts = [rng.permutation(self.prompts.size) for _ in range(whole)]
        counts = self.counts(rest, rng)
        drawn = [next_distinct(cycle, n, set()) for cycle, n in zip(self.cycles, counts.tolist(), strict=True) if n]
        return np.concatenate([*parts, rng.permutation(np.concatenate(drawn))] if drawn else parts)

    def counts(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """[C] the number of draws, out of `count`, that each category gets; at most the number of its prompts."""
        counts, shares = np.zeros(len(self.names), dtype=np.int64), self.draw_shares()
        room = self.sizes - np.bincount(self.categories.indices[self.history.rejected], minlength=len(self.names))
        while missing := count - int(counts.sum()):
            open_ = np.where(counts < room, shares, 0.0)
            if not open_.sum():
                room = room if (counts < room).any() else self.sizes
                open_ = (room - counts).astype(np.float64)
            counts = np.minimum(counts + rng.multinomial(missing, open_ / open_.sum()), room)
        return counts

    def means(self, outcomes: Sequence[Outcome], values: Sequence[float]) -> dict[int, float]:
        """Returns {category index: mean of `values`} for the categories that have outcomes. `values` holds one number
        per outcome, which is weighted by the outcome's number of scorable completions."""
        of = self.categories.indices[np.array([o.draw.index for o in outcomes], dtype=np.int64)]
        answers = np.array([len(o.scored) for o in outcomes])
        total, count = np.bincount(of, answers * np.array(values)), np.bincount(of, answers)
        return {int(c): float(total[c] / count[c]) for c in np.flatnonzero(count)}

    def state(self) -> dict[str, Any]:
        return {"drawn": [cycle.drawn for cycle in self.cycles], **super().state()}

    def restore(self, state: dict[str, Any]) -> None:
        for cycle, drawn in zip(self.cycles, state["drawn"], strict=True):
            cycle.drawn = int(drawn)
        super().restore(state)

    def metrics(self) -> dict[str, float]:
        return weight_metrics(self.names, self.shares(), self.sizes)


def categories(prompts: Prompts, by: str, bins: int) -> Categories:
    """Groups the prompts by the field `by` (numbers in `bins` ranges) and drops empty categories. Raises ConfigError
    for fewer than 2 categories or more than MOST_CATEGORIES."""
    groups = prompts.categories(by, bins)
    sizes = np.bincount(groups.indices, minlength=len(groups.names))
    filled = np.flatnonzero(sizes)
    if len(filled) < 2:
        only = groups.names[filled[0]] if len(filled) else "none"
        reason = "no row has that field" if only == "none" else f"it is {only[:40]!r} in every row"
        raise ConfigError(f"curriculum.by={by!r} does not tell the {prompts.size} prompts apart: {reason}. Set "
                          "curriculum.by to a field in which the rows differ ('task' in a mixture whose tasks have no "
                          "weights), or to a column of the file data.difficulty")
    if len(filled) > MOST_CATEGORIES:
        raise ConfigError(f"curriculum.by={by!r} divides {prompts.size} prompts into {len(filled)} categories, but at "
                          f"most {MOST_CATEGORIES} are supported: set curriculum.by to a field with fewer values")
    place = np.zeros(len(sizes), dtype=np.int32)
    place[filled] = np.arange(len(filled))
    return Categories(tuple(groups.names[c] for c in filled), place[groups.indices])


def weight_metrics(names: tuple[str, ...], shares: np.ndarray, sizes: np.ndarray) -> dict[str, float]:
    """The shares of the categories with the largest `sizes` (numbers of prompts), as metrics
    curriculum/weight/<category>. In the names, characters other than letters, digits and ".+-" become "_"."""
    shown = np.sort(np.argsort(-sizes, kind="stable")[:_SHOWN])
    out: dict[str, float] = {}
    for c in shown.tolist():
        key = "curriculum/weight/" + re.sub(r"[^\w.+-]+", "_", names[c][:40])
        out[key] = out.get(key, 0.0) + float(shares[c])
    return out


class Sec(CategorySampler):
    """Self-evolving curriculum: categories are the arms of a non-stationary bandit whose reward is |advantage|.

        Q(d) <- alpha r(d) + (1 - alpha) Q(d)        share(d) proportional to exp(Q(d) / tau)

    r(d) is the mean |A| of the completions of category d in the last round of generation. A category without draws in
    the round keeps its Q, which starts at 0. "Self-Evolving Curriculum for LLM Reasoning" (2505.14970), TD(0); the
    defaults of alpha and tau are ours.

    alpha   in [0, 1], weight of the last round
    tau     > 0, higher = more even shares; with tau = 1 the largest share is at most e times the smallest
    scale   whether A is divided by the standard deviation of its group. False suits graded rewards (IoU, a format
            part): after the division, a difference of 0.01 counts as much as one of 1"""

    saved = ("values",)

    def __init__(self, prompts: Prompts, by: FieldName = "category", bins: Bins = 5, alpha: Fraction = 0.5,
                 tau: Rate = 1.0, scale: bool = True):
        super().__init__(prompts, by, bins)
        self.alpha, self.tau, self.scale = alpha, tau, scale
        self.values = np.zeros(len(self.names))

    def shares(self) -> np.ndarray:
        return softmax(self.values, self.tau)

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        for c, paid in self.means(outcomes, [o.advantage(self.scale) for o in outcomes]).items():
            self.values[c] += self.alpha * (paid - self.values[c])


class Dump(CategorySampler):
    """Draws categories in proportion to exp(UCB / tau), where UCB is an upper confidence bound on the learnability.

        UCB(d) = L(d) + sqrt(2 ln(n + 1) / (n_d + 1))        share(d) proportional to exp(UCB(d) / tau)

    L(d) is the mean |A| over the last `window` completions of category d. Each completion counts with the mean |A| of
    its group. L(d) is 0 before the first completion. n_d is the number of answered groups of the category, and n the
    sum of all n_d. "DUMP: Automated Distribution-Level Curriculum Learning for RL-based LLM Post-training"
    (2504.09710); the defaults of window and tau are ours.

    window  1..10,000 completions
    tau     > 0; at tau = 0.1 a difference of 0.1 in UCB is a factor of e between shares
    scale   whether A is divided by the standard deviation of its group"""

    saved = ("window", "answers", "groups")

    def __init__(self, prompts: Prompts, by: FieldName = "category", bins: Bins = 5, window: Window = 300,
                 tau: Rate = 0.1, scale: bool = True):
        super().__init__(prompts, by, bins)
        self.tau, self.scale = tau, scale
        self.window = np.zeros((len(self.names), window))
        self.answers, self.groups = (np.zeros(len(self.names), dtype=np.int64) for _ in range(2))

    def bounds(self) -> np.ndarray:
        """[C] UCB of each category, the upper confidence bound on the category's learnability."""
        mean = self.window.sum(axis=1) / np.clip(self.answers, 1, self.window.shape[1])
        return mean + np.sqrt(2 * np.log(self.groups.sum() + 1) / (self.groups + 1))

    def shares(self) -> np.ndarray:
        return softmax(self.bounds(), self.tau)

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        for o in outcomes:
            c, n = self.categories.indices[o.draw.index], len(o.scored)
            self.window[c, (self.answers[c] + np.arange(n)) % self.window.shape[1]] = o.advantage(self.scale)
            self.answers[c] += n
            self.groups[c] += 1


class DomainWeighted(CategorySampler):
    """Domain-aware dynamic sampling: domains (categories) far from the target reward are drawn more often.

        v(d) <- alpha r(d) + (1 - alpha) v(d)        share(d) proportional to exp((target - v(d)) / tau) + epsilon

    r(d) is the mean reward of the completions of domain d in the last round of generation. v(d) is 0 until domain d has
    completions, and then begins with the first r(d). "RuleReasoner: Reinforced Rule-based Reasoning via Domain-aware
    Dynamic Sampling" (2506.08672); the constants are those of its released configuration. A domain that cannot be
    learned keeps the largest share.

    alpha    in [0, 1], weight of the last round
    tau      > 0, higher = more even shares
    target   the reward of a correct answer
    epsilon  >= 0, makes shares more even; the paper has 0.1 for up to 10 domains, 1 / number of domains for more"""

    saved = ("values", "seen")

    def __init__(self, prompts: Prompts, by: FieldName = "category", bins: Bins = 5, alpha: Fraction = 0.5,
                 tau: Rate = 0.8, target: float = 1.0, epsilon: Annotated[float, Field(ge=0)] = 0.1):
        super().__init__(prompts, by, bins)
        self.alpha, self.tau, self.target, self.epsilon = alpha, tau, target, epsilon
        self.values, self.seen = np.zeros(len(self.names)), np.zeros(len(self.names), dtype=bool)

    def shares(self) -> np.ndarray:
        weights = np.exp(np.minimum((self.target - self.values) / self.tau, 100.0)) + self.epsilon
        total = weights.sum()
        return weights / total if total else self.sizes / self.sizes.sum()

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        for c, reward in self.means(outcomes, [o.reward for o in outcomes]).items():
            self.values[c] += (self.alpha if self.seen[c] else 1.0) * (reward - self.values[c])
            self.seen[c] = True


class Recap(CategorySampler):
    """Draws objectives (categories) more often, or gives them more weight, if they converge slowly or are unstable. A
    solved objective loses its weight.

        gap(d)   = max(0, target - fast(d)) / target
        score(d) = gap(d) (convergence(d) + instability(d))        share(d) proportional to exp(score(d) / tau)

    fast and slow are two exponential averages of the objective's reward. convergence = (target - fast) / (target -
    slow), in [0, 2]: it is below 1 while the reward rises, 1 if it stalls, and above 1 while the objective is being
    forgotten. instability is the standard deviation of the reward per round around its slow average, divided by target.
    An objective that was not drawn yet has score 1. The signals are those of "Beyond Reasoning Gains: Mitigating
    General Capabilities Forgetting in Large Reasoning Models" (RECAP, 2510.21978), which weights loss terms with them.
    The formula, the constants and the use for draws are ours.

    weigh       draws: objectives are drawn by their shares. loss: prompts are drawn evenly, and the loss of a group is
                multiplied by share / (the objective's share of the prompts), which is 1 on average
    fast, slow  in [0, 1), decay of the averages per round; fast < slow
    tau         > 0, higher = more even shares
    target      > 0, the reward of a perfect answer"""

    saved = ("fast", "slow", "variance", "seen")

    def __init__(self, prompts: Prompts, by: FieldName = "task", bins: Bins = 5, fast: Beta = 0.5, slow: Beta = 0.9,
                 tau: Rate = 0.5, target: Rate = 1.0, weigh: Literal["draws", "loss"] = "draws"):
        if fast >= slow:
            raise ValueError(f"curriculum.fast={fast} is not below curriculum.slow={slow}: lower curriculum.fast")
        super().__init__(prompts, by, bins)
        self.decays, self.tau, self.target, self.weigh = (fast, slow), tau, target, weigh
        self.fast, self.slow, self.variance = (np.zeros(len(self.names)) for _ in range(3))
        self.seen = np.zeros(len(self.names), dtype=bool)

    def scores(self) -> np.ndarray:
        """[C] score of each objective: about 0 if it is solved, 2 and more if it is far from solved, being forgotten or
        unstable."""
        gap, before = (np.maximum(self.target - v, 0.0) for v in (self.fast, self.slow))
        ratio = np.divide(gap, before, out=np.full_like(gap, 2.0), where=before > 0)
        score = gap / self.target * (np.minimum(ratio, 2.0) + np.sqrt(self.variance) / self.target)
        return np.where(self.seen, score, 1.0)

    def shares(self) -> np.ndarray:
        return softmax(self.scores(), self.tau)

    def draw_shares(self) -> np.ndarray:
        return self.shares() if self.weigh == "draws" else self.sizes / self.sizes.sum()

    def draws(self, indices: np.ndarray | Sequence[int], **more: Any) -> list[Draw]:
        weights = self.shares() / self.draw_shares()
        return [replace(draw, weight=float(weights[self.categories.indices[draw.index]]))
                for draw in super().draws(indices, **more)]

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        fast, slow = self.decays
        for c, reward in self.means(outcomes, [o.reward for o in outcomes]).items():
            if not self.seen[c]:
                self.fast[c] = self.slow[c] = reward
                self.seen[c] = True
            away = reward - self.slow[c]
            self.variance[c] += (1 - slow) * (away ** 2 - self.variance[c])
            self.fast[c] += (1 - fast) * (reward - self.fast[c])
            self.slow[c] += (1 - slow) * away


@as_uniform(floor=1)
class Sws(CategorySampler):
    """Weakness-driven sampling: a category is drawn in proportion to the share of its items (prompts) that fail
    consistently.

    An item is judged once `visits` of its groups are answered. It is a weakness while its pass rate has never reached
    one half and does not rise, that is, the slope of the least-squares line through its pass rates is at most 0.

        F(d) = (weaknesses + 1) / (judged items + 2)
        share(d) = (1 - floor) F(d) / sum F + floor * (size of d) / (all prompts)

    "SwS: Self-aware Weakness-driven Problem Synthesis in Reinforcement Learning for LLM Reasoning" (2506.08989)
    synthesises new problems per category in proportion to F; here the category's share of the draws grows instead. The
    paper judges items after several epochs. `visits`, the +1 and +2 in F (so that a category without judged items has F
    = 1/2) and the floor are ours. A category that cannot be learned keeps a large share.

    visits  >= 1; with 1 an item is a weakness until a group reaches one half or a later group is better
    floor   in [0, 1], share of the draws that is spread evenly over all prompts"""

    saved = ("times", "best", "total", "tilted", "weak", "judged")

    def __init__(self, prompts: Prompts, by: FieldName = "category", bins: Bins = 5, visits: Positive = 1,
                 floor: Fraction = 0.1):
        super().__init__(prompts, by, bins)
        self.visits, self.floor = visits, floor
        self.times = np.zeros(prompts.size, dtype=np.int32)
        self.best = np.zeros(prompts.size, dtype=np.float32)
        self.total, self.tilted = np.zeros(prompts.size), np.zeros(prompts.size)
        self.weak, self.judged = (np.zeros(len(self.names), dtype=np.int64) for _ in range(2))

    def failures(self) -> np.ndarray:
        """[C] the smoothed share F of items that fail consistently, in each category; in (0, 1)."""
        return (self.weak + 1) / (self.judged + 2)

    def shares(self) -> np.ndarray:
        failures = self.failures()
        return (1 - self.floor) * failures / failures.sum() + self.floor * self.sizes / self.prompts.size

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        known = [(o.draw.index, o.pass_rate) for o in outcomes if o.pass_rate == o.pass_rate]
        touched = np.unique(np.array([index for index, _ in known], dtype=np.int64))
        self._count(touched, -1)
        for index, rate in known:
            self.tilted[index] += self.times[index] * rate
            self.total[index] += rate
            self.best[index] = max(self.best[index], rate)
            self.times[index] += 1
        self._count(touched, 1)

    def _count(self, items: np.ndarray, sign: int) -> None:
        items = items[self.times[items] >= self.visits]
        n = self.times[items]
        slope = n * self.tilted[items] - n * (n - 1) / 2 * self.total[items]
        weak = (self.best[items] < 0.5) & (slope <= _RISE)
        of = self.categories.indices[items]
        self.judged += sign * np.bincount(of, minlength=len(self.names))
        self.weak += sign * np.bincount(of[weak], minlength=len(self.names))
