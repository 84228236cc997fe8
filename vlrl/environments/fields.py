"""Fields of JSON that a server sends and takes: pictures and texts of an observation, and the action of a text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from PIL import Image

from vlrl.environments.images import image_of_array, image_of_base64
from vlrl.environments.tools import shorten
from vlrl.environments.validation import ProtocolError
from vlrl.task.tool_calls import from_json
from vlrl.types import Media, Observation

_MAGIC = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD")
"""How base64 of PNG, JPEG, WebP and GIF files begins."""
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII)
_LEAST = 64
"""Characters of base64 that may be a picture."""
_MOST_ACTION = 20_000
_NUMBERS = {"integer": int, "number": float}
_KINDS: Mapping[str, type] = {"boolean": bool, "array": list, "object": dict, "null": type(None)}


# --- observations -----------------------------------------------------------------------------------------------------


def observation_of(fields: Mapping[str, Any], images: Collection[str] = ()) -> Observation:
    """Returns the fields of an observation as text and pictures.

    A picture is a base64 text of a PNG, JPEG, WebP or GIF file (or a data: URL of one), {"type": "image", "data": ...},
    a list [height, width, 3] of numbers, or a flat list beside a field `<name>_shape`; what `images` names must be one.
    Text alone stands as it is, other fields as `name: value`. Raises Wrong for a picture that is none.
    """
    missing = [name for name in images if name not in fields]
    if missing:
        raise ProtocolError(f"its observation has no field {missing[0]!r}; it has {', '.join(map(str, fields))[:200]}")
    media, texts = [], {}
    for name, value in fields.items():
        shape = fields.get(f"{name}_shape")
        image = _image(value, shape, str(name), name in images)
        if image is not None:
            media.append(Media(source=image))
        elif value not in (None, "", [], {}) and not _is_shape(str(name), fields):
            texts[str(name)] = value
    alone = len(texts) == 1 and isinstance(next(iter(texts.values())), str)
    lines = texts.values() if alone else (f"{name}: {_written(value)}" for name, value in texts.items())
    return Observation(shorten("\n".join(lines)), media)


def _is_shape(name: str, fields: Mapping[str, Any]) -> bool:
    return name.endswith("_shape") and isinstance(fields.get(name.removesuffix("_shape")), list)


def _image(value: Any, shape: Any, name: str, must: bool) -> Image.Image | None:
    """Returns the picture that a value is; None where it is none and need not be."""
    if isinstance(value, Mapping) and value.get("type") == "image" and "data" in value:
        return image_of_base64(value["data"], name)
    if isinstance(value, str):
        url = _DATA_URL.match(value)
        if url or must or (len(value) >= _LEAST and value.startswith(_MAGIC)):
            return image_of_base64(value[url.end():] if url else value, name)
    if isinstance(value, list) and isinstance(shape, list):
        return image_of_array(_reshaped(value, shape, name), name)
    if must or _is_frame(value):
        return image_of_array(value, name)
    return None


def _is_frame(value: Any) -> bool:
    """Returns whether a value begins like [height, width, 3] numbers of a frame of more than a few pixels."""
    for least in (8, 8, 3):
        if not isinstance(value, list) or len(value) < least:
            return False
        wide, value = len(value), value[0]
    return wide in (3, 4) and isinstance(value, (int, float))


def _reshaped(value: Sequence[Any], shape: Sequence[Any], name: str) -> Any:
    import numpy as np

    try:
        return np.asarray(value).reshape([int(side) for side in shape])
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"its {name} does not have the shape {str(shape)[:60]}: {str(error)[:100]}") from None


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- actions ----------------------------------------------------------------------------------------------------------


def action_of_text(text: str, schema: Mapping[str, Any], field: str = "") -> dict[str, Any]:
    """Returns the action that a text stands for, by the JSON schema of a server's actions: the value of `field`, or of
    the only field that must be given (else the only one there is), in its type; an object in JSON otherwise.

    Raises ValueError, whose text the model reads, for what is no action.
    """
    text = text.strip()
    if len(text) > _MOST_ACTION:
        raise ValueError(f"an action of {len(text)} characters; at most {_MOST_ACTION} are read")
    fields = {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}
    must = [name for name in schema.get("required") or () if name in fields]
    field = field or (must[0] if len(must) == 1 else next(iter(fields)) if len(fields) == 1 else "")
    if field:
        kind = fields.get(field)
        return {field: _value(text, kind if isinstance(kind, Mapping) else {})}
    try:
        action = from_json(text)
    except (ValueError, RecursionError):
        action = None
    if not isinstance(action, dict):
        raise ValueError(f"{text[:100]!r} is no action; write JSON with {', '.join(fields) or 'its fields'}"[:500])
    return action


def _value(text: str, kind: Mapping[str, Any]) -> Any:
    """Returns a text in the type of a field; of several types in the first that it can be, texts last."""
    allowed, wanted = kind.get("enum"), kind.get("type") or "string"
    if isinstance(allowed, list):
        if text in map(str, allowed):
            return next(value for value in allowed if str(value) == text)
        raise ValueError(f"{text[:100]!r} is no action; write one of {', '.join(map(str, allowed))}"[:500])
    problems = []
    for one in sorted(wanted, key=lambda one: one == "string") if isinstance(wanted, list) else [wanted]:
        try:
            return _typed(text, one)
        except ValueError as error:
            problems.append(error)
    raise problems[0]


def _typed(text: str, wanted: Any) -> Any:
    if wanted == "string":
        return text
    if isinstance(wanted, str) and wanted in _NUMBERS:
        try:
            number = _NUMBERS[wanted](text)
        except ValueError:
            number = math.nan
        if not abs(number) < 2**63:
            raise ValueError(f"{text[:100]!r} is no action; write a {'whole ' if wanted == 'integer' else ''}number")
        return number
    try:
        value = from_json(text)
        if isinstance(value, _KINDS.get(str(wanted), object)):
            return value
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"{text[:100]!r} is no action; write JSON of the type {str(wanted)[:50]}")
