"""Calibration of stated confidences: ECE, Brier score, AUROC. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ece(confidences: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """rewards.confidence.calibration_error for arrays [N], fast enough for resampling."""
    at = np.minimum((confidences * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(at, confidences - right, bins)).sum() / max(1, len(at)))


def auroc(confidences: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray) -> float:
    """The probability that a right answer has more confidence than a wrong one, ties counting half; in [0, 1].

    The area under the ROC curve by the Mann-Whitney U. NaN where all are right, or all are wrong.
    """
    from scipy.stats import rankdata

    good = np.asarray(right, float) > 0.5
    wins = int(good.sum())
    if wins in (0, len(good)):
        return float("nan")
    ranks = rankdata(np.asarray(confidences, float))
    return float((ranks[good].sum() - wins * (wins + 1) / 2) / (wins * (len(good) - wins)))


def calibration(confidences: Sequence[float] | np.ndarray,
                right: Sequence[float] | np.ndarray) -> dict[str, float]:
    """`ece` (ten bins of equal width, 1706.04599), `brier` (mean squared distance) and `auroc` of answers with
    confidences in [0, 1] that are right (1) or wrong (0); {} without any.
    """
    if not len(confidences):
        return {}
    sure, good = np.asarray(confidences, float), np.asarray(right, float)
    return {"ece": ece(sure, good), "brier": float(((sure - good) ** 2).mean()),
            "auroc": auroc(sure, good)}
