"""Means with confidence intervals; numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

_BLOCK = 4_000_000  # resampled values held at once


class Interval(NamedTuple):
    """An estimate and its 95 % confidence interval, in the unit of the values."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        bounds = "" if np.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"  # of a whole split: no interval
        return f"{self.mean:.3f}{bounds}"


def mean_ci(values: Sequence[float | None] | np.ndarray, seed: int = 0, n: int = 2000) -> Interval:
    """Mean of `values` with its 95 % percentile-bootstrap interval from `n` resamples; None values are ignored.

    The same values and seed give the same interval. A single value, or equal values, have an interval of width 0;
    without values the result is NaN."""
    x = np.asarray([v for v in values if v is not None], np.float64)
    if x.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    if (x == x[0]).all():
        return Interval(float(x[0]), float(x[0]), float(x[0]))
    means = np.concatenate([x[drawn].mean(axis=1) for drawn in resamples(x.size, n, np.random.default_rng(seed))])
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(x.mean()), float(low), float(high))


def resamples(size: int, n: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields arrays [resamples, size] of random indices below `size`. Each row is one bootstrap resample. The arrays
    have `n` rows in total, in blocks that fit into memory."""
    rows = max(1, _BLOCK // size)
    for start in range(0, n, rows):
        yield rng.integers(0, size, (min(rows, n - start), size))


def paired_gain(before: Sequence[float] | np.ndarray, after: Sequence[float] | np.ndarray, seed: int = 0,
                n: int = 2000) -> Interval:
    """Mean of `after` - `before` over the same samples in the same order, with its 95 % bootstrap interval.

    Raises ValueError if the lengths differ."""
    if len(before) != len(after):
        raise ValueError(f"paired values must match one to one: {len(before)} before, {len(after)} after")
    return mean_ci(np.asarray(after, np.float64) - np.asarray(before, np.float64), seed, n)


def gain_of_runs(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Mean of `after` - `before` over a few pairs of runs with equal seeds, with its 95 % Student's t interval.

    Student's t interval is used because the bootstrap interval is too narrow for about five values. For a single pair,
    the bounds are NaN. If all differences are equal, the width is 0."""
    from scipy.stats import t

    gains = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    mean, n = float(gains.mean()), len(gains)
    half = float(t.ppf(0.975, n - 1) * gains.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    return Interval(mean, mean - half, mean + half)


def clustered_ci(values: Sequence[float] | np.ndarray, clusters: Sequence[str], seed: int = 0,
                 n: int = 2000) -> Interval:
    """Mean of `values` [N] with its 95 % percentile-bootstrap interval over clusters of dependent samples, e.g. several
    questions about one image.

    Complete clusters are resampled, and the mean of a resample is over all of its values (arXiv 2411.00640, section
    2.2). Equals `mean_ci` if every cluster has one sample."""
    x = np.asarray(values, np.float64)
    names, places = np.unique(np.asarray(clusters), return_inverse=True)
    if len(names) == len(x) or len(x) == 0 or (x == x[0]).all():
        return mean_ci(x, seed, n)
    sums, counts = np.bincount(places, x), np.bincount(places).astype(float)
    means = np.concatenate([sums[drawn].sum(1) / counts[drawn].sum(1)
                            for drawn in resamples(len(names), n, np.random.default_rng(seed))])
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(x.mean()), float(low), float(high))


def statistic_ci(statistic: Callable[[np.ndarray], float], clusters: Sequence[str], seed: int = 0,
                 n: int = 400) -> tuple[float, float]:
    """Returns (low, high), the 95 % percentile-bootstrap bounds of a statistic that is not a mean.

    `statistic(indices)` returns the statistic of the samples with these indices. `clusters` has the cluster of each
    sample; complete clusters are resampled, `n` times. NaN results are ignored; both bounds are NaN if all are."""
    names, where = np.unique(np.asarray(clusters), return_inverse=True)
    members = [np.flatnonzero(where == c) for c in range(len(names))]
    rng = np.random.default_rng(seed)
    estimates = [statistic(np.concatenate([members[c] for c in rng.integers(0, len(names), len(names))]))
                 for _ in range(n)]
    known = [value for value in estimates if not np.isnan(value)]
    low, high = np.percentile(known, (2.5, 97.5)) if known else (float("nan"), float("nan"))
    return float(low), float(high)
