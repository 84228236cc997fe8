"""Compares the scores of two sides on the same samples: the difference of their means with its 95 % interval, and the
effect size. A side is one run, or several runs that differ in the seed. Uses numpy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vlrl.evaluation.stats import Interval, resamples

_EQUAL = 1e-9  # scores that differ by less are a tie


class Spread(NamedTuple):
    """The variance of the difference between the mean scores of two sides, as a sum of three variances: from the choice
    of samples, from the seeds of the first side, and from the seeds of the second side."""

    samples: float  # variance from the choice of samples, including the noise of each answer
    first: float
    """Variance from the seeds of the first side, without the noise of the answers; 0 if the side has one seed, because
    one seed allows no estimate."""
    second: float
    df: float  # degrees of freedom of the total variance (Satterthwaite)

    @property
    def total(self) -> float:
        return self.samples + self.first + self.second


def difference(first: np.ndarray, second: np.ndarray, seed: int = 0, n: int = 2000) -> Interval:
    """Returns mean(second) - mean(first) with its 95 % interval, from `n` resamples. Both arrays of scores have the
    shape [seeds, samples]; column j is the same sample in both arrays.

    With one seed per side, the interval is the paired bootstrap over the samples. With several seeds, the samples and
    the seeds of each side are resampled separately. The deviations of the mean in each of these resamplings are scaled
    to the corresponding variance component (see `spread`). The reason: plain resampling of a few seeds gives too narrow
    an interval, and resampling samples within seeds counts the noise twice. The percentiles are widened by the ratio of
    the t quantile to the normal quantile ("What Teachers Should Know about the Bootstrap", 1411.5279, expanded
    percentile interval).

    The same scores and `seed` give the same interval. With fewer than two samples the bounds are NaN. If the difference
    does not vary at all, both bounds equal it. Raises ValueError if the numbers of samples differ."""
    from scipy.stats import norm, t

    first, second = _both(first, second)
    apart = second.mean(axis=0) - first.mean(axis=0)
    if apart.size < 2:
        return Interval(float(apart.mean()) if apart.size else float("nan"), float("nan"), float("nan"))
    mean, parts = float(apart.mean()), spread(first, second)
    if parts.total == 0:
        return Interval(mean, mean, mean)
    rng = np.random.default_rng(seed)
    moved = _resampled(apart, parts.samples, n, rng)
    moved += _resampled(second.mean(axis=1), parts.second, n, rng) - _resampled(first.mean(axis=1), parts.first, n, rng)
    wider = float(t.ppf(0.975, parts.df) / norm.ppf(0.975)) if np.isfinite(parts.df) else 1.0
    low, high = wider * np.percentile(moved, (2.5, 97.5))
    return Interval(mean, mean + float(low), mean + float(high))


def spread(first: np.ndarray, second: np.ndarray) -> Spread:
    """Returns the variance components of mean(second) - mean(first). Both arrays of scores have the shape [seeds i,
    samples j], with at least two samples.

    Samples: var_j(second_j - first_j) / samples. Seeds of a side: var_i(mean_i) / seeds, minus the noise of the
    answers, which the component of the samples already contains. This noise is the mean square of the residuals that
    neither seed nor sample explains, divided by (seeds * samples)."""
    first, second = _both(first, second)
    n = first.shape[1]
    samples = float((second.mean(axis=0) - first.mean(axis=0)).var(ddof=1)) / n
    raw, own = zip(*(_seeds(side) for side in (first, second)), strict=True)
    total = samples + sum(own)
    below = samples ** 2 / (n - 1) + sum(r ** 2 / (len(side) - 1) for r, o, side in
                                         zip(raw, own, (first, second), strict=True) if o)
    return Spread(samples, *own, df=total ** 2 / below if below else float("inf"))


def effect_size(first: np.ndarray, second: np.ndarray) -> float:
    """Cohen's d of two sides with paired scores [seeds, samples]. Scores are averaged over the seeds; d is the mean of
    the samples' differences second - first, divided by their standard deviation.

    0 if no sample differs, infinite if all samples differ by the same value, NaN with fewer than two samples."""
    first, second = _both(first, second)
    apart = second.mean(axis=0) - first.mean(axis=0)
    if apart.size < 2:
        return float("nan")
    mean, deviation = float(apart.mean()), float(apart.std(ddof=1))
    if deviation > _EQUAL:
        return mean / deviation
    return 0.0 if abs(mean) <= _EQUAL else float(np.copysign(np.inf, mean))


def outcomes(first: np.ndarray, second: np.ndarray) -> tuple[int, int, int]:
    """Returns the numbers of samples on which the second side scores higher, lower, and the same as the first side.
    `first` and `second` hold one score per sample [N]."""
    apart = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    wins, losses = int((apart > _EQUAL).sum()), int((apart < -_EQUAL).sum())
    return wins, losses, apart.size - wins - losses


def _both(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, second = (np.atleast_2d(np.asarray(side, np.float64)) for side in (first, second))
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"paired scores must be of the same samples, but one side has {first.shape[1]} samples and "
                         f"the other {second.shape[1]}")
    return first, second


def _seeds(scores: np.ndarray) -> tuple[float, float]:
    """Estimates the variance of a side's mean score that comes from the seeds, from `scores` [seeds, samples]. Returns
    (estimate with the noise of the answers, estimate without this noise); (0, 0) for one seed."""
    k, n = scores.shape
    if k == 1:
        return 0.0, 0.0
    means = scores.mean(axis=1, keepdims=True)
    rest = scores - means - scores.mean(axis=0, keepdims=True) + scores.mean()
    noise = float((rest ** 2).sum()) / ((k - 1) * (n - 1)) / (k * n)
    raw = float(means.var(ddof=1)) / k
    return raw, max(raw - noise, 0.0)


def _resampled(values: np.ndarray, variance: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Resamples `values` [N] with replacement `n` times. Returns how far the mean of each resample is from the mean of
    `values`, scaled so that these deviations have the given variance."""
    centred = values - values.mean()
    usual = float((centred ** 2).mean()) / values.size
    if variance <= 0 or usual <= 0:
        return np.zeros(n)
    means = [centred[drawn].mean(axis=1) for drawn in resamples(values.size, n, rng)]
    return np.concatenate(means) * np.sqrt(variance / usual)
