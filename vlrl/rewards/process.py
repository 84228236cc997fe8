"""Splits a reasoning trace into steps, and combines the scores of the steps."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PARAGRAPH = re.compile(r"(?:(?!\n\s*\n)[\s\S])+")


def step_spans(text: str) -> list[tuple[int, int]]:
    """(start, end) of each non-blank paragraph of a text, as character offsets."""
    return [match.span() for match in _PARAGRAPH.finditer(text) if match[0].strip()]


def with_pair_scores(steps: Sequence[float], pairs: Sequence[float]) -> list[float]:
    """For each step but the last, the mean of its own score and the score of the pair that it forms with the next step;
    for the last step, its own score. `steps` are n scores, `pairs` are n - 1. HRM (arXiv 2503.13551) scores single
    steps and pairs."""
    return [(score + pair) / 2 for score, pair in zip(steps, pairs, strict=False)] + [*steps[-1:]]
