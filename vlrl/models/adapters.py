"""LoRA adapters (PEFT): adds a new adapter, loads a saved one, merges one into its base model, and stores the frozen
weights under an adapter in 4 bits (QLoRA, arXiv 2305.14314).

With QLoRA, the linear layers that have an adapter are stored as NF4 by bitsandbytes, and are computed in the compute
type. An adapter that was trained on quantized weights fits only these weights. So the adapter's folder records the
quantization (`quantization.json`), and merging adds the adapter to the dequantized weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from vlrl.config.schema import LoraSettings, ModelSettings
from vlrl.errors import ConfigError, did_you_mean
from vlrl.models.families import Family, Part, family_in
from vlrl.models.loading import adapter_base, check_finite, load_model, loading_errors, resolve
from vlrl.models.names import second_adapter
from vlrl.store.aligned_memory import align_weights, aligned_copy


def refuse_second(settings: ModelSettings) -> None:
    """Raises ConfigError if model.name is itself an adapter, because model.lora.rank would add a second adapter."""
    with loading_errors(f"model.name={settings.name!r}"):
        base = adapter_base(settings.name)
    if base:
        raise ConfigError(second_adapter(settings, base))


def add(model: Any, family: Family, settings: ModelSettings, checkpoint: Path | None) -> Any:
    """The model wrapped by PEFT, with a new adapter or with the adapter saved in the folder `checkpoint`. The adapter's
    weights are float32."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if checkpoint:
        peft = PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
        check_finite(peft, f"the adapter in {checkpoint}")
    else:
        lora = settings.lora
        targets = adapted_layers(model, family, lora.target)
        with warnings.catch_warnings():  # PEFT adds patterns for experts
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            peft = get_peft_model(model, LoraConfig(
                r=lora.rank, lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT only divides it by r
                lora_dropout=lora.dropout, target_modules=targets, bias="none"))
    for config in peft.peft_config.values():
        assert isinstance(config, LoraConfig)
        if isinstance(config.target_modules, set):  # else the order differs between processes
            config.target_modules = sorted(config.target_modules)
    for _, parameter in peft.named_parameters():
        if parameter.requires_grad:
            parameter.data = aligned_copy(parameter.data.float())
    return peft


def load(name: str, base: str, dtype: torch.dtype, what: str, device: torch.device | None, merge: bool) -> Any:
    """Loads the adapter `name` onto its base model `base`. Returns the merged model, or the PEFT model if `merge` is
    false. `what` names the base model in error messages. For `dtype` and `device` see loading.load_model."""
    from peft import PeftModel
    from transformers.utils import cached_file

    rounded = Quantization.read(resolve(name))
    if rounded:  # it was trained on the rounded weights
        model = dequantized(load_model(base, rounded.compute_dtype, what, rounded, device), dtype)
    else:
        model = load_model(base, dtype, what, device=device)
    cached_file(resolve(name), "adapter_model.safetensors")  # raises if missing: PEFT would load a pickle
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, resolve(name))
    check_finite(adapted, what)
    return adapted.merge_and_unload() if merge else align_weights(adapted)


# --- 4-bit weights (QLoRA) --------------------------------------------------------------------------------------------


QUANTIZATION_FILE = "quantization.json"  # file in an adapter's folder that records how the base model was quantized

_DTYPES = Literal["float32", "bfloat16", "float16"]


