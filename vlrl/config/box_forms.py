"""Parses the values of `data.boxes` and --boxes, the form in which a file writes boxes and points."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from vlrl.errors import ConfigError, did_you_mean

UNITS = ("pixels", "norm1000", "norm1", "resized")
LAYOUTS = ("xywh", "xyxy")
FORMS = ("auto", *UNITS, *LAYOUTS, *(f"{layout}-{unit}" for layout in LAYOUTS for unit in UNITS[1:]))
"""Every value, apart from the numbers that may follow `resized`."""
_RESIZE = re.compile(r":(\d{1,4}):(\d{1,9}):(\d{1,9})")


class BoxForm(NamedTuple):
    """The form in which a file writes its boxes and points."""

    layout: str = ""
    """xywh ([x, y, width, height]), xyxy (two corners), or "": the layout of the file's format."""
    unit: str = ""
    """pixels, norm1000 (0 to 1000), norm1 (0 to 1), resized (pixels of the resized image), or "": as the format has
    it."""
    resize: tuple[int, int, int] | None = None
    """Of the unit resized: both sides are multiples of the first number, and the product of the sides lies between the
    other two, as in the image processor of Qwen-VL. None: every row states the size of its resized image."""


@cache
def parse_box_form(name: str, setting: str = "data.boxes") -> BoxForm:
    """Parses a value such as `xywh-norm1000` or `resized:28:3136:1003520`. Raises ConfigError for any other text;
    `setting` is the name in the message."""
    form, colon, numbers = name.partition(":")
    match = _RESIZE.fullmatch(colon + numbers) if colon else None
    if form not in FORMS or (colon and (not form.endswith("resized") or match is None)):
        raise ConfigError(f"{setting}={name!r} is not known.{did_you_mean(form, FORMS)} Known: {', '.join(FORMS)}; "
                          "resized may be followed by the numbers of the image processor, "
                          "resized:MULTIPLE:MIN_PIXELS:MAX_PIXELS")
    resize = (int(match[1]), int(match[2]), int(match[3])) if match else None
    if resize and not 0 < resize[0] <= resize[0] ** 2 <= resize[2] >= resize[1]:
        raise ConfigError(f"{setting}={name!r}: MULTIPLE and MAX_PIXELS must be at least 1, and MAX_PIXELS at least "
                          "MIN_PIXELS and MULTIPLE x MULTIPLE")
    first, _, second = form.partition("-")
    layout = first if first in LAYOUTS else ""
    unit = (second if layout else "" if form == "auto" else form).partition(":")[0]
    return BoxForm(layout, unit, resize)
