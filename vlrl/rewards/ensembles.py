"""One reward of the scores of several models for the same answer: cautious where they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence


def combined(name: str, scores: Sequence[float], lam: float | None = None) -> float:
    """Returns the scores as the function `name` of ENSEMBLES combines them; without `lam` with its paper's."""
    return ENSEMBLES[name](scores) if lam is None else ENSEMBLES[name](scores, lam)


def mean(scores: Sequence[float], lam: float = 0.0) -> float:
    """Returns the mean."""
    return math.fsum(scores) / len(scores)


def worst(scores: Sequence[float], lam: float = 0.0) -> float:
    """Returns the smallest: worst-case optimisation (2310.02743)."""
    return min(scores)


def less_variance(scores: Sequence[float], lam: float = 0.1) -> float:
    """Returns mean - lam * variance, over the models without correction: uncertainty-weighted optimisation
    (2310.02743), which takes .1 in RL and .5 for the best of n.
    """
    return mean(scores) - lam * _variance(scores)


def less_deviation(scores: Sequence[float], lam: float = 1.0) -> float:
    """Returns mean - lam * standard deviation; UP-RLHF (2401.00243) takes it off once."""
    return mean(scores) - lam * spread(scores)


def spread(scores: Sequence[float]) -> float:
    """Returns the standard deviation over the models; 0 for one."""
    return math.sqrt(_variance(scores))


def _variance(scores: Sequence[float]) -> float:
    middle = mean(scores)
    return math.fsum((s - middle) ** 2 for s in scores) / len(scores)


ENSEMBLES: Mapping[str, Callable[..., float]] = {
    "mean": mean, "min": worst, "less_variance": less_variance, "less_deviation": less_deviation}