class Quantization(BaseModel):
    """The 4-bit format of frozen linear layers, and which layers of a model have this format (`target`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    quantize: Literal["nf4"] = "nf4"
    target: str | tuple[str, ...]
    dtype: _DTYPES  # compute type of the quantized layers, and type of the weights before quantization

    @classmethod
    def of(cls, settings: LoraSettings, dtype: torch.dtype) -> Quantization:
        """The quantization that model.lora.quantize and model.lora.target ask for."""
        name = next(n for n in get_args(_DTYPES) if getattr(torch, n) == dtype)
        return cls(target=settings.target, dtype=name)

    @classmethod
    def read(cls, adapter: str) -> Quantization | None:
        """The quantization that a saved adapter (folder or Hub name) records; None if its base model was not quantized.
        Raises ConfigError if the record cannot be read."""
        from transformers.utils.hub import cached_file

        path = cached_file(adapter, QUANTIZATION_FILE, _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)
        if path is None:
            return None
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"model.name={adapter!r}: {path} cannot be used ({str(error).splitlines()[0]}). Copy it "
                              "again from the run that wrote the adapter.") from None

    def write(self, folder: Path) -> None:
        (folder / QUANTIZATION_FILE).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def keywords(self, source: str, device: torch.device) -> dict[str, Any]:
        """Keyword arguments with which from_pretrained loads the model at `source` quantized on a device. Raises
        ConfigError if bitsandbytes is missing or does not support the device."""
        _check(device)
        from transformers import BitsAndBytesConfig

        empty = _empty(source)
        rounded = set(adapted_layers(empty, family_in(empty), self.target))
        skipped = [n for n, m in empty.named_modules() if isinstance(m, torch.nn.Linear) and n not in rounded]
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=self.quantize, bnb_4bit_use_double_quant=True,
                                 bnb_4bit_compute_dtype=self.compute_dtype, llm_int8_skip_modules=skipped)
        return {"quantization_config": how, "device_map": {"": str(device)}}


def dequantized(model: Any, dtype: torch.dtype) -> Any:
    """The model with each quantized layer replaced by an ordinary linear layer of type `dtype`."""
    model = model.dequantize(dtype).to(dtype)
    model.is_loaded_in_4bit = False
    return model


def _check(device: torch.device) -> None:
    if find_spec("bitsandbytes") is None:
        raise ConfigError("model.lora.quantize=nf4: the package bitsandbytes is not installed. Run: "
                          "pip install 'vlrl[qlora]', or set model.lora.quantize=none")
    import bitsandbytes.functional as bnb

    try:
        rounded, state = bnb.quantize_4bit(torch.zeros(64, 64, device=device), quant_type="nf4")
        bnb.dequantize_4bit(rounded, state)
    except Exception as error:  # whatever a backend raises that lacks a kernel
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model.lora.quantize=nf4: bitsandbytes cannot run on {device.type}: {first.rstrip('.')}. "
                          "Set model.lora.quantize=none.") from error


# --- adapted layers ---------------------------------------------------------------------------------------------------


_PARTS: dict[str, tuple[Part, ...]] = {"language": ("language",), "all_linear": ("language", "merger"),
                                       "vision_language": ("language", "merger", "vision")}


def check_target(settings: ModelSettings) -> None:
    """Raises ConfigError, before any weights are read, if the model has no layer that model.lora.target names."""
    if _words(settings.lora.target):
        with loading_errors(f"model.name={settings.name!r}"):
            empty = _empty(resolve(settings.name))
        adapted_layers(empty, family_in(empty), settings.lora.target)


def _empty(source: str) -> Any:
    """The model in the folder `source`, or of this Hub name, on the meta device: without weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, trust_remote_code=False)


def several_parts(names: Sequence[str], family: Family, target: str | Sequence[str]) -> str:
    """A notice about names in model.lora.target that stand for layers of several parts of the model, such as a
    q_proj in the language model and in the vision tower; "" if there are none. `names`: trainable parameters of the
    adapter."""
    shared: dict[str, dict[str, str]] = {}
    for word in _words(target):
        parts = {family.part_of(name): name for name in names if f".{word}." in name}
        if len(parts) > 1:
            shared[word] = parts
    if not shared:
        return ""
    said = "; ".join(f"{word} names layers of {' and '.join(sorted(parts))}" for word, parts in shared.items())
    word, parts = next(iter(shared.items()))
    inside = re.search(r"(\w+)\.layers\.", parts.get("language", ""))
    alone = f"'.*{inside[1]}.*{word}'" if inside else "'.*language_model.*'"
    return (f"model.lora.target: {said}, and all of them have an adapter. For the language model alone, write a "
            f"regular expression of full names: {alone}")


def adapted_layers(model: Any, family: Family, target: str | Sequence[str]) -> list[str]:
    """Names of the linear layers that model.lora.target selects, never lm_head. `target` names parts of the model, or
    lists module names (or their endings) and regular expressions. Raises ConfigError if an entry selects no layer."""
    layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    if isinstance(target, str) and target in _PARTS:
        chosen = {n for n in layers if family.part_of(n) in _PARTS[target]}
    else:
        chosen = set().union(*(_named(layers, word) for word in _words(target)))
    if not chosen:
        raise ConfigError(f"model.lora.target={target}: this model ({family.model_type}) has no linear layer in "
                          "these parts. Choose other parts, or name modules")
    return [n for n in layers if n in chosen]


def _words(target: str | Sequence[str]) -> Sequence[str]:
    """The names and regular expressions in model.lora.target; none if it is the name of parts of the model."""
    return [target] * (target not in _PARTS) if isinstance(target, str) else target


def _named(layers: Sequence[str], word: str) -> set[str]:
    found = {n for n in layers if f".{n}".endswith(f".{word}") and word}
    try:
        found = found or {n for n in layers if re.fullmatch(word, n)}
    except re.error as error:
        raise ConfigError(f"model.lora.target={word!r} is neither a module name nor a valid regular expression: "
                          f"{error}") from None
    if not found:
        ends = sorted({n.rpartition(".")[2] for n in layers if not n.rpartition(".")[2].isdigit()})
        raise ConfigError(f"model.lora.target={word!r}: no linear layer of the model has that name."
                          f"{did_you_mean(word, [*_PARTS, *ends])} Known parts: {', '.join(_PARTS)}. Layers: "
                          f"{', '.join(ends)} (lm_head takes no adapter)")
    return found
