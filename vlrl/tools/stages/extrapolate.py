"""Extrapolates weights along the direction of training: `vlrl extrapolate`.

    theta* = theta_B + k (theta_B - theta_A), A the earlier checkpoint and B the later one (arXiv 2601.04537)

k = 0 gives B, k = -1 gives A, values in between give averages. Works on full models and LoRA adapters, file by file and
tensor by tensor, so neither model is fully in memory. The two factors of an adapter are extrapolated separately.
Everything else (config, processor) is copied from B."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vlrl.errors import ConfigError, RunError
from vlrl.store import checkpoint
from vlrl.store.checkpoint import MANIFEST
from vlrl.store.trainer_state import STATE, TENSORS

ADAPTER = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class ExtrapolationResult:
    """The result of `extrapolate`: the folders of the three models, and the distance between the earlier and the later
    model."""

    earlier: Path
    later: Path
    folder: Path
    k: float
    tensors: int
    moved: int  # number of tensors that differ between the two checkpoints
    distance: float  # Euclidean distance between the two checkpoints, over all weights


def extrapolate(earlier: Path, later: Path, out: Path, k: float = 1.0) -> ExtrapolationResult:
    """Writes the weights theta_later + k (theta_later - theta_earlier) to `out`, with the later model's other files.

    `earlier` and `later` are checkpoints, model folders, or run folders (which stand for their newest checkpoint).
    Raises RunError if the models do not have the same weights, if one of them is damaged, or if `out` is not empty."""
    if not math.isfinite(k):
        raise ConfigError(f"k={k} is not a finite number")
    a, b = (folder for path in (earlier, later) if (folder := checkpoint.find(path).path))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not an empty folder, and nothing is overwritten: name another folder, or delete "
                       f"{out} first")
    _same_kind(a, b)
    theirs = _places(a)
    lacking = theirs.keys() ^ _places(b).keys()
    if lacking:
        raise RunError(f"{a} and {b} are different models: only one of them has the weight {min(lacking)!r}")
    temporary = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        counts = _write(theirs, b, temporary, k)
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}. Free space there, or name "
                       "another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    tensors, moved, square = counts
    return ExtrapolationResult(earlier=a, later=b, folder=out, k=k, tensors=tensors, moved=moved,
                               distance=math.sqrt(square))


def _same_kind(a: Path, b: Path) -> None:
    kinds = [(path / ADAPTER).is_file() for path in (a, b)]
    if kinds[0] != kinds[1]:
        raise RunError(f"{a} holds {'an adapter' if kinds[0] else 'a complete model'} and {b} "
                       f"{'an adapter' if kinds[1] else 'a complete model'}: both must be of the same kind. Merge "
                       "the adapter into a complete model first, with `vlrl export`")
    if not kinds[0]:
        return
    settings = [json.loads((path / ADAPTER).read_text(encoding="utf-8")) for path in (a, b)]
    for key in ("base_model_name_or_path", "r", "lora_alpha"):
        if settings[0].get(key) != settings[1].get(key):
            raise RunError(f"the adapters have different values of {key}: {settings[0].get(key)!r} in {a}, "
                           f"{settings[1].get(key)!r} in {b}. Only adapters with equal values can be extrapolated")


def _weights(path: Path) -> list[Path]:
    return sorted(f for f in path.glob("*.safetensors") if f.name != TENSORS)


def _places(path: Path) -> dict[str, Path]:
    out: dict[str, Path] = {}
    try:
        for file in _weights(path):
            with safe_open(file, "pt") as tensors:
                out |= dict.fromkeys(tensors.keys(), file)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read the weights of {path}: {error}") from error
    return out


def _write(theirs: Mapping[str, Path], b: Path, out: Path, k: float) -> tuple[int, int, float]:
    """Writes all files of the later model `b` to `out`, with extrapolated weights. `theirs` maps the name of each
    weight to the file of the earlier model that holds it.

    Returns the number of tensors, the number of tensors that differ between the two models, and the squared distance
    between the models."""
    count, moved, square = 0, 0, 0.0
    for file in sorted(b.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (MANIFEST, STATE):
            shutil.copyfile(file, out / file.name)
    for file in _weights(b):
        written = {}
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no dictionary
                new = tensors.get_tensor(name)
                with safe_open(theirs[name], "pt") as others:
                    old = others.get_tensor(name)
                if old.shape != new.shape:
                    raise RunError(f"the weight {name!r} has shape {list(old.shape)} in {theirs[name]} and "
                                   f"{list(new.shape)} in {file}")
                written[name], gap = _extrapolated(old, new, k)
                count, moved, square = count + 1, moved + (gap > 0), square + gap
        save_file(written, out / file.name, metadata={"format": "pt"})
    return count, moved, square


def _extrapolated(old: torch.Tensor, new: torch.Tensor, k: float) -> tuple[torch.Tensor, float]:
    """Returns two values: the tensor new + k (new - old), computed in float32 and cast to the dtype of `new`; and the
    squared distance between `old` and `new`. A tensor of integers is returned unchanged, with distance 0."""
    if not new.is_floating_point():
        return new, 0.0
    step = new.float() - old.float()
    return (new.float() + k * step).to(new.dtype).contiguous(), float(step.double().square().sum())
