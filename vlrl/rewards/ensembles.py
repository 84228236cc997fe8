"""One reward from the scores of several models for the same answer, conservative if they disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence


def combined(name: str, scores: Sequence[float], lam: float | None = None) -> float:
    """The scores combined by the function `name` of ENSEMBLES; without `lam` its paper's value is used."""
    return ENSEMBLES[name](scores) if lam is None else ENSEMBLES[name](scores, lam)


def mean(scores: Sequence[float], lam: float = 0.0) -> float:
    return math.fsum(scores) / len(scores)


def worst(scores: Sequence[float], lam: float = 0.0) -> float:
    """The smallest score: worst-case optimisation (2310.02743)."""
    return min(scores)


def less_variance(scores: Sequence[float], lam: float = 0.1) -> float:
    """mean - lam * population variance over the models: uncertainty-weighted optimisation (2310.02743), with .1 for RL
    and .5 for best-of-n."""
    return mean(scores) - lam * _variance(scores)


def less_deviation(scores: Sequence[float], lam: float = 1.0) -> float:
    """mean - lam * standard deviation over the models; UP-RLHF (2401.00243) subtracts it once."""
    return mean(scores) - lam * spread(scores)


def spread(scores: Sequence[float]) -> float:
    """Standard deviation over the models; 0 for one."""
    return math.sqrt(_variance(scores))


def _variance(scores: Sequence[float]) -> float:
    middle = mean(scores)
    return math.fsum((s - middle) ** 2 for s in scores) / len(scores)


ENSEMBLES: Mapping[str, Callable[..., float]] = {
    "mean": mean, "min": worst, "less_variance": less_variance, "less_deviation": less_deviation}
