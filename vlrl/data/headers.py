"""What the header of an image file says; no pixel is decoded. No torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vlrl.data.embedded import EmbeddedMedia
from vlrl.data.media import IMAGE_FORMATS

_ORIENTATION = 0x0112
_ON_ITS_SIDE = (5, 6, 7, 8)


class Header(NamedTuple):
    """Size and place of an image."""

    size: tuple[int, int]
    """Width and height as it is shown, EXIF orientation applied."""
    orientation: int
    """Of EXIF: 1 = as stored, 5 to 8 = on its side."""


def header(source: Path | bytes | EmbeddedMedia) -> Header | None:
    """Returns what the header of an image says; None where it is not there or cannot be read."""
    data = source.data if isinstance(source, EmbeddedMedia) else source
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=IMAGE_FORMATS) as opened:
            width, height = opened.size
            # in a PNG without it in its header it would be looked for behind the pixels
            has_exif = opened.format != "PNG" or "exif" in opened.info
            orientation = opened.getexif().get(_ORIENTATION, 1) if has_exif else 1
    except Exception:  # decoders raise anything; opening the file says what is wrong
        return None
    known = orientation if orientation in range(1, 9) else 1
    return Header((height, width) if known in _ON_ITS_SIDE else (width, height), known)
