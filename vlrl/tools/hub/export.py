"""`vlrl export`: writes a checkpoint as a model folder for from_pretrained, vLLM or the Hub.

    exported = export(Path("runs/quickstart"), Path("models/quickstart"), dtype="bfloat16")

An adapter is merged into its base model in float32. The processor, with the chat template and the pixel limits, is
copied from the checkpoint, so that prompts have the same tokens. Trainer state is not exported. The folder gets its
final name only after the exported model has been loaded again and compared with the checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from vlrl.config import validate
from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError, RunError
from vlrl.models import loading, packing
from vlrl.models.families import family_of, sync_tilings
from vlrl.models.heads import HEAD
from vlrl.models.processing import Encoder
from vlrl.models.saving import write_model
from vlrl.store import checkpoint
from vlrl.store.checkpoint import MANIFEST
from vlrl.store.trainer_state import STATE, TENSORS
from vlrl.task import Task
from vlrl.types import Media, Prompt, Sample

DTYPES = ("bfloat16", "float16", "float32")
SHARD = "5GB"  # largest size of one weights file
_ANSWER = "The circle is red."
_TOLERANCE = 1e-3  # largest accepted change of a log-probability in float32; merging changes the last bits


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A folder with an exported model, and a comparison of this model with the checkpoint: the log-probabilities of one
    completion of a prompt with an image."""

    source: Path
    folder: Path
    adapter: bool  # True if the folder holds an adapter that is not merged into its base model
    dtype: str
    parameters: int
    files: tuple[str, ...]
    bytes: int
    tokens: tuple[str, ...] = ()
    """Tokens of the completion used for the comparison; () for an adapter, whose files are copied unchecked."""
    before: tuple[float, ...] = ()
    """Log-probabilities of these tokens under the checkpoint (adapter not merged), in float32."""
    after: tuple[float, ...] = ()
    """Log-probabilities of these tokens under the exported model, as from_pretrained loads it."""
    carried: tuple[str, ...] = ()
    """Names of tensors that were copied from the base model's files because the model class does not load them; see
    copy_unread."""
    warnings: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        """Largest difference between the log-probabilities `before` and `after`."""
        return max((abs(a - b) for a, b in zip(self.before, self.after, strict=True)), default=0.0)


