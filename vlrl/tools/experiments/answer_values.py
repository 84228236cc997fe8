"""Metrics of single answers, read from rows of rollout files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

VALUE_COLUMNS = ("reward", "correct", "parts", "metrics", "token_ids", "truncated")
"""Columns of rollout files (vlrl.store.SCHEMA) from which these metrics are read."""


def values(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields (metric, value) for each metric of the answer in a row."""
    own = (("reward/mean", row["reward"]), ("correct_frac", row["correct"]),
           ("completion/length_mean", len(row["token_ids"] or ())), ("completion/truncated_frac", row["truncated"]))
    for name, value in (*own, *(row["parts"] or ()), *(row["metrics"] or ())):
        if value is not None and math.isfinite(value):
            yield name, float(value)


def sample_means(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Metric -> mean over rows, which hold the answers to one sample."""
    by_metric: dict[str, list[float]] = {}
    for row in rows:
        for name, value in values(row):
            by_metric.setdefault(name, []).append(value)
    return {name: float(np.mean(own)) for name, own in by_metric.items()}
