"""Converts a trainer's state to JSON and tensors, and back.

A state consists of nested dictionaries, lists and tuples with tensors, arrays, numbers, strings, bytes and None. torch
is imported only if a state contains a tensor or is loaded."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STATE, TENSORS = "trainer_state.json", "trainer_state.safetensors"


class State(NamedTuple):
    """A trainer's state as a checkpoint stores it. `tree` is the state as JSON, with names in place of tensors;
    `tensors` is {name: tensor}."""

    tree: Any
    tensors: dict[str, Any]


def freeze(state: Mapping[str, Any]) -> State:
    """Copies a trainer's state to host memory, so that later training steps do not change it."""
    tree, tensors = view(state)
    return State(tree, {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})


def view(state: Mapping[str, Any]) -> State:
    """Converts a trainer's state without copying its tensors. The result must be saved before the tensors change."""
    tensors: dict[str, Any] = {}
    return State(_encode(state, tensors, "state"), tensors)


def merge(*states: State) -> State:
    """Combines the states of several parts of the trainer into one state. If a key occurs in several states, its values
    are dictionaries, which are merged."""
    tree: dict[str, Any] = {}
    for state in states:
        for key, value in state.tree.items():
            tree[key] = {**tree[key], **value} if key in tree else value
    return State(tree, {k: v for s in states for k, v in s.tensors.items()})


def write(path: Path, state: Mapping[str, Any] | State) -> None:
    """Writes a state, given as a dictionary or a `State`, into the folder `path` of a checkpoint."""
    from safetensors.torch import save_file

    tree, leaves = state if isinstance(state, State) else view(state)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in leaves.items()}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        if place in memory:  # safetensors refuses tensors that share memory
            tensors[name] = tensor.clone()
        memory.add(place)
    (path / STATE).write_text(json.dumps(tree), encoding="utf-8")
    save_file(tensors, path / TENSORS)


def read(path: Path) -> dict[str, Any]:
    """Reads the state that `write` wrote into the folder `path`, with tensors on the CPU. Raises OSError, ValueError or
    KeyError if the state is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from vlrl.store.aligned_memory import aligned_copy

    try:
        tensors = {name: aligned_copy(tensor) for name, tensor in load_file(path / TENSORS).items()}
    except SafetensorError as error:
        raise ValueError(error) from error
    return decode(json.loads((path / STATE).read_bytes()), tensors)


def _encode(value: Any, tensors: dict[str, Any], name: str) -> Any:
    """Converts `value` to JSON, and adds its tensors to `tensors`. A value of a type that JSON lacks becomes {"$TYPE":
    content}. The name of a tensor is its path in the state, beginning with `name`."""
    import torch

    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors, name)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        while name in tensors:  # the keys 1 and "1", or "a.b" and a nested b
            name += "'"
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
        tensors[name] = tensor
        return {"$tensor" if isinstance(value, torch.Tensor) else "$array": name}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [[_encode(key, tensors, f"{name}.key"), _encode(item, tensors, f"{name}.{key}")]
                 for key, item in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": pairs}
    raise TypeError(f"{name} is a {type(value).__name__}; a checkpoint holds numbers, strings, bytes, None, tensors, "
                    "arrays, and lists, tuples and dictionaries of these")


def decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Converts the JSON of a `State` and its tensors back to the original value."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()), ("", ""))
    if kind == "$tensor":
        return tensors[content]
    if kind == "$array":
        return tensors[content].numpy()
    if kind == "$bytes":
        return base64.b64decode(content)
    if kind == "$tuple":
        return tuple(decode(item, tensors) for item in content)
    if kind == "$dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in content}
    return {key: decode(item, tensors) for key, item in value.items()}
