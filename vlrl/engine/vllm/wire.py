"""What travels between a trainer and a vLLM server: prompts with their pixels as JSON, without loss.

Images and the frames of videos are PNGs, so the server sees the pixels that the trainer saw. Nothing is pickled.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

PROTOCOL = 2
"""Number of the way in which a trainer and its servers talk; both must have the same."""
_FAST = 1  # of zlib's levels: pixels travel over a local network


def pack(value: Any) -> bytes:
    """JSON of nested mappings, sequences, numbers and texts that may hold images and arrays."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """Returns what `pack` was given; sequences come back as lists where they were no tuples. ValueError for anything
    else.
    """
    return restore_arrays(parse(data))


def parse(data: bytes) -> Any:
    """Returns the JSON, in which media are still texts: what it says can be checked before they are decoded. Raises as
    `unpack`.
    """
    return _checked(json.loads, data)


def restore_arrays(value: Any) -> Any:
    """Returns what `parsed` gave with its images and arrays. Raises as `unpack`."""
    return _checked(_restored, value)


def _checked(read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except (TypeError, KeyError, OSError, RecursionError, Image.DecompressionBombError) as error:
        raise ValueError(f"what was sent is damaged: {error or type(error).__name__}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Image.Image):
        return {"$image": _png(value)}
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {"$pairs": [[_plain(k), _plain(v)] for k, v in value.items()]} if _special(value) else {
            k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_plain(v) for v in value]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent to a server")


def _special(value: Mapping[Any, Any]) -> bool:
    """Returns whether a mapping's keys are no texts (JSON would make them so), or look like marks of this module."""
    return any(not isinstance(k, str) or k.startswith("$") for k in value)


def _array(value: np.ndarray) -> dict[str, Any]:
    if value.dtype == np.uint8 and value.ndim == 4 and value.shape[-1] == 3 and value.size:
        return {"$frames": [_png(Image.fromarray(frame)) for frame in value]}
    if value.dtype.hasobject:
        raise TypeError("an array of Python objects cannot be sent to a server")
    raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"$array": raw, "dtype": value.dtype.str, "shape": list(value.shape)}


def _png(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, format="PNG", compress_level=_FAST)
    return base64.b64encode(out.getvalue()).decode()


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "$image" in value:
        return _image(value["$image"])
    if "$frames" in value:
        return np.stack([np.asarray(_image(frame)) for frame in value["$frames"]])
    if "$array" in value:
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"an array of {dtype} is not taken")
        return np.frombuffer(base64.b64decode(value["$array"]), dtype=dtype).reshape(value["shape"]).copy()
    if "$tuple" in value:
        return tuple(_restored(v) for v in value["$tuple"])
    if "$pairs" in value:
        return {_restored(k): _restored(v) for k, v in value["$pairs"]}
    return {k: _restored(v) for k, v in value.items()}


def _image(data: str) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(data)), formats=("PNG",))
    image.load()
    return image
