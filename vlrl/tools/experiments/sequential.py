"""A group-sequential permutation test, AdaStop (2306.10882). It compares algorithms with more and more seeds, until a
difference is shown or the seeds are used up. Uses numpy only.

    test = Sequential(("a", "b"))
    while test.undecided:
        test.add({name: scores of n new seeds for name in test.waiting})
    test.decisions[("a", "b")]      # "a", "b" or "" = no difference shown

With more than two algorithms it is a closed test (Marcus, Peritz and Gabriel, 1976). Every partition that calls some of
the algorithms equal is a separate hypothesis, tested by permuting the scores of the algorithms that it calls equal. A
pair of algorithms is decided once every hypothesis that calls the two equal is rejected. The true hypothesis is
rejected with a probability of at most alpha, and without that rejection no pair of equal algorithms is decided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Pair = tuple[str, str]
Hypothesis = tuple[tuple[str, ...], ...]
"""Disjoint groups of two or more algorithms. The hypothesis says that the algorithms within each group are equal, and
that the algorithms of all other pairs differ."""
MOST = 8  # maximum number of algorithms: 8 algorithms have 4,139 hypotheses
_TIE = 1e-9  # two sums count as equal if their difference is below this share of the largest score


class InterimAnalysis(NamedTuple):
    """The state of the test after one block of seeds: statistics, thresholds and decided pairs."""

    block: int  # number of the block, counted from 1
    statistics: dict[Pair, float]
    """|sum over blocks of (mean_a - mean_b)| for each pair that was undecided before this block."""
    thresholds: dict[Pair, float]
    """For each pair the value that its statistic must exceed to reject the hypothesis that only this pair is equal;
    infinite if the significance level allows no decision yet. To decide the pair, every other hypothesis in which
    the pair is equal must be rejected too."""
    decided: dict[Pair, str]
    spent: float  # the largest significance level that any hypothesis has used so far


@dataclass
class _Test:
    """The state of testing one hypothesis: the thresholds so far, the significance level used so far, and whether the
    hypothesis is rejected."""

    thresholds: list[float] = field(default_factory=list)  # the threshold b_k of each block
    spent: float = 0.0
    rejected: bool = False


@dataclass
class Sequential:
    """A sequential comparison of every pair of several algorithms. Each of at most `blocks` blocks adds the scores of
    `n` new seeds for every algorithm of an undecided pair.

    The probability of deciding any pair of algorithms with equal score distributions is at most `alpha`, over all
    blocks and pairs. `resamples` random permutations are used for each hypothesis; for only two algorithms all
    permutations are enumerated if there are fewer. The same scores and `seed` give the same decisions."""

    names: tuple[str, ...]
    n: int = 5
    blocks: int = 5
    alpha: float = 0.05
    resamples: int = 10_000
    seed: int = 0
    looks: list[InterimAnalysis] = field(default_factory=list)
    decisions: dict[Pair, str] = field(default_factory=dict)
    """Decided pair -> the algorithm with the higher score; "" if no difference is shown after the last block."""
    _scores: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _largest: dict[str, float] = field(default_factory=dict)  # algorithm -> its largest |score| so far
    _tests: dict[Hypothesis, _Test] = field(default_factory=dict)
    _drawn: dict[tuple[str, ...], list[np.ndarray]] = field(default_factory=dict)
    """Group of algorithms -> one array [permutations] per block: the largest |difference between the summed means of
    two algorithms| after this block, under permuted labels."""
    _sums: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    """Group of algorithms -> array [permutations, algorithms]: the mean scores of each algorithm under permuted labels,
    summed over all blocks in `_drawn`."""

    def __post_init__(self) -> None:
        if not 2 <= len(set(self.names)) == len(self.names) <= MOST:
            raise ValueError(f"names {self.names}: a comparison needs 2 to {MOST} different names")
        if self.n < 2 or self.blocks < 1 or not 0 < self.alpha < 1:
            raise ValueError(f"n={self.n}, blocks={self.blocks}, alpha={self.alpha}: n must be at least 2, blocks at "
                             "least 1, and alpha between 0 and 1")
        self._scores = {name: [] for name in self.names}
        self._tests = {hypothesis: _Test() for hypothesis in hypotheses(self.names)}

    @property
    def undecided(self) -> list[Pair]:
        """The pairs of algorithms that are not decided yet; [] after the last block."""
        return [pair for pair in itertools.combinations(self.names, 2) if pair not in self.decisions]

    @property
    def waiting(self) -> list[str]:
        """The algorithms that need another block of seeds, because at least one of their pairs is undecided."""
        return [name for name in self.names if any(name in pair for pair in self.undecided)]

    def add(self, scores: Mapping[str, Sequence[float]]) -> InterimAnalysis:
        """Adds one block and decides pairs if possible. `scores` maps each algorithm in `waiting` to its `n` new
        scores. Returns the state of the test after this block.

        Raises ValueError if scores are missing, superfluous or not finite."""
        if set(scores) != set(self.waiting):
            raise ValueError(f"block {len(self.looks) + 1} needs scores of {self.waiting}, not of {list(scores)}")
        for name, values in scores.items():
            block = np.asarray(values, np.float64)
            if block.shape != (self.n,) or not np.isfinite(block).all():
                raise ValueError(f"block {len(self.looks) + 1} of {name!r} needs {self.n} finite scores, not {values}")
            self._scores[name].append(block)
            self._largest[name] = max(self._largest.get(name, 0.0), float(np.abs(block).max()))
        look = self._interim(self.undecided)
        self.looks.append(look)
        self.decisions |= look.decided
        if len(self.looks) == self.blocks:
            self.decisions |= dict.fromkeys(self.undecided, "")
        return look

    def _interim(self, pairs: list[Pair]) -> InterimAnalysis:
        k, maxima = len(self.looks) + 1, dict[tuple[str, ...], np.ndarray]()
        for hypothesis, test in self._tests.items():
            if not test.rejected:
                self._examine(hypothesis, test, k, maxima)
        sums = {pair: self._sum(pair) for pair in pairs}
        equal = {pair for h, test in self._tests.items() if not test.rejected
                 for group in h for pair in itertools.combinations(group, 2)}
        decided = {pair: pair[0 if sums[pair] > 0 else 1] for pair in pairs if pair not in equal}
        return InterimAnalysis(k, {pair: abs(value) for pair, value in sums.items()},
                    {pair: self._tests[(pair,)].thresholds[-1] for pair in pairs}, decided,
                    max(test.spent for test in self._tests.values()))

    def _examine(self, hypothesis: Hypothesis, test: _Test, k: int, maxima: dict[tuple[str, ...], np.ndarray]) -> None:
        """Tests a hypothesis after block `k`. Updates `test`: adds the threshold of this block, and sets the
        significance level used so far and whether the hypothesis is rejected.

        `maxima` caches the results of _maxima for groups that occur in several hypotheses. If the hypothesis is a
        single pair, all permutations are enumerated if there are few enough."""
        alone = len(hypothesis) == 1 and len(hypothesis[0]) == 2
        for group in () if alone else hypothesis:
            if group not in maxima:
                maxima[group] = self._maxima(group, False)
        statistics = (self._maxima(hypothesis[0], True) if alone else
                      np.max([maxima[group] for group in hypothesis], axis=0))
        alive = np.ones(statistics.shape[1], bool)
        tie = _TIE * self._scale([name for group in hypothesis for name in group])
        for earlier, threshold in enumerate(test.thresholds):
            alive &= statistics[earlier] <= threshold + tie  # those that tie with it, as the true labelling may, go on
        top = np.sort(statistics[k - 1][alive])[::-1]
        threshold, used = _threshold(top, statistics.shape[1], self.alpha * k / self.blocks - test.spent)
        test.thresholds.append(threshold)
        test.spent += used
        test.rejected = bool(statistics[k - 1, 0] > threshold)

    def _maxima(self, group: tuple[str, ...], alone: bool) -> np.ndarray:
        """Returns an array [blocks, permutations]: for each block the largest |difference between the summed means| of
        any two algorithms in `group`. Permutation 0 has the true labels. `alone` says that the group is a pair and
        the only group of its hypothesis."""
        scores = [np.concatenate(block) for block in zip(*(self._scores[name] for name in group), strict=True)]
        if alone and math.comb(2 * self.n, self.n) ** len(scores) <= self.resamples:
            means = [self._means(values, at) for values, at in
                     zip(scores, _all_labellings(self.n, len(scores)), strict=True)]
            return self._rounded(np.ptp(np.cumsum(means, axis=0), axis=2), group)
        drawn = self._drawn.setdefault(group, [])
        for block, values in enumerate(scores[len(drawn):], len(drawn)):
            stream = sum(2 ** self.names.index(name) for name in group)
            at = _labellings(len(values), self.resamples, (self.seed, stream, block))
            self._sums[group] = self._sums.get(group, 0.0) + self._means(values, at)
            drawn.append(np.ptp(self._sums[group], axis=1))
        return self._rounded(drawn, group)

    def _means(self, values: np.ndarray, at: np.ndarray) -> np.ndarray:
        return values[at].reshape(len(at), -1, self.n).mean(axis=2)

    def _sum(self, pair: Pair) -> float:
        means = [np.sum([block.mean() for block in self._scores[name]]) for name in pair]
        return float(self._rounded(means[0] - means[1], pair))

    def _rounded(self, sums: np.ndarray | list[np.ndarray] | float, group: Sequence[str]) -> np.ndarray:
        """Rounds the sums, so that equal sums that were added in a different order compare equal."""
        scale = self._scale(group)
        return np.round(np.asarray(sums) / scale, 12) * scale

    def _scale(self, names: Sequence[str]) -> float:
        """The largest |score| of the named algorithms so far, for _rounded. It may grow with a further block, and the
        same sum may then be rounded differently."""
        return max(1e-300, *(self._largest[name] for name in names))


def hypotheses(names: Sequence[str]) -> list[Hypothesis]:
    """All hypotheses that some of the named algorithms are equal: every partition of the names into groups, without the
    groups that contain a single name. The partition into single names only is left out."""
    partitions: list[list[tuple[str, ...]]] = [[]]
    for name in names:
        partitions = [new for old in partitions for new in ([*old, (name,)], *(
            [*old[:i], (*old[i], name), *old[i + 1:]] for i in range(len(old))))]
    return [groups for one in partitions if (groups := tuple(group for group in one if len(group) > 1))]


def _threshold(top: np.ndarray, started: int, level: float) -> tuple[float, float]:
    """Returns (b, P(M > b)) for the smallest b with P(M > b) <= level, or (inf, 0) if the level allows no rejection. M
    is the statistic of a hypothesis under a random permutation. `top` holds the values of M, in descending order,
    for the permutations that no earlier threshold has excluded; `started` is the number of all permutations."""
    allowed = math.floor(level * started + 1e-9)
    if allowed < 0 or not len(top):
        return math.inf, 0.0
    threshold = float(top[allowed]) if allowed < len(top) else -math.inf
    return threshold, float((top > threshold).sum()) / started


@lru_cache(maxsize=64)
def _labellings(size: int, resamples: int, seed: tuple[int, ...]) -> np.ndarray:
    """Returns an array [resamples, size] in which each row is a permutation of the positions of a block's `size`
    scores. In the permuted order, the first scores belong to the first algorithm, the next scores to the second, and
    so on. The first row is the identity (the true labels), and the other rows are random."""
    drawn = np.random.default_rng(seed).permuted(np.tile(np.arange(size), (resamples, 1)), axis=1)
    drawn[0] = np.arange(size)
    return drawn


@lru_cache(maxsize=8)
def _all_labellings(n: int, blocks: int) -> tuple[np.ndarray, ...]:
    """All permutations of the labels of two algorithms with `n` scores each per block. Returns one array per block with
    the same layout as that of _labellings; row i of all arrays together is one permutation."""
    size = 2 * n
    one = np.array([[*chosen, *sorted({*range(size)} - {*chosen})]
                    for chosen in itertools.combinations(range(size), n)])  # the first chooses 0 .. n - 1
    places = np.array(list(itertools.product(range(len(one)), repeat=blocks)))
    return tuple(one[places[:, block]] for block in range(blocks))
