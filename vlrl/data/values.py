"""Values of rows: shortening them for messages, parsing numbers and JSON from strings, and conversions of boxes and
points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vlrl.errors import DataError

_NEARLY = 1e-3  # rounding error of fractions of the image
LONGEST = 40
"""Maximum length of a string that is parsed as a number."""
DIGITS = 9
"""Decimals to which numbers are rounded; enough for coordinates given as fractions of an image."""


def short(value: Any) -> str:
    """Returns the `repr` of a value for a message, cut off after 200 characters."""
    text = str(value) if isinstance(value, Path) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def unpacked(value: Any) -> Any:
    """Parses a string that holds a JSON list or object; returns any other value unchanged."""
    if isinstance(value, str) and value[:1] in "[{" and value.strip()[-1:] in ("]", "}"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def number(value: Any) -> float | None:
    """Converts a finite number or a numeric string to int or float; returns None for anything else."""
    if isinstance(value, str) and len(value) <= LONGEST:
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return tidy(value, DIGITS) if math.isfinite(value) else None
    except OverflowError:  # an int like 10**400
        return None


def tidy(value: float, digits: int = 3) -> float:
    """Rounds a number to `digits` decimals; returns an int if the result is whole."""
    value = round(value, digits) if isinstance(value, float) else value
    return int(value) if value == int(value) else value


def xywh(values: Sequence[float]) -> list[float]:
    """Converts [x, y, width, height] to [x1, y1, x2, y2]; the unit stays the same."""
    x, y, width, height = values
    return [tidy(v, DIGITS) for v in (x, y, x + width, y + height)]


def hull(points: Iterable[Sequence[float]]) -> list[float]:
    """Returns the bounding box [x1, y1, x2, y2] of points."""
    xs, ys = zip(*points, strict=True)
    return [tidy(v) for v in (min(xs), min(ys), max(xs), max(ys))]


def are_shares(values: Sequence[float]) -> bool:
    """Whether coordinates must be fractions of the image size: all are at most 1, unlike any real box in pixels."""
    return all(-_NEARLY <= v <= 1 + _NEARLY for v in values)


def pixels(values: list[float], name: str) -> list[float]:
    """Checks that the coordinates of the field `name` can be pixels, and returns them unchanged. Raises DataError
    naming the field if they can only be fractions of the image size."""
    if any(values) and are_shares(values) and any(v != int(v) for v in values):
        raise DataError(f"{name}={short(values)} are fractions of the image, but this format uses pixels: if "
                        "all boxes of the file are, set data.boxes=norm1 (--boxes norm1), else correct these numbers")
    return values


def scaled(values: Sequence[float], size: Sequence[float] | None, full: float, name: str) -> list[float]:
    """Converts coordinates in the range 0 to `full` to pixels of an image of `size`. Raises DataError naming the field
    if the size is unknown."""
    if size is None:
        raise DataError(f"{name}={short(list(values))} is relative to the image, whose size is unknown: the record has "
                        "no width and height, and the image cannot be read. Add width and height, or give the folder "
                        "of the images with --root (data.root in a config)")
    return [tidy(v * size[i % 2] / full) for i, v in enumerate(values)]
