"""`vlrl compare --weights`: counts which weights differ between two models.

    changes = weight_changes(Path("runs/a"))              # a run's base model and its newest checkpoint
    changes.total.share, changes.kinds["language_model.layers.mlp.up_proj.weight"].share

Measures how much of a model a run has changed, as in "Reinforcement Learning Finetunes Small Subnetworks in Large
Language Models" (2505.11711): the weights that differ by more than 1e-5 in the dtype of the first model. A float32
checkpoint differs from a bfloat16 base model nearly everywhere by less than bfloat16 can resolve; such weights are
counted separately (`lost`). Weights are read tensor by tensor in blocks of rows, so neither model is fully in memory.
LoRA factors are multiplied out."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open

from vlrl.errors import ConfigError, RunError
from vlrl.models.model_config import embedded
from vlrl.store import checkpoint, trainer_state
from vlrl.store.files import read_json

TOLERANCE = 1e-5
_ADAPTER = "adapter_config.json"
_BLOCK = 2**24  # number of weights compared at a time
_PREFIXES = {"model", "language_model", "base_model", "module"}
"""Components of tensor names that only some library versions write. They are ignored when names are compared."""


@dataclass
class Change:
    """Differences between two models in a set of weights: counts of changed and equal weights, and the distance."""

    tensors: int = 0
    weights: int = 0
    changed: int = 0  # weights that differ by more than TOLERANCE in the dtype of the first model
    equal: int = 0  # weights that are equal in the dtype of the first model
    lost: int = 0  # number of weights that are counted in `equal` but differ in the dtype of the second model
    distance: float = 0.0  # Euclidean distance between the stored weights
    norm: float = 0.0  # Euclidean norm of the first model's weights

    @property
    def share(self) -> float:
        """The share of weights that changed, in [0, 1]."""
        return self.changed / self.weights if self.weights else 0.0

    def add(self, other: Change) -> None:
        """Adds the counts of another set of weights to these counts."""
        for name in ("tensors", "weights", "changed", "equal", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.distance, self.norm = math.hypot(self.distance, other.distance), math.hypot(self.norm, other.norm)


@dataclass(frozen=True)
class WeightChanges:
    """The differences between the weights of two models, in total and for each kind of weight."""

    a: str
    b: str
    total: Change
    kinds: Mapping[str, Change]  # tensor name without layer number -> counts; the most changed first
    unmatched: tuple[str, ...] = field(default=())  # names of the weights that only one of the two models has


def weight_changes(a: Path | str, b: Path | str | None = None) -> WeightChanges:
    """Counts the differences between two models. A model is a folder, a Hub name in the local cache, a checkpoint, or a
    run folder (its newest checkpoint). Without `b`, the run or adapter `a` is compared with its base model.

    For LoRA adapters the product of the factors is compared. Raises RunError if a model is missing, cannot be read, or
    has no weight in common with the other model. Raises ConfigError for quantized weights (4-bit) and for adapters
    other than LoRA."""
    second = _folder(str(a if b is None else b))
    first = _base(str(a), second) if b is None else _folder(str(a))
    with ExitStack() as stack:
        one, other = _Weights(first, stack), _Weights(second, stack)
        names = one.files.keys() & other.files.keys()
        if not names:
            raise RunError(f"{first} and {second} have no weight in common: name two models of one architecture")
        kinds: dict[str, Change] = {}
        for name in sorted(names):
            kinds.setdefault(re.sub(r"\.\d+(?=\.)", "", name), Change()).add(_compared(name, one, other))
    total = Change()
    for change in kinds.values():
        total.add(change)
    ordered = dict(sorted(kinds.items(), key=lambda item: (-item[1].share, item[0])))
    return WeightChanges(str(first), str(second), total, ordered, tuple(sorted(one.files.keys() ^ other.files.keys())))


# --- which files ------------------------------------------------------------------------------------------------------


def _folder(name: str) -> Path:
    if name.startswith("embedded/"):
        return embedded(name)
    if os.path.isdir(name):
        weights = checkpoint.find(Path(name)).path
        assert weights
        return weights
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not a Hub name
        raise RunError(f"{name!r} is neither a folder nor a model in the local cache of the Hub: name a folder, or "
                       "load the model once, e.g. vlrl eval CONFIG --model NAME") from None


def _base(name: str, folder: Path) -> Path:
    adapter = (read_json(folder / _ADAPTER) or {}).get("base_model_name_or_path")
    if adapter:
        return _folder(str(adapter))
    for place in (Path(name), folder.parent.parent):
        with_settings = place / "config.yaml"
        if with_settings.is_file():
            try:
                settings = yaml.safe_load(with_settings.read_text(encoding="utf-8"))
                return _folder(str(settings["model"]["name"]))
            except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
                raise RunError(f"{with_settings} does not say which model the run started from ({error}): name "
                               f"this model too, with --weights BASE {name}") from None
    raise RunError(f"{name} is neither a run folder nor an adapter, so its base model is not known. Name both models "
                   f"with --weights BASE {name}")


class _Weights:
    """The weights of a model, which are read by name in blocks of rows. If the model is an adapter, the product of its
    factors is added to the weights of its base model."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        self.adapter = _Adapter(folder, stack) if (folder / _ADAPTER).is_file() else None
        where = _folder(self.adapter.base) if self.adapter else folder
        self.files = _tensors(where, stack)
        if self.adapter and (lacking := sorted(self.adapter.factors.keys() - self.files.keys())):
            raise RunError(f"the adapter {folder} changes {lacking[0]!r}, which its base model {where} does not have")

    def shape(self, name: str) -> tuple[int, ...]:
        file, own = self.files[name]
        return tuple(file.get_slice(own).get_shape())

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Rows `start` to `end` of a weight, in the stored dtype; in float32 if the adapter changes the weight. Raises
        ConfigError for quantized weights."""
        file, own = self.files[name]
        values = file.get_slice(own)[start:end] if self.shape(name) else file.get_tensor(own)[None]
        if not values.is_floating_point():
            raise ConfigError(f"{self.folder}: the weight {own!r} is stored as {values.dtype}: quantized models "
                              "cannot be compared. Name the model from before the quantization")
        if self.adapter and name in self.adapter.factors:
            return values.float() + self.adapter.rows(name, start, end)
        return values


class _Adapter:
    def __init__(self, folder: Path, stack: ExitStack):
        self.settings: dict[str, Any] = read_json(folder / _ADAPTER) or {}
        self.base = str(self.settings.get("base_model_name_or_path") or "")
        if not self.base:
            raise RunError(f"{folder / _ADAPTER} names no base model: set base_model_name_or_path in this file")
        self.factors: dict[str, dict[str, tuple[Any, str]]] = {}
        for name, place in _tensors(folder, stack).items():
            match = re.fullmatch(r"(.*)\.lora_([AB])\.weight", name)
            if not match or self.settings.get("peft_type", "LORA") != "LORA" or self.settings.get("fan_in_fan_out"):
                raise ConfigError(f"{folder}: {name!r} is not a factor of a plain LoRA adapter; merge the adapter "
                                  "into a complete model with `vlrl export`, and compare the complete model")
            self.factors.setdefault(f"{match[1]}.weight", {})[match[2]] = place

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Rows `start` to `end` of the product B A times the scale, in float32."""
        both = self.factors[name]
        (file_a, a), (file_b, b) = both["A"], both["B"]
        first, second = file_a.get_tensor(a).float(), file_b.get_slice(b)[start:end].float()
        return second @ first * self._scale(name.removesuffix(".weight"), len(first))

    def _scale(self, module: str, rank: int) -> float:
        alpha = next((value for pattern, value in (self.settings.get("alpha_pattern") or {}).items()
                      if re.fullmatch(rf"(.*\.)?({pattern})", module)), self.settings.get("lora_alpha", rank))
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)


