"""Images and videos as data URLs, for servers that are asked over HTTP."""

from __future__ import annotations

import base64
import io
from typing import Any

from vlrl.types import LoadedMedia

MOST_PNG = 2**22
"""Bytes of a picture as PNG; a larger one is sent as JPEG of quality 95."""


def data_urls(loaded: LoadedMedia) -> list[str]:
    """Returns the frames of an image or video as data URLs: PNG, so that the server sees the same pixels, and JPEG
    where that would have more than MOST_PNG bytes.
    """
    return [_data_url(frame) for frame in loaded.frames]


def _data_url(frame: Any) -> str:
    for kind, options in (("png", {}), ("jpeg", {"quality": 95})):
        file = io.BytesIO()
        frame.save(file, format=kind, **options)
        if file.tell() <= MOST_PNG or kind == "jpeg":
            return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    raise AssertionError
