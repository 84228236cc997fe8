"""What environments from outside show: pictures of numbers or of bytes."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from PIL import Image

from vlrl.config.schema import LimitsSettings
from vlrl.data import media as loader
from vlrl.environments.validation import ProtocolError
from vlrl.errors import DataError
from vlrl.types import Media

_MOST_BYTES = 2**26
"""Of a picture's file."""
_LIMITS = LimitsSettings(media_bytes=_MOST_BYTES)


def image_of_array(values: Any, what: str) -> Image.Image:
    """Returns [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] numbers from 0 to 255 as a picture. Raises Wrong, for fractions
    from 0 to 1 too."""
    try:
        array: Any = np.asarray(values)
    except (ValueError, OverflowError):  # rows of different lengths
        array = np.empty(0, object)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not fits or array.dtype.kind not in "iuf" or not 0 < array.shape[0] * array.shape[1] <= _LIMITS.image_pixels:
        raise ProtocolError(f"its {what} is no picture: {_described(values, array)}, expected numbers "
                            "[height, width, 3]")
    if not (array.min() >= 0 and array.max() <= 255):  # nan too
        raise ProtocolError(f"its {what} is no picture: numbers from {array.min()} to {array.max()}, expected 0 to 255")
    if array.dtype.kind == "f" and 0 < array.max() <= 1:
        raise ProtocolError(f"its {what} would be black: fractions from {array.min():g} to {array.max():g}, expected "
                            "numbers from 0 to 255; multiply by 255 where it is made")
    return Image.fromarray(array.astype(np.uint8)).convert("RGB")


def image_of_base64(data: Any, what: str) -> Image.Image:
    """Returns the picture in the base64 text of a file, read as vlrl.data.media reads files. Raises Wrong."""
    if not isinstance(data, str):
        raise ProtocolError(f"its {what} is {type(data).__name__}, expected a picture as base64")
    if len(data) > _MOST_BYTES * 4 // 3:
        raise ProtocolError(f"its {what} has {len(data)} characters, more than {_MOST_BYTES * 4 // 3}")
    try:
        own = base64.b64decode(data, validate=True)
        return loader.load(Media(source=own), _LIMITS).frames[0]
    except DataError as error:
        raise ProtocolError(f"its {what}: {error}") from None
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"its {what} is no base64: {error}") from None


def _described(values: Any, array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}" if array.dtype != object else type(values).__name__
