"""Builds observations of external environments: images from arrays and base64, text from the fields of JSON."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from PIL import Image

from vlrl.config.schema import LimitsSettings
from vlrl.data import media as loader
from vlrl.environments.tools import shorten
from vlrl.environments.validation import ProtocolError
from vlrl.errors import DataError
from vlrl.types import Media, Observation

_MOST_BYTES = 2**26  # maximum size of an image file in bytes
_LIMITS = LimitsSettings(media_bytes=_MOST_BYTES)
_MAGIC = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD")
"""The first characters of base64-encoded PNG, JPEG, WebP and GIF files."""
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII)
_LEAST = 64  # minimum length of a base64 string that is recognized as an image


def image_of_array(values: Any, what: str) -> Image.Image:
    """Converts an array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] of numbers from 0 to 255 to an RGB image. Raises
    ProtocolError for any other value, also for fractions from 0 to 1. `what` names the value in the message."""
    try:
        array: Any = np.asarray(values)
    except (ValueError, OverflowError):  # rows of different lengths
        array = np.empty(0, object)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not fits or array.dtype.kind not in "iuf" or not 0 < array.shape[0] * array.shape[1] <= _LIMITS.image_pixels:
        found = f"{array.dtype} {list(array.shape)}" if array.dtype != object else type(values).__name__
        raise ProtocolError(f"the environment's {what} is not an image: {found}, expected numbers [height, width, 3]")
    if not (array.min() >= 0 and array.max() <= 255):  # nan too
        raise ProtocolError(f"the environment's {what} is not an image: numbers from {array.min()} to {array.max()}, "
                            "expected 0 to 255")
    if array.dtype.kind == "f" and 0 < array.max() <= 1:
        raise ProtocolError(f"the environment's {what} would be black: fractions from {array.min():g} to "
                            f"{array.max():g}, expected numbers from 0 to 255. Multiply the fractions by 255")
    return Image.fromarray(array.astype(np.uint8)).convert("RGB")


def image_of_base64(data: Any, what: str) -> Image.Image:
    """Decodes a base64 string to an image, with the checks of vlrl.data.media. Raises ProtocolError if that fails."""
    if not isinstance(data, str):
        raise ProtocolError(f"the environment's {what} is {type(data).__name__}, expected an image as base64")
    if len(data) > _MOST_BYTES * 4 // 3:
        raise ProtocolError(f"the environment's {what} has {len(data)} characters, more than {_MOST_BYTES * 4 // 3}")
    try:
        own = base64.b64decode(data, validate=True)
        return loader.load(Media(source=own), _LIMITS).frames[0]
    except DataError as error:
        raise ProtocolError(f"the environment's {what}: {error}") from None
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"the environment's {what} is not base64: {error}") from None


# --- the fields of a JSON observation ---------------------------------------------------------------------------------


def observation_of(fields: Mapping[str, Any], images: Collection[str] = ()) -> Observation:
    """Converts the fields of a JSON observation to an Observation with text and images.

    An image is one of: a base64 string of a PNG, JPEG, WebP or GIF file (or a data: URL with it); {"type": "image",
    "data": base64 string}; a list [height, width, 3] of numbers; a flat list of numbers, if the field `<name>_shape`
    gives the shape of the image. The fields in `images` must be images. If only one field is text, the observation's
    text is this text. Several other fields become lines `name: value`. Raises ProtocolError for an invalid image."""
    missing = [name for name in images if name not in fields]
    if missing:
        known = ", ".join(map(str, fields))[:200]
        raise ProtocolError(f"the environment's observation has no field {missing[0]!r}; it has {known}")
    media, texts = [], {}
    for name, value in fields.items():
        shape = fields.get(f"{name}_shape")
        image = _image(value, shape, str(name), name in images)
        if image is not None:
            media.append(Media(source=image))
        elif value not in (None, "", [], {}):
            shaped = str(name).removesuffix("_shape")
            if shaped == name or not isinstance(fields.get(shaped), list):  # else the shape of an image
                texts[str(name)] = value
    alone = len(texts) == 1 and isinstance(next(iter(texts.values())), str)
    lines = texts.values() if alone else (
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in texts.items())
    return Observation(shorten("\n".join(lines)), media)


def _image(value: Any, shape: Any, name: str, must: bool) -> Image.Image | None:
    if isinstance(value, Mapping) and value.get("type") == "image" and "data" in value:
        return image_of_base64(value["data"], name)
    if isinstance(value, str):
        url = _DATA_URL.match(value)
        if url or must or (len(value) >= _LEAST and value.startswith(_MAGIC)):
            return image_of_base64(value[url.end():] if url else value, name)
    if isinstance(value, list) and isinstance(shape, list):
        try:
            array = np.asarray(value).reshape([int(side) for side in shape])
        except (ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"the environment's {name} does not have the shape {str(shape)[:60]}: "
                                f"{str(error)[:100]}") from None
        return image_of_array(array, name)
    if must or _is_frame(value):
        return image_of_array(value, name)
    return None


def _is_frame(value: Any) -> bool:
    for least in (8, 8, 3):
        if not isinstance(value, list) or len(value) < least:
            return False
        wide, value = len(value), value[0]
    return wide in (3, 4) and isinstance(value, (int, float))
