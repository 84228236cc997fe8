"""Boxes `[x1, y1, x2, y2]`: how alike two are, and how to read them from an answer.

x points right and y down; both boxes of a comparison are in the same unit. Coordinates are continuous, so a box from
2 to 5 is 3 wide. Reading takes linear time and never raises, whatever the text.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

_NUMBER = r"([-+]?(?:\d{1,9}(?:\.\d{0,20})?|\.\d{1,20}))"
# Digits are bounded, so every number is finite; an attempt never crosses the next "[", so time is linear.
_BOX = re.compile(r"\[\s*" + r"\s*,\s*".join([_NUMBER] * 4) + r"\s*\]", re.ASCII)


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes, in [0, 1]: plain and continuous, the soft reward of VLM-R1 (2504.07615).

    0 when a box is inverted, without area, not finite or not four numbers long.
    """
    if not (_has_area(a) and _has_area(b)):
        return 0.0
    inter, union, _ = _areas(a, b)
    return min(1.0, inter / union) if 0 < union < math.inf else 0.0


def giou(a: Sequence[float], b: Sequence[float]) -> float:
    """Generalized IoU (1902.09630), in [-1, 1]: IoU less the share of the enclosing box that neither covers.

    -1, the lower bound, when a box is inverted, without area, not finite or not four numbers long.
    """
    if not (_has_area(a) and _has_area(b)):
        return -1.0
    inter, union, hull = _areas(a, b)
    if not 0 < union <= hull * (1 + 1e-9) < math.inf:
        return -1.0
    return max(-1.0, min(1.0, inter / union - (hull - union) / hull))


def parse_box(text: str) -> list[float] | None:
    """The first well-formed `[number, number, number, number]` of a text, alone or inside JSON; None without one.

    Integers, decimals and signs are read; the order of the corners is left as written.
    """
    found = _BOX.search(text)
    return [float(v) for v in found.groups()] if found else None


def parse_boxes(text: str) -> list[list[float]]:
    """All well-formed boxes of a text, in order; see `parse_box`."""
    return [[float(v) for v in found] for found in _BOX.findall(text)]


def box_format(text: str) -> float:
    """1 when the text is one box and nothing else (spaces around it aside), else 0."""
    return float(_BOX.fullmatch(text.strip()) is not None)


def format_box(box: Sequence[float]) -> str:
    """`[x1, y1, x2, y2]` as a model would write it: whole numbers without a point, others with up to 4 decimals."""
    return "[" + ", ".join(_number(v) for v in box) + "]"


def is_number(value: Any) -> bool:
    """Whether a value of a row is a finite number: no bool, no text, no NaN, nothing too large for a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)


def _number(value: float) -> str:
    value = round(float(value), 4)
    return str(int(value)) if value == int(value) else f"{value:.4f}".rstrip("0")


def _has_area(box: Sequence[float]) -> bool:
    """Four finite numbers with x1 < x2 and y1 < y2."""
    return len(box) == 4 and all(map(_is_finite, box)) and box[0] < box[2] and box[1] < box[3]


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int like 10**400
        return False


def _areas(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Areas of intersection, union and enclosing box; inf or NaN where a float cannot hold them."""
    a, b = [float(v) for v in a], [float(v) for v in b]
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    inter = width * height
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
    return inter, union, (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
