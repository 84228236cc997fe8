"""Aggregate statistics over runs and tasks ("Deep RL at the Edge of the Statistical Precipice", 2108.13264).

Scores have shape [runs, tasks]; optimality gap and performance profile assume scores in [0, 1]. Uses numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vlrl.evaluation.stats import Interval
from vlrl.rewards.boxes import is_number

Statistic = Callable[[np.ndarray], float]


def iqm(scores: np.ndarray) -> float:
    """The interquartile mean: the mean of the middle half of all scores [runs, tasks].

    A quarter of the scores, rounded down, is left out at each end, as in scipy.stats.trim_mean with 0.25."""
    flat = np.sort(_scores(scores), axis=None)
    cut = flat.size // 4
    return float(flat[cut:flat.size - cut].mean())


def optimality_gap(scores: np.ndarray, best: float = 1.0) -> float:
    """`best` minus the mean of min(score, best) over all scores [runs, tasks]: how far the scores fall short of `best`
    on average."""
    return float(best - np.minimum(_scores(scores), best).mean())


def performance_profile(scores: np.ndarray, taus: Sequence[float] | np.ndarray) -> np.ndarray:
    """For each threshold in `taus`, the share of all scores [runs, tasks] that are above the threshold. Returns an
    array with one share per threshold (eq. 2, run-score distribution)."""
    return (_scores(scores)[..., None] > np.asarray(taus, np.float64)).mean(axis=(0, 1))


def probability_of_improvement(scores: np.ndarray, others: np.ndarray) -> float:
    """The probability that a run in `scores` [runs, tasks] scores higher than a run in `others`: the mean over tasks of
    P(X > Y) + P(X = Y) / 2, where X is a score in `scores` and Y one in `others`."""
    scores, others = _scores(scores), _scores(others)
    if scores.shape[1] != others.shape[1]:
        raise ValueError(f"scores of {scores.shape[1]} tasks cannot be compared with scores of {others.shape[1]} tasks")
    apart = scores[:, None, :] - others[None, :, :]
    return float(((apart > 0) + 0.5 * (apart == 0)).mean())


def stratified(statistic: Callable[..., float], *scores: np.ndarray, n: int = 2000, seed: int = 0) -> Interval:
    """Calls `statistic` with the arrays in `scores`, and returns its value with a 95 % percentile interval. The
    interval comes from `n` resamples of the runs within each task.

    Each array in `scores` has the shape [runs, tasks] and is resampled separately. The same scores and seed give the
    same interval."""
    rng = np.random.default_rng(seed)
    tables = [_scores(s) for s in scores]
    drawn = [np.take_along_axis(table[None], rng.integers(0, len(table), (n, *table.shape)), axis=1)
             for table in tables]  # of each [n, runs, tasks]
    values = [statistic(*one) for one in zip(*drawn, strict=True)]
    low, high = np.percentile(values, (2.5, 97.5))
    return Interval(statistic(*tables), float(low), float(high))


class Sensitivity(NamedTuple):
    """How much the scores of a sweep depend on one setting."""

    name: str
    means: dict[str, tuple[int, float]]
    """Value (or range of values) of the setting -> (number of trials with the value, mean score of these trials)."""
    spread: float  # the largest mean in `means` minus the smallest
    share: float
    """The share of the variance over all trials that is explained by this setting, in [0, 1]. With few trials per value
    it is above 0 by chance alone."""


def sensitivities(settings: Sequence[Mapping[str, Any]], scores: Sequence[float], bins: int = 3
                  ) -> list[Sensitivity]:
    """Returns how much the scores of the trials depend on each swept setting. The settings are sorted by the difference
    between their largest and smallest mean score, the largest difference first.

    `settings` holds one mapping per trial: name of each swept setting -> its value. If a setting has more than `bins` +
    2 different numbers, its values are grouped into `bins` ranges with equally many trials."""
    values = np.asarray(scores, np.float64)
    effects = []
    for name in dict.fromkeys(name for one in settings for name in one):
        groups = _groups([one[name] for one in settings], bins)
        means = {label: (len(own), float(values[own].mean())) for label, own in groups.items()}
        between = sum(k * (mean - values.mean()) ** 2 for k, mean in means.values())
        total = float(((values - values.mean()) ** 2).sum())
        each = [mean for _, mean in means.values()]
        share = float(between / total) if total > 1e-18 else 0.0
        effects.append(Sensitivity(name, means, max(each) - min(each), share))
    return sorted(effects, key=lambda s: -s.spread)


def _groups(values: Sequence[Any], bins: int) -> dict[str, list[int]]:
    numbers = all(is_number(v) for v in values)
    if numbers or all(is_number(v) or isinstance(v, str) for v in values):
        different = sorted(set(values), key=lambda v: (isinstance(v, str), v))
    else:
        different = list(dict.fromkeys(map(str, values)))
    if len(different) <= bins + 2 or not numbers:
        return {str(v): [i for i, value in enumerate(values) if str(value) == str(v)] for v in different}
    order = sorted(range(len(values)), key=lambda i: values[i])
    parts = [list(map(int, part)) for part in np.array_split(order, bins)]
    return {f"{values[own[0]]:.3g}..{values[own[-1]]:.3g}": own for own in parts}


def _scores(scores: np.ndarray) -> np.ndarray:
    table = np.asarray(scores, np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise ValueError(f"scores must be finite numbers of shape [runs, tasks], not of shape {table.shape}")
    return table
