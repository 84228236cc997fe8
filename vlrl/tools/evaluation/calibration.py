"""Calibration of the confidences that a model states: ECE, Brier score, AUROC. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ece(confidences: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error of `confidences` [N] and correctness `right` [N]. Equals
    rewards.confidence.calibration_error, but is fast enough for resampling."""
    at = np.minimum((confidences * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(at, confidences - right, bins)).sum() / max(1, len(at)))


def auroc(confidences: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray) -> float:
    """Area under the ROC curve (Mann-Whitney U): the probability that a correct answer has a higher confidence than a
    wrong answer, with ties counted as one half.

    NaN if all answers are correct or all are wrong."""
    from scipy.stats import rankdata

    good = np.asarray(right, float) > 0.5
    wins = int(good.sum())
    if wins in (0, len(good)):
        return float("nan")
    ranks = rankdata(np.asarray(confidences, float))
    return float((ranks[good].sum() - wins * (wins + 1) / 2) / (wins * (len(good) - wins)))


def calibration(confidences: Sequence[float] | np.ndarray,
                right: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Calibration metrics for the confidences in [0, 1] that were stated with answers, which are correct (1) or wrong
    (0). {} if there are no answers.

    Keys: `ece` (ten bins of equal width, 1706.04599), `brier` (mean squared error) and `auroc`."""
    if not len(confidences):
        return {}
    sure, good = np.asarray(confidences, float), np.asarray(right, float)
    return {"ece": ece(sure, good), "brier": float(((sure - good) ** 2).mean()),
            "auroc": auroc(sure, good)}
