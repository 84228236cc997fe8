"""Conversions of the coordinates of boxes and points: from width and height, and from fractions of the image to pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vlrl.data.values import DIGITS, short, tidy
from vlrl.errors import DataError

_NEARLY = 1e-3  # rounding error of fractions of the image


def xywh(values: Sequence[float]) -> list[float]:
    """Converts [x, y, width, height] to [x1, y1, x2, y2]; the unit stays the same."""
    x, y, width, height = values
    return [tidy(v, DIGITS) for v in (x, y, x + width, y + height)]


def hull(points: Iterable[Sequence[float]]) -> list[float]:
    """Returns the bounding box [x1, y1, x2, y2] of points."""
    xs, ys = zip(*points, strict=True)
    return [tidy(v) for v in (min(xs), min(ys), max(xs), max(ys))]


def are_shares(values: Sequence[float]) -> bool:
    """Whether coordinates must be fractions of the image: all are at most 1, which no meaningful box in pixels has."""
    return all(-_NEARLY <= v <= 1 + _NEARLY for v in values)


def pixels(values: list[float], name: str) -> list[float]:
    """Returns the coordinates unchanged. Raises DataError, naming the field, if they can only be fractions of the
    image."""
    if any(values) and are_shares(values) and any(v != int(v) for v in values):
        raise DataError(f"{name}={short(values)} are fractions of the image, but this format uses pixels: multiply "
                        "them by its width and height")
    return values


def scaled(values: Sequence[float], size: Sequence[float] | None, full: float, name: str) -> list[float]:
    """Converts coordinates from 0..full of an image to its pixels. Raises DataError naming the field if the size is
    unknown."""
    if size is None:
        raise DataError(f"{name}={short(list(values))} is relative to the image, whose size is unknown: the record has "
                        "no width and height, and its file is missing or cannot be read. Add them, or name the folder "
                        "of the images with --root (data.root in a config)")
    return [tidy(v * size[i % 2] / full) for i, v in enumerate(values)]
