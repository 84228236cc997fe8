"""A model's text -> an action of a gymnasium space."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlrl.task.tool_calls import from_json

_MOST = 20_000
"""Characters of an action that are read."""
_NUMBER = re.compile(r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?", re.ASCII)


def read_action(text: str, space: Any, names: Sequence[str] = ()) -> Any:
    """Returns the action that a text stands for. Discrete: its name or number; Box: its numbers in order, between
    brackets or not; Text: the text itself; any other space: JSON.

    Raises ValueError, whose text the model reads, for what is no action.
    """
    from gymnasium import spaces

    if len(text) > _MOST:
        raise ValueError(f"an action of {len(text)} characters; at most {_MOST} are read")
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
            raise ValueError(f"no action of {space}, which is written as JSON: {str(error)[:200]}") from None
    if not space.contains(action):
        raise ValueError(f"{text[:100]!r} is no action; the actions are {str(space)[:300]}")
    return action


def _discrete(text: str, space: Any, names: Sequence[str]) -> Any:
    written, start = text.rstrip(".").strip().casefold(), int(space.start)
    known = [name.casefold() for name in names]
    if written in known:
        return space.dtype.type(start + known.index(written))
    if re.fullmatch(r"-?\d{1,18}", written, re.ASCII) and start <= int(written) < start + int(space.n):
        return space.dtype.type(int(written))
    choice = ", ".join(names) if names else f"the numbers {start} to {start + int(space.n) - 1}"
    raise ValueError(f"{text[:100]!r} is no action; write one of {choice}")


def _box(text: str, space: Any) -> np.ndarray:
    numbers = [float(number) for number in _NUMBER.findall(text)]
    rest = _NUMBER.sub("", text).strip(" \t\r\n,;[]()")
    wanted = int(np.prod(space.shape))
    if len(numbers) != wanted or re.search(r"\w", rest) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{text[:100]!r} is no action; write {wanted} numbers between {space.low.tolist()} and "
                         f"{space.high.tolist()}"[:400])
    return np.array(numbers, np.float64).astype(space.dtype).reshape(space.shape)


def _as_space(value: Any, space: Any) -> Any:
    """Returns JSON in the types that a space holds."""
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
