"""Models on this machine for the playground: lists them, checks that they fit in memory, and loads them. No Gradio.

torch is imported inside the functions that need it. Nothing is fetched from the network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vlrl.config.schema import Config
from vlrl.errors import VlrlError
from vlrl.models import model_config
from vlrl.store import checkpoint
from vlrl.store.files import read_json
from vlrl.store.lock import repeating

from . import AppError
from .library import Library

if TYPE_CHECKING:
    from vlrl.models.policy import Policy

GIB = 2**30
_BETWEEN = "/checkpoints/"


@dataclass(frozen=True)
class ModelChoice:
    """A model on this machine. `run` is the id of its run; None unless the model is a checkpoint below RUNS_DIR."""

    name: str
    """The model's folder."""
    label: str
    run: str | None = None
    step: int = 0
    """Number of completed training steps."""
    stamp: int = 0
    """Time of the latest change to the model's files, so that a changed model is loaded again."""


def listed(library: Library) -> list[tuple[str, str]]:
    """(label, value) of the models embedded in vlrl, then of the checkpoints of every run, latest checkpoint first."""
    shipped = sorted(p.parent.name for p in model_config.ASSETS.glob("*/config.json"))
    choices = [(f"{name}, as shipped", f"embedded/{name}") for name in shipped]
    for run in library.runs():
        with contextlib.suppress(VlrlError, OSError):
            names = sorted((p.name for p in _checkpoints(library, run.id).glob("step-*")), key=_step, reverse=True)
            choices += [(f"{run.id}, step {_step(n)}", f"{run.id}{_BETWEEN}{n}") for n in names if _step(n) >= 0]
    return choices


def run_of(library: Library, model: str) -> str | None:
    """The id of the run if `model` names a checkpoint of a run; None for any other model."""
    run, between, name = model.rpartition(_BETWEEN)
    return run if between and _step(name) >= 0 and any(r.id == run for r in library.runs()) else None


def choose(library: Library, model: str) -> ModelChoice:
    """Finds the model for a value returned by `listed`, a folder, or a hub name in the local cache. Raises AppError if
    the model is not on this machine."""
    run = run_of(library, model)
    if run is not None:
        path = _checkpoints(library, run) / model.rpartition(_BETWEEN)[2]
        if not path.is_dir():
            raise AppError(deleted_message(model))
        step = _step(path.name)
        return ModelChoice(str(_weights(path)), f"{run}, step {step}", run, step, _stamp(path))
    if model.startswith("embedded/"):
        return ModelChoice(str(model_config.embedded(model)), model)
    path = Path(model).expanduser()
    if model and _is_dir(path):
        path = _weights(path)
        step = checkpoint.step_of(path) if (path / checkpoint.MANIFEST).exists() else 0
        return ModelChoice(str(path), str(path), step=step, stamp=_stamp(path))
    if folder := _cached(model):
        return ModelChoice(str(folder), model, stamp=_stamp(folder))
    raise AppError(f"The model {model[:200]!r} is not on this machine: choose one from the list, or give a folder or "
                   "the hub name of a model that was downloaded before. The inspector downloads nothing.")


def deleted_message(model: str) -> str:
    """The error message for a checkpoint that its run has deleted."""
    return (f"The checkpoint {model!r} was deleted: a run keeps only its newest checkpoints (save.keep). "
            "Reload the page and choose another checkpoint.")


def _checkpoints(library: Library, run: str) -> Path:
    """The checkpoint folder of a run. Raises AppError if the folder is outside of RUNS_DIR because of a link."""
    path = library.folder(run).checkpoints
    if not path.resolve().is_relative_to(library.root):
        raise AppError(f"The checkpoints of run {run!r} are outside the folder of runs: copy the checkpoints into "
                       "the run folder.")
    return path


def _step(name: str) -> int:
    digits = name.removeprefix("step-")
    return int(digits) if digits != name and digits.isdecimal() and digits.isascii() and len(digits) < 16 else -1


