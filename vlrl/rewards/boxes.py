"""Bounding boxes `[x1, y1, x2, y2]`: similarity of two boxes, and parsing of boxes in an answer.

x points right and y down. Two boxes that are compared must use the same unit. Coordinates are continuous, so a box from
2 to 5 has width 3. Parsing takes linear time and never raises."""

import math
import re
from collections.abc import Sequence
from typing import Any

_NUMBER = r"([-+]?(?:\d{1,9}(?:\.\d{0,20})?|\.\d{1,20}))"
# Digits are bounded, so every number is finite; an attempt never crosses the next "[", so time is linear.
_BOX = re.compile(r"\[\s*" + r"\s*,\s*".join([_NUMBER] * 4) + r"\s*\]", re.ASCII)
_DIGITS = re.compile(r"\[\s*\d{1,9}(?:\s*,\s*\d{1,9}){3}\s*\]", re.ASCII)
_WHOLE_BOX = re.compile(r"\[(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9})\]", re.ASCII)


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union (IoU) of two boxes, in [0, 1]. VLM-R1 (2504.07615) uses it as a continuous reward.

    0 if a box is inverted, has no area, is not finite or does not consist of four numbers."""
    if not (_has_area(a) and _has_area(b)):
        return 0.0
    inter, union, _ = _areas(a, b)
    return min(1.0, inter / union) if 0 < union < math.inf else 0.0


def giou(a: Sequence[float], b: Sequence[float]) -> float:
    """Generalized IoU (1902.09630), in [-1, 1]: the IoU minus the share of the enclosing box that neither box covers.

    -1, the lower bound, if a box is inverted, has no area, is not finite or does not consist of four numbers."""
    if not (_has_area(a) and _has_area(b)):
        return -1.0
    inter, union, hull = _areas(a, b)
    if not 0 < union <= hull * (1 + 1e-9) < math.inf:
        return -1.0
    return max(-1.0, min(1.0, inter / union - (hull - union) / hull))


def iou_matrix(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> list[list[float]]:
    """[len(a), len(b)] The IoU of every box of `a` with every box of `b`."""
    return [[iou(x, y) for y in b] for x in a]


def centre(box: Sequence[float]) -> tuple[float, float]:
    """The centre [x, y] of a box; the corners may be in any order."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def edge_similarity(box: Sequence[float], truth: Sequence[float], width: float, height: float) -> float:
    """How close the four sides of two boxes are, in [0, 1]: the box term of GUI-G1 (2505.15810).

    The similarity of a side is 1 - d / s, where d is the distance between this side of the two boxes and s is the image
    width or height. The result is the harmonic mean of the four similarities; it is 0 if one side is off by the whole
    image or more."""
    sides = [1 - abs(p - t) / full for p, t, full in zip(box, truth, (width, height) * 2, strict=True)]
    return 4 / sum(1 / side for side in sides) if min(sides) > 1e-9 else 0.0


def parse_box(text: str) -> list[float] | None:
    """The first well-formed `[number, number, number, number]` in a text, alone or inside JSON; None if there is none.

    Numbers may be integers or decimals, with or without a sign. The corners are returned in the order in which they are
    written."""
    match = _BOX.search(text)
    return [float(v) for v in match.groups()] if match else None


def parse_boxes(text: str) -> list[list[float]]:
    """All well-formed boxes in a text, in order of appearance. See `parse_box` for the accepted format."""
    return [[float(v) for v in corners] for corners in _BOX.findall(text)]


def box_format(text: str, integers: bool = False) -> float:
    """1 if the stripped text is exactly one box and nothing else, else 0. With `integers`, its coordinates must be
    unsigned integers."""
    return float((_DIGITS if integers else _BOX).fullmatch(text.strip()) is not None)


def parse_integer_box(text: str) -> list[float] | None:
    """The first `[x1, y1, x2, y2]` of unsigned integers in a text; None if there is none (VLM-R1, 2504.07615)."""
    match = _WHOLE_BOX.search(text)
    return [float(v) for v in match.groups()] if match else None


def format_box(box: Sequence[float]) -> str:
    """Writes a box as a model would, `[x1, y1, x2, y2]`: whole numbers without a decimal point, others with up to 4
    decimals."""
    texts = [f"{float(v):.4f}".rstrip("0").rstrip(".") for v in box]
    return f"[{', '.join('0' if text == '-0' else text for text in texts)}]"


def is_number(value: Any) -> bool:
    """Whether a value from a data row is a finite number that fits into a float; bools, strings and NaN are not
    numbers."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int like 10**400
        return False


def _has_area(box: Sequence[float]) -> bool:
    try:
        return (len(box) == 4 and box[0] < box[2] and box[1] < box[3] and math.isfinite(box[0])
                and math.isfinite(box[1]) and math.isfinite(box[2]) and math.isfinite(box[3]))
    except OverflowError:  # an int like 10**400
        return False


def _areas(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """The areas of the intersection, union and enclosing box of two boxes; inf or NaN beyond the range of floats."""
    ax1, ay1, ax2, ay2 = map(float, a)
    bx1, by1, bx2, by2 = map(float, b)
    inter = max(0.0, min(ax2, bx2) - max(ax1, bx1)) * max(0.0, min(ay2, by2) - max(ay1, by1))
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inter
    return inter, union, (max(ax2, bx2) - min(ax1, bx1)) * (max(ay2, by2) - min(ay1, by1))
