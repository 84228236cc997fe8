"""How many seeds are enough: a group-sequential permutation test, AdaStop (2306.10882). Pure numpy.

    test = Sequential(("a", "b"))
    while test.undecided:
        test.add({name: scores of n new seeds for name in test.waiting})
    test.decisions[("a", "b")]      # "a", "b" or "" = no difference shown

With more than two algorithms it is a closed test (Marcus, Peritz and Gabriel, 1976). Each way in which some of them
could be equal is a hypothesis of its own, tested by permuting the scores of those that it calls equal; a pair is
decided once every hypothesis that calls the two equal is rejected. The true one is rejected with a probability of at
most alpha, and no equal pair is decided without that.
"""

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
"""Groups of two or more algorithms that are equal within each group; all others differ."""
MOST = 8
"""Algorithms at most: 8 have 4,139 hypotheses."""
_TIE = 1e-9
"""Sums that differ by less than this share of the largest score are equal."""


class InterimAnalysis(NamedTuple):
    """The state of the test after one block."""

    block: int
    """Counts from 1."""
    statistics: dict[Pair, float]
    """|sum over blocks of (mean_a - mean_b)| of the pairs that were undecided before it."""
    thresholds: dict[Pair, float]
    """The value that each statistic has to exceed for this pair alone to be called different; infinite where the level
    allows no decision yet. Every other hypothesis in which the pair is equal has to be rejected too.
    """
    decided: dict[Pair, str]
    spent: float
    """Largest level that any hypothesis has used so far."""


@dataclass
class _Test:
    """The state of one hypothesis."""

    thresholds: list[float] = field(default_factory=list)
    """b_k of each block."""
    spent: float = 0.0
    rejected: bool = False


@dataclass
class Sequential:
    """Compares every pair of several algorithms: `n` new seeds of each per block, at most `blocks` blocks.

    The probability of deciding for any pair with equal score distributions is at most `alpha` over all blocks and
    pairs. `resamples` permutations are drawn for each hypothesis; for two algorithms alone all are enumerated where
    there are fewer. The same scores and seed give the same decisions.
    """

    names: tuple[str, ...]
    n: int = 5
    blocks: int = 5
    alpha: float = 0.05
    resamples: int = 10_000
    seed: int = 0
    looks: list[InterimAnalysis] = field(default_factory=list)
    decisions: dict[Pair, str] = field(default_factory=dict)
    """Decided pair -> the higher algorithm; "" after the last block where no difference is shown."""
    _scores: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _largest: dict[str, float] = field(default_factory=dict)
    """Algorithm -> its largest |score| so far."""
    _tests: dict[Hypothesis, _Test] = field(default_factory=dict)
    _drawn: dict[tuple[str, ...], list[np.ndarray]] = field(default_factory=dict)
    """Group -> for each block [permutations]: the largest |sum of differences| up to it, under drawn labellings."""
    _sums: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)
    """Group -> [permutations, algorithms]: the sums of means up to the last of these blocks."""

    def __post_init__(self) -> None:
        if not 2 <= len(set(self.names)) == len(self.names) <= MOST:
            raise ValueError(f"names {self.names}: two to {MOST} different ones")
        if self.n < 2 or self.blocks < 1 or not 0 < self.alpha < 1:
            raise ValueError(f"n={self.n}, blocks={self.blocks}, alpha={self.alpha}: n of at least 2, a block at "
                             "least, alpha between 0 and 1")
        self._scores = {name: [] for name in self.names}
        self._tests = {hypothesis: _Test() for hypothesis in hypotheses(self.names)}

    @property
    def undecided(self) -> list[Pair]:
        """The pairs that further seeds may decide."""
        return [pair for pair in itertools.combinations(self.names, 2) if pair not in self.decisions]

    @property
    def waiting(self) -> list[str]:
        """The algorithms of undecided pairs, which need another block of seeds."""
        return [name for name in self.names if any(name in pair for pair in self.undecided)]

    def add(self, scores: Mapping[str, Sequence[float]]) -> InterimAnalysis:
        """Takes the scores [n] of a block for each of `waiting`, decides pairs where possible, and returns the
        analysis.

        Raises ValueError where scores are missing, superfluous, or not finite.
        """
        if set(scores) != set(self.waiting):
            raise ValueError(f"block {len(self.looks) + 1} needs scores of {self.waiting}, not of {list(scores)}")
        for name, values in scores.items():
            block = np.asarray(values, np.float64)
            if block.shape != (self.n,) or not np.isfinite(block).all():
                raise ValueError(f"block {len(self.looks) + 1} of {name!r} needs {self.n} finite scores, not {values}")
            self._scores[name].append(block)
            self._largest[name] = max(self._largest.get(name, 0.0), float(np.abs(block).max()))
        look = self._look(self.undecided)
        self.looks.append(look)
        self.decisions |= look.decided
        if len(self.looks) == self.blocks:
            self.decisions |= dict.fromkeys(self.undecided, "")
        return look

    def _look(self, pairs: list[Pair]) -> InterimAnalysis:
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
        """Sets threshold and level of a hypothesis after block k, and whether it is rejected.

        `maxima` caches groups that are part of several hypotheses; a group that stands alone may enumerate all
        labellings.
        """
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
        """[blocks, permutations]: the largest |sum of differences of means| between two of a group up to each block.
        Permutation 0 is the true labelling.
        """
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
        """[permutations, algorithms]: the means of a block under these labellings."""
        return values[at].reshape(len(at), -1, self.n).mean(axis=2)

    def _sum(self, pair: Pair) -> float:
        """The signed sum of a pair."""
        means = [np.sum([block.mean() for block in self._scores[name]]) for name in pair]
        return float(self._rounded(means[0] - means[1], pair))

    def _rounded(self, sums: np.ndarray | list[np.ndarray] | float, group: Sequence[str]) -> np.ndarray:
        """Rounds, so that equal sums added in a different order are equal."""
        scale = self._scale(group)
        return np.round(np.asarray(sums) / scale, 12) * scale

    def _scale(self, names: Sequence[str]) -> float:
        """The largest score so far. It grows, so that a sum is rounded differently after a further block."""
        return max(1e-300, *(self._largest[name] for name in names))