def _weights(path: Path) -> Path:
    """The folder with the weights: `path` itself, or the newest checkpoint if `path` is a run. Raises AppError if there
    are no weights."""
    if (path / "checkpoints").is_dir():
        path = checkpoint.latest(path / "checkpoints").path or path
    wrong = checkpoint.problems(path, full=False) if (path / checkpoint.MANIFEST).exists() else []
    if wrong:
        raise AppError(f"The checkpoint {path} is damaged: {wrong[0]}. Choose another checkpoint.")
    if not any(path.glob("*.safetensors")):
        raise AppError(f"{path} is neither a model, nor a checkpoint, nor a run with a checkpoint: it has no "
                       "*.safetensors.")
    return path


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # the name is too long, or contains a zero byte
        return False


def _stamp(folder: Path) -> int:
    return max((file.stat().st_mtime_ns for file in folder.glob("*.json")), default=0)


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    for file in ("config.json", "adapter_config.json"):
        try:
            path = try_to_load_from_cache(name, file)
        except (ValueError, OSError):  # not a valid hub name
            return None
        if isinstance(path, str):
            return Path(path).parent
    return None


def check_memory(config: Config, loaded: bool) -> int:
    """Checks that the config's model fits in the free memory; returns the size of its weights in bytes. A model that is
    already `loaded` needs memory only for generation. Raises AppError if the memory does not suffice."""
    import psutil
    import torch

    from vlrl.engine.capacity import device_bytes
    from vlrl.models.loading import compute_dtype, skeleton
    from vlrl.tools.machine.memory import estimate
    needed = estimate(config, skeleton(config.model)[0].config)
    weights, cuda = needed.resident, torch.cuda.is_available()
    own = psutil.Process().memory_info().rss
    free = max(0, min(psutil.virtual_memory().available, int(device_bytes(torch.device("cpu"))) - own))
    read = 0 if loaded else weights * 4 // compute_dtype(config.model).itemsize  # weights are read as float32
    places = [("of main memory", read + (0 if cuda else needed.generation), free)]
    if cuda:
        there = torch.cuda.mem_get_info()[0]
        places.append(("of the GPU's memory", needed.generation + (0 if loaded else weights), there))
    for what, wants, has in places:
        if wants > has:
            raise AppError(f"The model needs about {wants / GIB:.1f} GiB {what}, but {has / GIB:.1f} GiB are free. "
                           "Choose a smaller model, ask for fewer answers or fewer new tokens, or close other "
                           "programs.")
    return weights


def load(config: Config, weights: int, tell: Callable[[float], None]) -> Policy:
    """Loads the policy of a config. During loading, calls `tell` with the loaded share in [0, 1]. The share is
    estimated from the growth of this process relative to `weights`, the size of the model in bytes."""
    import psutil
    import transformers

    from vlrl.models import policy
    from vlrl.training.build import make_accelerator
    transformers.logging.disable_progress_bar()
    process = psutil.Process()
    before = process.memory_info().rss
    with repeating(0.2, lambda: tell(min(0.95, max(0, process.memory_info().rss - before) / max(weights, 1)))):
        return policy.load(config, make_accelerator(config))


def disable_downloads(name: str) -> None:
    """Turns hub access off. Raises AppError if `name` is an adapter whose base model is not on this machine."""
    from huggingface_hub import constants
    constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets
    for _ in range(8):
        base = (read_json(Path(name, "adapter_config.json")) or {}).get("base_model_name_or_path")
        if not base:
            return
        name = str(base)
        if name.startswith("embedded/"):
            name = str(model_config.embedded(name))
        elif not _is_dir(Path(name)):
            folder = _cached(name)
            if folder is None:
                raise AppError(f"This adapter was trained on {name[:200]!r}, which is not on this machine. Download "
                               "that model first; the inspector downloads nothing.")
            name = str(folder)
    raise AppError("This adapter is based on a chain of more than eight adapters: merge them with `vlrl export`.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out: MemoryError, an error of the GPU, or the RuntimeError that torch
    raises on a CPU."""
    words = str(error).lower()
    named = any(phrase in words for phrase in ("can't allocate memory", "not enough memory", "out of memory"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and named)