def _tensors(folder: Path, stack: ExitStack) -> dict[str, tuple[Any, str]]:
    """Opens the weights files of a model folder on `stack`. Returns tensor name without the components in _PREFIXES ->
    (opened file, name of the tensor in this file)."""
    tensors: dict[str, tuple[Any, str]] = {}
    own: dict[str, tuple[Any, str]] = {}
    try:
        for file in sorted(f for f in folder.glob("*.safetensors") if f.name != trainer_state.TENSORS):
            opened = stack.enter_context(safe_open(file, "pt"))
            for name in opened.keys():  # noqa: SIM118  # no dictionary
                own[name] = tensors[".".join(p for p in name.split(".") if p not in _PREFIXES)] = opened, name
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read the weights of {folder}: {error}") from None
    if not tensors:
        raise RunError(f"{folder} holds no weights (*.safetensors)")
    return tensors if len(tensors) == len(own) else own


# --- comparing --------------------------------------------------------------------------------------------------------


def _compared(name: str, one: _Weights, other: _Weights) -> Change:
    shapes = one.shape(name), other.shape(name)
    if shapes[0] != shapes[1]:
        raise RunError(f"the weight {name!r} has shape {list(shapes[0])} in {one.folder} and {list(shapes[1])} in "
                       f"{other.folder}: these are not two versions of one model")
    change = Change(tensors=1)
    rows = shapes[0][0] if shapes[0] else 1
    size = max(1, _BLOCK // max(1, math.prod(shapes[0][1:])))
    for start in range(0, rows, size):
        end = min(start + size, rows)
        old, new = one.rows(name, start, end), other.rows(name, start, end)
        apart = new.double() - old.double()
        stored = (new.to(old.dtype).double() - old.double()).abs()
        equal = stored == 0
        change.add(Change(weights=old.numel(), changed=int((stored > TOLERANCE).sum()), equal=int(equal.sum()),
                          lost=int((equal & (apart != 0)).sum()), distance=float(apart.norm()),
                          norm=float(old.double().norm())))
    return change


def plain(changes: WeightChanges) -> dict[str, Any]:
    """The changes as the JSON value that `vlrl compare --weights --json` prints."""
    def counts(change: Change) -> dict[str, Any]:
        return {**change.__dict__, "share": change.share}

    return {"a": changes.a, "b": changes.b, "total": counts(changes.total), "unmatched": list(changes.unmatched),
            "kinds": {name: counts(change) for name, change in changes.kinds.items()}}
