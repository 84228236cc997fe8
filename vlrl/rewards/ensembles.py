"""Combines the scores that several reward models give to the same answer into one reward. The reward is lower if the
models disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence


def combined(name: str, scores: Sequence[float], lam: float | None = None) -> float:
    """Combines scores into one reward by the function that ENSEMBLES has under `name`. `lam` is the weight of the
    disagreement; None = the weight of the function's paper."""
    return ENSEMBLES[name](scores) if lam is None else ENSEMBLES[name](scores, lam)


def mean(scores: Sequence[float], lam: float = 0.0) -> float:
    return math.fsum(scores) / len(scores)


def worst(scores: Sequence[float], lam: float = 0.0) -> float:
    """The smallest score (worst-case optimisation, 2310.02743); `lam` has no effect."""
    return min(scores)


def less_variance(scores: Sequence[float], lam: float = 0.1) -> float:
    """mean - lam * population variance of the scores (uncertainty-weighted optimisation, 2310.02743). The paper uses
    lam = .1 for RL and .5 for best-of-n."""
    return mean(scores) - lam * _variance(scores)


def less_deviation(scores: Sequence[float], lam: float = 1.0) -> float:
    """mean - lam * standard deviation of the scores. UP-RLHF (2401.00243) uses lam = 1."""
    return mean(scores) - lam * spread(scores)


def spread(scores: Sequence[float]) -> float:
    """The standard deviation of the scores; 0 for a single score."""
    return math.sqrt(_variance(scores))


def _variance(scores: Sequence[float]) -> float:
    middle = mean(scores)
    return math.fsum((s - middle) ** 2 for s in scores) / len(scores)


ENSEMBLES: Mapping[str, Callable[..., float]] = {
    "mean": mean, "min": worst, "less_variance": less_variance, "less_deviation": less_deviation}
