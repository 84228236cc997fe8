"""Converts the model's text to an action: of a gymnasium space, or of a server with a JSON schema for actions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlrl.task.tool_calls import from_json

_MOST = 20_000  # maximum length of an action in characters
_NUMBERS = {"integer": int, "number": float}
_KINDS: Mapping[str, type] = {"boolean": bool, "array": list, "object": dict, "null": type(None)}
_NUMBER = re.compile(r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?", re.ASCII)


def read_action(text: str, space: Any, names: Sequence[str] = ()) -> Any:
    """Converts a text to an action of a gymnasium space. Discrete: the text is the action's name (from `names`) or
    number. Box: the text contains the numbers in order, with or without brackets. Text: the text is used unchanged.
    Other spaces: the text is JSON. Raises ValueError, with a message for the model, for an invalid action."""
    from gymnasium import spaces

    if len(text) > _MOST:
        raise ValueError(f"the action has {len(text)} characters; at most {_MOST} are read")
    if isinstance(space, spaces.Discrete):
        return _discrete(text, space, names)
    if isinstance(space, spaces.Text):
        action: Any = text
    elif isinstance(space, spaces.Box):
        action = _box(text, space)
    else:
        try:
            action = _as_space(from_json(text), space)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"invalid action for {space}, which is written as JSON: {str(error)[:200]}") from None
    if not space.contains(action):
        raise ValueError(f"{text[:100]!r} is not a valid action; the actions are {str(space)[:300]}")
    return action


def _discrete(text: str, space: Any, names: Sequence[str]) -> Any:
    written, start = text.rstrip(".").strip().casefold(), int(space.start)
    known = [name.casefold() for name in names]
    if written in known:
        return space.dtype.type(start + known.index(written))
    if re.fullmatch(r"-?\d{1,18}", written, re.ASCII) and start <= int(written) < start + int(space.n):
        return space.dtype.type(int(written))
    choice = ", ".join(names) if names else f"the numbers {start} to {start + int(space.n) - 1}"
    raise ValueError(f"{text[:100]!r} is not a valid action; write one of {choice}")


def _box(text: str, space: Any) -> np.ndarray:
    numbers = [float(number) for number in _NUMBER.findall(text)]
    rest = _NUMBER.sub("", text).strip(" \t\r\n,;[]()")
    wanted = int(np.prod(space.shape))
    if len(numbers) != wanted or re.search(r"\w", rest) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{text[:100]!r} is not a valid action; write {wanted} numbers between {space.low.tolist()} "
                         f"and {space.high.tolist()}"[:400])
    return np.array(numbers, np.float64).astype(space.dtype).reshape(space.shape)


def _as_space(value: Any, space: Any) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            raise ValueError(f"write an object with {', '.join(space.spaces)}")
        return {name: _as_space(value[name], inner) for name, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list) or len(value) != len(space.spaces):
            raise ValueError(f"write a list of {len(space.spaces)}")
        return tuple(_as_space(one, inner) for one, inner in zip(value, space.spaces, strict=True))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        return np.array(value, space.dtype)
    if isinstance(space, spaces.Discrete):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{str(value)[:50]!r} is no whole number")
        return space.dtype.type(value)
    return value


# --- JSON schemas -----------------------------------------------------------------------------------------------------


def action_of_text(text: str, schema: Mapping[str, Any], field: str = "") -> dict[str, Any]:
    """Converts a text to an action that matches the JSON schema of a server's actions.

    The text, converted to the field's type, becomes the value of `field`. If `field` is empty, it becomes the value of
    the schema's only required field, or else of its only field. If no field is determined in this way, the text must be
    a JSON object. Raises ValueError, with a message for the model, for an invalid action."""
    text = text.strip()
    if len(text) > _MOST:
        raise ValueError(f"the action has {len(text)} characters; at most {_MOST} are read")
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
        raise ValueError(f"{text[:100]!r} is not a valid action; write JSON with "
                         f"{', '.join(fields) or 'its fields'}"[:500])
    return action


def _value(text: str, kind: Mapping[str, Any]) -> Any:
    """Converts a text to a value of a schema field: to one of its allowed values if the schema lists them, else to the
    field's type. `kind` is the schema of the field. If the field has several types, the first type that fits is
    used; string is tried last. Raises ValueError if nothing fits."""
    allowed, wanted = kind.get("enum"), kind.get("type") or "string"
    if isinstance(allowed, list):
        if text in map(str, allowed):
            return next(value for value in allowed if str(value) == text)
        raise ValueError(f"{text[:100]!r} is not a valid action; write one of {', '.join(map(str, allowed))}"[:500])
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
            raise ValueError(f"{text[:100]!r} is not a valid action; write a "
                             f"{'whole ' if wanted == 'integer' else ''}number")
        return number
    try:
        value = from_json(text)
        if isinstance(value, _KINDS.get(str(wanted), object)):
            return value
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"{text[:100]!r} is not a valid action; write JSON of the type {str(wanted)[:50]}")
