"""Steps of a reasoning, and what scores of steps make of an answer. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PARAGRAPH = re.compile(r"(?:(?!\n\s*\n)[\s\S])+")


def step_spans(text: str) -> list[tuple[int, int]]:
    """Returns where each paragraph of a text begins and ends, in characters; none of blank ones."""
    return [match.span() for match in _PARAGRAPH.finditer(text) if match[0].strip()]


def with_pair_scores(steps: Sequence[float], pairs: Sequence[float]) -> list[float]:
    """Returns of each of n steps the mean of its score and of that of the pair which it begins (n - 1 `pairs`); of the
    last one its score. HRM (arXiv 2503.13551) scores both.
    """
    return [(score + pair) / 2 for score, pair in zip(steps, pairs, strict=False)] + [*steps[-1:]]
