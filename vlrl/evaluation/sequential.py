"""How many seeds are enough: a group-sequential permutation test, AdaStop (2306.10882). Pure numpy.

    test = Sequential(("a", "b"))
    while test.undecided:
        test.add({name: scores of n new seeds for name in test.waiting})
    test.decisions[("a", "b")]      # "a", "b" or "" = no difference shown
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


class Look(NamedTuple):
    """What was found after a block."""

    block: int
    """From 1."""
    statistics: dict[Pair, float]
    """|sum over blocks of (mean_a - mean_b)| of the pairs that were undecided before it."""
    threshold: float
    """The last b_k; infinite where the level does not allow any decision yet."""
    decided: dict[Pair, str]
    spent: float
    """Level used so far."""


@dataclass
class Sequential:
    """Compares every two of several algorithms, `n` new seeds of each a block, at most `blocks` blocks.

    The probability of deciding between two of equal score distributions is at most `alpha` over all blocks. Of more
    than two, whose pairs are permuted independently, it is that of deciding any equal pair, and about `alpha`: 5.4 % of
    10,000 simulations with three equal ones. `resamples` is how many permutations are drawn; all are counted where they
    are fewer and one pair is left. The same scores and seed give the same decisions.
    """

    names: tuple[str, ...]
    n: int = 5
    blocks: int = 5
    alpha: float = 0.05
    resamples: int = 10_000
    seed: int = 0
    looks: list[Look] = field(default_factory=list)
    decisions: dict[Pair, str] = field(default_factory=dict)
    """Of decided pairs the higher one; "" after the last block where no difference is shown."""
    _scores: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.names)) < 2 or len(set(self.names)) < len(self.names):
            raise ValueError(f"names {self.names}: two different ones at least")
        if self.n < 2 or self.blocks < 1 or not 0 < self.alpha < 1:
            raise ValueError(f"n={self.n}, blocks={self.blocks}, alpha={self.alpha}: n of at least 2, a block at "
                             "least, alpha between 0 and 1")
        self._scores = {name: [] for name in self.names}

    @property
    def undecided(self) -> list[Pair]:
        """Returns the pairs that further seeds may decide."""
        return [pair for pair in itertools.combinations(self.names, 2) if pair not in self.decisions]

    @property
    def waiting(self) -> list[str]:
        """Returns the algorithms of undecided pairs, which need another block of seeds."""
        return [name for name in self.names if any(name in pair for pair in self.undecided)]

    def add(self, scores: Mapping[str, Sequence[float]]) -> Look:
        """Takes the scores [n] of a block for each of `waiting`, decides what it can, and returns the look.

        Raises ValueError where scores are missing, too many, or not finite.
        """
        if set(scores) != set(self.waiting):
            raise ValueError(f"block {len(self.looks) + 1} needs scores of {self.waiting}, not of {list(scores)}")
        for name, values in scores.items():
            block = np.asarray(values, np.float64)
            if block.shape != (self.n,) or not np.isfinite(block).all():
                raise ValueError(f"block {len(self.looks) + 1} of {name!r} needs {self.n} finite scores, not {values}")
            self._scores[name].append(block)
        look = self._look(self.undecided)
        self.looks.append(look)
        self.decisions |= look.decided
        if len(self.looks) == self.blocks:
            self.decisions |= dict.fromkeys(self.undecided, "")
        return look

    def _look(self, pairs: list[Pair]) -> Look:
        k = len(self.looks) + 1
        alone = len(pairs) == 1
        signed = np.stack([self._permuted(pair, alone) for pair in pairs])  # [pairs, blocks, permutations], 0 is true
        size = np.abs(signed)
        alive = np.ones(size.shape[2], bool)
        for earlier, before in enumerate(self.looks):
            alive &= size[:, earlier].max(axis=0) <= before.threshold
        spent = self.looks[-1].spent if self.looks else 0.0
        left, decided, used, threshold = list(range(len(pairs))), {}, 0.0, math.inf
        while left:
            top = np.sort(size[left, k - 1].max(axis=0)[alive])[::-1]
            threshold, used = _threshold(top, size.shape[2], self.alpha * k / self.blocks - spent)
            best = max(left, key=lambda i: size[i, k - 1, 0])
            if not size[best, k - 1, 0] > threshold:
                break
            decided[pairs[best]] = pairs[best][0 if signed[best, k - 1, 0] > 0 else 1]
            left.remove(best)
        statistics = {pair: float(size[i, k - 1, 0]) for i, pair in enumerate(pairs)}
        return Look(k, statistics, threshold, decided, spent + used)

    def _permuted(self, pair: Pair, alone: bool) -> np.ndarray:
        """Returns [blocks, permutations]: the sum of differences of means up to each block.

        Pairs are permuted independently of each other: with one permutation for all, the largest sum comes out too
        small, as the sums of the true labels (a - b, b - c and a - c) hang together otherwise.
        """
        both = [np.concatenate(block) for block in zip(*(self._scores[name] for name in pair), strict=True)]
        stream = list(itertools.combinations(self.names, 2)).index(pair)
        signs = _signs(self.n, len(both), self.resamples, (self.seed, stream), alone)
        sums = np.cumsum([values @ own for values, own in zip(both, signs, strict=True)], axis=0)
        scale = max(float(np.abs(both).max()), 1e-300)
        return np.round(sums / scale, 12) * scale  # equal sums in another order are equal


def _threshold(top: np.ndarray, started: int, level: float) -> tuple[float, float]:
    """Returns the smallest b with P(M > b) <= level, and that probability, of maxima `top` in falling order out of
    `started` permutations; (inf, 0) where not even the largest may be exceeded.
    """
    allowed = math.floor(level * started + 1e-9)
    if allowed < 0 or not len(top):
        return math.inf, 0.0
    threshold = float(top[allowed]) if allowed < len(top) else -math.inf
    return threshold, float((top > threshold).sum()) / started


@lru_cache(maxsize=32)
def _signs(n: int, blocks: int, resamples: int, seed: tuple[int, int], alone: bool) -> tuple[np.ndarray, ...]:
    """Returns for each block [2n, permutations] of +-1/n, the first column the true labelling: a block's scores times
    it are differences of means under permuted labels. All permutations of the labels of all blocks, if they are at most
    `resamples` and of one pair `alone`.
    """
    splits = math.comb(2 * n, n)
    if alone and splits ** blocks <= resamples:
        one = np.full((splits, 2 * n), -1.0 / n)
        for row, chosen in enumerate(itertools.combinations(range(2 * n), n)):  # the first chooses 0 .. n - 1
            one[row, list(chosen)] = 1.0 / n
        places = np.array(list(itertools.product(range(splits), repeat=blocks)))
        return tuple(one[places[:, block]].T for block in range(blocks))
    true = np.repeat([1.0 / n, -1.0 / n], n)
    found = []
    for block in range(blocks):
        drawn = np.random.default_rng((*seed, block)).permuted(np.tile(true, (resamples, 1)), axis=1)
        drawn[0] = true
        found.append(np.ascontiguousarray(drawn.T))
    return tuple(found)
