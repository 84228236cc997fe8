"""Checkpoint state of samplers, filters and functions of the objective: the attributes listed in a class's `saved`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np


class Saved:
    """Base of classes whose entire state is in the attributes named in `saved`."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Names of attributes (numbers, lists, arrays, deques), which are also their keys in the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return state_of(self, self.saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self, state, self.saved)


def state_of(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Returns the attributes `names` of an object as a dictionary. Dictionaries are copied, and deques become lists."""
    values = {name: getattr(owner, name) for name in names}
    return {name: list(value) if isinstance(value, deque) else dict(value) if isinstance(value, dict) else value
            for name, value in values.items()}


def restore(owner: object, state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Sets the attributes `names` of `owner` from a state. Each value is converted to the type that the attribute has
    now."""
    for name in names:
        before, value = getattr(owner, name), state[name]
        if isinstance(before, np.ndarray):
            value = np.array(value, dtype=before.dtype)
        elif isinstance(before, deque):
            value = deque(value, before.maxlen)
        elif isinstance(before, dict):
            value = dict(value)
        elif isinstance(before, (bool, int, float)) and value is not None:
            value = type(before)(value)
        setattr(owner, name, value)
