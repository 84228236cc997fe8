"""Copies tensors of a base model that its model class does not load, such as a draft head `mtp.*`, to the exported
model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from vlrl.models import loading

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def copy_unread(base: str, model: Any, out: Path) -> tuple[str, ...]:
    """Copies the tensors that are in the files of `base` but ignored by the class of `model` to the model folder `out`.

    Returns the names of these tensors; () if there are none, or if `base` is not on this machine."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    tensors = _unread(_folder(base), [re.compile(p) for p in patterns]) if patterns else {}
    if tensors:
        index = _index(out)
        file = "model-unread.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, file)
        index["metadata"]["total_size"] = index["metadata"].get("total_size", 0) + sum(t.nbytes for t in
                                                                                       tensors.values())
        (out / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return tuple(sorted(tensors))


def _folder(base: str) -> Path:
    from transformers.utils.hub import cached_file

    name = loading.resolve(base)
    return Path(name) if os.path.isdir(name) else Path(str(cached_file(name, "config.json"))).parent


def _unread(folder: Path, patterns: list[re.Pattern[str]]) -> dict[str, Any]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names = [name for name in weights.keys() if any(p.search(name) for p in patterns)]  # noqa: SIM118
            found |= {name: weights.get_tensor(name) for name in names}
    return found


def _index(out: Path) -> dict[str, Any]:
    """The index of the weights files in a folder. If there is a single weights file without an index, it is renamed to
    model-00001-of-00001.safetensors."""
    if (out / _INDEX).is_file():
        return json.loads((out / _INDEX).read_text(encoding="utf-8"))
    first = "model-00001-of-00001.safetensors"
    (out / _SINGLE).rename(out / first)
    with safe_open(out / first, "pt") as weights:
        names = list(weights.keys())
    return {"metadata": {"total_size": (out / first).stat().st_size}, "weight_map": dict.fromkeys(names, first)}