def export(source: Path, out: Path, dtype: str | None = None, adapter: bool = False) -> ExportedModel:
    """Exports a checkpoint, or the newest checkpoint of a run, to the folder `out`.

    dtype: data type of the exported weights. None stands for the data type of the base model if an adapter is merged,
    else for the common data type of the checkpoint's weights, or float32 if the weights have several. adapter: export
    an adapter without merging it.

    Raises RunError if `out` is not empty, the checkpoint is damaged, or the exported model differs from the checkpoint
    when it is loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not known. Known: {', '.join(DTYPES)}.")
    chosen = checkpoint.find(source)
    path = chosen.path
    assert path
    base = loading.adapter_base(str(path))
    if adapter and base is None:
        raise ConfigError(f"{path} is a complete model, not an adapter; export it without the option --adapter.")
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; name a folder to write to")
    if out.is_dir() and any(out.iterdir()):
        raise RunError(f"{out} is not empty, and files are not overwritten: name another folder, or delete {out} "
                       "first")
    transformers.logging.disable_progress_bar()
    temporary = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        with _writing(out):
            temporary.mkdir(parents=True)
            done = (_copy_adapter if adapter else _write_model)(path, temporary, dtype, base)
            if (path / HEAD).is_file():  # of a reward model
                shutil.copyfile(path / HEAD, temporary / HEAD)
            files = sorted(f for f in temporary.rglob("*") if f.is_file())
            size = sum(f.stat().st_size for f in files)
            if out.is_dir():
                out.rmdir()  # empty
            temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    names = tuple(str(f.relative_to(temporary)) for f in files)
    return ExportedModel(source=path, folder=out, adapter=adapter, files=names, bytes=size, warnings=chosen.warnings,
                         **done)


def merged(path: Path, folder: Path) -> Path:
    """Returns the folder of a complete model. This is `path` itself, unless `path` contains an adapter. An adapter is
    merged into its base model and exported to a folder below `folder`, which is returned."""
    if not (path / "adapter_config.json").is_file():
        return path
    out = folder / f"model-{path.name}"
    if not out.is_dir():
        export(path, out)
    return out


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}. Free space there, or name "
                       "another folder.") from error


# --- an adapter ----------------------------------------------------------------------------------------------


def _copy_adapter(path: Path, out: Path, dtype: str | None, base: str | None) -> dict[str, Any]:
    """Copies the files of an adapter checkpoint, except the trainer state, to `out`. The weights are converted to
    `dtype` if it is given. Returns the fields `dtype` and `parameters` of ExportedModel. `base` is not used."""
    for file in sorted(path.iterdir()):
        if file.is_file() and file.name not in (MANIFEST, STATE, TENSORS):
            shutil.copyfile(file, out / file.name)
    weights = out / "adapter_model.safetensors"
    tensors = load_file(weights)
    if dtype:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    return {"dtype": dtype or _widest(path), "parameters": sum(t.numel() for t in tensors.values())}


# --- a complete model -------------------------------------------------------------------------------------------------


def _write_model(path: Path, out: Path, dtype: str | None, base: str | None) -> dict[str, Any]:
    """Writes the complete model, its generation config and its processor to `out`. If `path` is an adapter, `base` is
    its base model, into which it is merged. Then loads the written model and compares it with the checkpoint.
    Returns fields of ExportedModel: the results of this comparison, `dtype`, `parameters` and `carried`."""
    dtype = dtype or (_declared(base) if base else _widest(path))
    model = loading.load_model(path, torch.float32, f"the checkpoint {path}", merge=False).eval()
    whole = model.get_base_model() if base else model
    processor = loading.load_processor(ModelSettings(name=str(path)), family_of(whole.config))
    sync_tilings(whole, processor)
    prompt, batch = _example(processor, whole, path)
    before = _logprobs(model, batch)
    if base:
        model = model.merge_and_unload()
    model.to(getattr(torch, dtype))
    write_model(model, processor, out, max_shard_size=SHARD)
    trained_on = base or (checkpoint.settings_of(path) or {}).get("model", {}).get("name")
    carried = copy_unread(trained_on, model, out) if trained_on else ()
    parameters, digest = sum(p.numel() for p in model.parameters()), _digest(model)
    del model, whole
    after = _load_again(out, dtype, digest, prompt, batch)
    if dtype == "float32" and (before - after).abs().max() > _TOLERANCE:
        raise RunError(f"the exported model gives other log-probabilities than {path}: {after.tolist()} instead of "
                       f"{before.tolist()}. Nothing was exported.")
    words = tuple(processor.tokenizer.convert_ids_to_tokens(batch.targets.tolist()))
    return {"dtype": dtype, "parameters": parameters, "tokens": words, "before": tuple(before.tolist()),
            "after": tuple(after.tolist()), "carried": carried}


def _load_again(out: Path, dtype: str, digest: str, prompt: Prompt, batch: packing.Batch) -> torch.Tensor:
    """Loads the exported model from `out` with transformers, and returns its log-probabilities of the completion in
    `batch`. Raises RunError if the saved processor's prompt tokens differ from `prompt`, or if the hash of the
    loaded weights differs from `digest`."""
    from transformers import AutoModelForImageTextToText

    loaded: Any = AutoModelForImageTextToText.from_pretrained(out, dtype=getattr(torch, dtype), use_safetensors=True)
    ids = _encode(loading.load_processor(ModelSettings(name=str(out)), family_of(loaded.config)), loaded, out).ids
    if ids.tolist() != prompt.ids.tolist():
        raise RunError(f"the saved processor tokenizes a prompt differently from the checkpoint's ({len(ids)} tokens "
                       f"instead of {len(prompt)}). Nothing was exported.")
    if _digest(loaded) != digest:
        raise RunError(f"the weights saved in {out} differ when they are read back. Nothing was exported; check the "
                       "disk.")
    return _logprobs(loaded.float().eval(), batch)


def _example(processor: Any, model: Any, path: Path) -> tuple[Prompt, packing.Batch]:
    """Returns (a prompt with a drawn image, a batch of this prompt with a short completion). The batch is padded,
    because a padded batch works with any attention implementation."""
    prompt = _encode(processor, model, path)
    tokenizer = processor.tokenizer
    answer = torch.tensor([*tokenizer(_ANSWER, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]).numpy()
    (batch,) = packing.pack(packing.pieces_of([prompt], [answer], 10**9), 10**9, "padded")
    return prompt, batch


def _encode(processor: Any, model: Any, path: Path) -> Prompt:
    image = Image.new("RGB", (160, 120), "white")
    ImageDraw.Draw(image).ellipse((40, 20, 100, 80), fill="red")
    family = family_of(model.config)
    config = validate({"task": "export", "model": {"name": str(path)}})
    encode = Encoder(processor, family, lambda ids, types, mm: family.positions(model, ids, types, mm), config)
    return encode(_Describe(), Sample(id="export", media=(Media(source=image),)))


class _Describe(Task):
    prompt = "What is in this picture?"


@torch.no_grad()
def _logprobs(model: Any, batch: packing.Batch) -> torch.Tensor:
    logits = model(**batch.inputs, logits_to_keep=batch.columns, use_cache=False).logits.flatten(0, 1)
    chosen = torch.log_softmax(logits.index_select(0, batch.select).float(), -1)
    return chosen.gather(1, batch.targets[:, None])[:, 0]


def _digest(model: Any) -> str:
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(name.encode())
        total.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def _declared(base: str) -> str:
    """The data type named in the config of the base model `base`; float32 if the config names none. Raises RunError if
    the config cannot be loaded."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(loading.resolve(base), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RunError(f"{base!r}, the adapter's base model, cannot be loaded: {str(error).splitlines()[0]} Restore "
                       "the base model, or export the adapter without merging it, with --adapter.") from error
    dtype = getattr(config, "dtype", None)
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def _widest(path: Path) -> str:
    """The data type of all weights in a folder. If the weights have several data types it is float32, because some of
    them are trained weights, which are stored in float32."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    dtypes = set()
    for file in path.glob("*.safetensors"):
        if file.name != TENSORS:
            with safe_open(file, "pt") as weights:
                kinds = (weights.get_slice(key).get_dtype() for key in weights.keys())  # noqa: SIM118  # no dictionary
                dtypes |= {names.get(kind, "float32") for kind in kinds}
    return "float32" if len(dtypes) != 1 else dtypes.pop()


_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def copy_unread(base: str, model: Any, out: Path) -> tuple[str, ...]:
    """Copies the tensors that the class of `model` ignores when it loads a model: from the files of the base model
    `base` to the model folder `out`.

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
    """The content of model.safetensors.index.json in the folder `out`. If there is only a single weights file without
    an index, renames it to model-00001-of-00001.safetensors and returns a new index for it."""
    if (out / _INDEX).is_file():
        return json.loads((out / _INDEX).read_text(encoding="utf-8"))
    first = "model-00001-of-00001.safetensors"
    (out / _SINGLE).rename(out / first)
    with safe_open(out / first, "pt") as weights:
        names = list(weights.keys())
    return {"metadata": {"total_size": (out / first).stat().st_size}, "weight_map": dict.fromkeys(names, first)}
