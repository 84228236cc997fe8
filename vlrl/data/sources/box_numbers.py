"""The numbers of boxes and points: sides, shares of the image, pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vlrl.data.values import DIGITS, short, tidy
from vlrl.errors import DataError

_NEARLY = 1e-3  # by which rounding may put a share of the image outside of it


def xywh(values: Sequence[float]) -> list[float]:
    """Returns [x, y, width, height] -> [x1, y1, x2, y2], pixels or shares of the image."""
    x, y, width, height = values
    return [tidy(v, DIGITS) for v in (x, y, x + width, y + height)]


def hull(points: Iterable[Sequence[float]]) -> list[float]:
    """Returns the box around points."""
    xs, ys = zip(*points, strict=True)
    return [tidy(v) for v in (min(xs), min(ys), max(xs), max(ys))]


def are_shares(values: Sequence[float]) -> bool:
    """Returns whether coordinates can only be shares of the image: pixels of a box this close to the corner mean
    nothing.
    """
    return all(-_NEARLY <= v <= 1 + _NEARLY for v in values)


def pixels(values: list[float], name: str) -> list[float]:
    """Coordinates that the format has in pixels. DataError where they can only be shares of the image."""
    if any(values) and are_shares(values) and any(v != int(v) for v in values):
        raise DataError(f"{name}={short(values)} are shares of the image, where this format has pixels: multiply them "
                        "by its width and height")
    return values


def scaled(values: Sequence[float], size: Sequence[float] | None, full: float, name: str) -> list[float]:
    """Coordinates 0..full of an image -> its pixels. DataError naming the field when its size is not known."""
    if size is None:
        raise DataError(f"{name}={short(list(values))} is relative to the image, whose size is not known: the record "
                        "has no width and height, and its file is not there or cannot be read. Add them, or name the "
                        "folder of the images with --root (data.root in a config)")
    return [tidy(v * size[i % 2] / full) for i, v in enumerate(values)]