def hypotheses(names: Sequence[str]) -> list[Hypothesis]:
    """Every way in which some of the names are equal: all partitions except the one into single names, without their
    single names.
    """
    partitions: list[list[tuple[str, ...]]] = [[]]
    for name in names:
        partitions = [new for old in partitions for new in ([*old, (name,)], *(
            [*old[:i], (*old[i], name), *old[i + 1:]] for i in range(len(old))))]
    return [groups for one in partitions if (groups := tuple(group for group in one if len(group) > 1))]


def _threshold(top: np.ndarray, started: int, level: float) -> tuple[float, float]:
    """The smallest b with P(M > b) <= level, and that probability, for maxima `top` in falling order out of `started`
    permutations; (inf, 0) where not even the largest may be exceeded.
    """
    allowed = math.floor(level * started + 1e-9)
    if allowed < 0 or not len(top):
        return math.inf, 0.0
    threshold = float(top[allowed]) if allowed < len(top) else -math.inf
    return threshold, float((top > threshold).sum()) / started


@lru_cache(maxsize=64)
def _labellings(size: int, resamples: int, seed: tuple[int, ...]) -> np.ndarray:
    """[resamples, size] positions: the scores of a block in this order are those of the first algorithm, then of the
    second and so on, under permuted labels. The first row is the true labelling.
    """
    drawn = np.random.default_rng(seed).permuted(np.tile(np.arange(size), (resamples, 1)), axis=1)
    drawn[0] = np.arange(size)
    return drawn


@lru_cache(maxsize=8)
def _all_labellings(n: int, blocks: int) -> tuple[np.ndarray, ...]:
    """All labellings of all blocks of two algorithms, one array like that of _labellings for each block."""
    size = 2 * n
    one = np.array([[*chosen, *sorted({*range(size)} - {*chosen})]
                    for chosen in itertools.combinations(range(size), n)])  # the first chooses 0 .. n - 1
    places = np.array(list(itertools.product(range(len(one)), repeat=blocks)))
    return tuple(one[places[:, block]] for block in range(blocks))
