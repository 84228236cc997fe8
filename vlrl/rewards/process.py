"""Steps of a reasoning trace, and combined scores of steps. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PARAGRAPH = re.compile(r"(?:(?!\n\s*\n)[\s\S])+")


def step_spans(text: str) -> list[tuple[int, int]]:
    """Start and end of each non-blank paragraph of a text, in characters."""
    return [match.span() for match in _PARAGRAPH.finditer(text) if match[0].strip()]


def with_pair_scores(steps: Sequence[float], pairs: Sequence[float]) -> list[float]:
    """For each of n steps the mean of its score and that of the pair it begins (n - 1 `pairs`); for the last one its
    score. HRM (arXiv 2503.13551) scores both."""
    return [(score + pair) / 2 for score, pair in zip(steps, pairs, strict=False)] + [*steps[-1:]]
