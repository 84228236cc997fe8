"""Reads the size and orientation of an image from the file's header, without decoding pixels. Imports no torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vlrl.data.embedded import EmbeddedMedia
from vlrl.data.media import IMAGE_FORMATS

_ORIENTATION = 0x0112
_ROTATED = (5, 6, 7, 8)


class Header(NamedTuple):
    """Size and orientation from the header of an image file."""

    size: tuple[int, int]
    """Width and height as displayed, with the EXIF orientation applied."""
    orientation: int
    """EXIF orientation: 1 = displayed as stored, 5 to 8 = rotated by 90 degrees."""


def header(source: Path | bytes | EmbeddedMedia) -> Header | None:
    """Reads the header of an image; returns None if the file is missing or unreadable."""
    data = source.data if isinstance(source, EmbeddedMedia) else source
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=IMAGE_FORMATS) as opened:
            width, height = opened.size
            # Pillow would search a PNG without EXIF in its header behind the pixels
            has_exif = opened.format != "PNG" or "exif" in opened.info
            orientation = opened.getexif().get(_ORIENTATION, 1) if has_exif else 1
    except Exception:  # decoders raise anything; loading the image reports the fault
        return None
    known = orientation if orientation in range(1, 9) else 1
    return Header((height, width) if known in _ROTATED else (width, height), known)
