"""Conversion of boxes and points between pixels of the original image and the coordinate convention of a model.

A task works in pixels of the original image. `make("norm1000")` returns the converter for a convention. Conventions:

    original    pixels of the original image
    processed   pixels after the processor's resize; needs the row's `processed_size: [w, h]`
    norm1000    0 to 1000 along the width and along the height
    norm999     integers from 0 to 999
    norm1       0 to 1"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.types import Sample

CONVENTIONS = ("original", "processed", "norm1000", "norm999", "norm1")
_FULL_SCALE = {"norm1000": 1000.0, "norm999": 999.0, "norm1": 1.0}


class Coordinates:
    """Converts boxes and points between original pixels and a model's convention. This base class converts nothing."""

    convention = "original"

    def to_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        """Converts a box or point from the model's convention to pixels of the original image."""
        return [float(v) for v in box]

    def from_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        """Converts a box or point in pixels of the original image to the model's convention."""
        return [float(v) for v in box]


class Convention(Coordinates):
    """Converts between original pixels and one coordinate convention. The field `coordinates` of a row overrides the
    convention for that row.

    `to_original` and `from_original` take a box (4 numbers) or a point (2 numbers). They raise DataError naming the row
    if the row has no `width` and `height` in original pixels, or names an unknown convention."""

    def __init__(self, convention: str):
        self.convention = convention

    def to_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        """Converts a box or point from the model's convention to pixels of the original image, without rounding."""
        used = self.used(sample)
        if used == "original":
            return [float(v) for v in box]
        return [v * size / full for v, size, full in _scaled(sample, used, box)]

    def from_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        """Converts a box or point in pixels of the original image to the model's convention.

        The result is rounded to integers for processed, norm1000 and norm999, to four decimals for norm1, and not at
        all for original."""
        used = self.used(sample)
        if used == "original":
            return [float(v) for v in box]
        digits = 4 if used == "norm1" else None
        return [round(v * full / size, digits) for v, size, full in _scaled(sample, used, box)]

    def used(self, sample: Sample) -> str:
        """Returns the name of the convention for a sample: the field `coordinates` of its row if set, else the
        converter's convention."""
        own = sample.get("coordinates") or self.convention
        if own not in CONVENTIONS:
            raise DataError(f"row '{sample.id}': coordinates={own!r} is not a coordinate convention."
                            f"{did_you_mean(str(own), CONVENTIONS)} Known: {', '.join(CONVENTIONS)}.")
        return own


def make(convention: str) -> Coordinates:
    """Returns the converter for the convention named `convention`. Raises ConfigError for an unknown name."""
    if convention not in CONVENTIONS:
        raise ConfigError(f"task.coordinates={convention!r} is not a coordinate convention."
                          f"{did_you_mean(convention, CONVENTIONS)} Known: {', '.join(CONVENTIONS)}.")
    return Convention(convention)


def _scaled(sample: Sample, convention: str, box: Sequence[float]) -> Any:
    """Yields (number, size, full) for each number of a box or point. `size` is the image's width or height in original
    pixels. `full` is the coordinate of the image's right or lower edge in the convention."""
    original = _size(sample, "width", sample.get("width")), _size(sample, "height", sample.get("height"))
    if convention == "processed":
        sides = sample.get("processed_size")
        if not isinstance(sides, (list, tuple)) or len(sides) != 2:
            raise DataError(f"row '{sample.id}': processed_size={sides!r} must be [w, h], the image's size in pixels "
                            "after the processor's resize, because coordinates=processed needs this size. Add "
                            "processed_size to the row, or set task.coordinates=original")
        full = tuple(_size(sample, "processed_size", side) for side in sides)
    else:
        full = (_FULL_SCALE[convention],) * 2
    return zip(box, cycle(original), cycle(full), strict=False)


def _size(sample: Sample, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise DataError(f"row '{sample.id}': {name}={value!r} must be a positive number of pixels: boxes and "
                        "points are converted with this size")
    return float(value)
