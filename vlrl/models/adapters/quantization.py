"""Frozen 4-bit weights under a LoRA adapter (QLoRA, arXiv 2305.14314), with bitsandbytes.

The linear layers that have an adapter are stored as NF4, and are computed in the compute type. An adapter that was
trained on quantized weights fits only these weights. So the adapter's folder records the quantization
(`quantization.json`), and merging adds the adapter to the dequantized weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from vlrl.config.schema import LoraSettings
from vlrl.errors import ConfigError
from vlrl.models.adapters.layers import adapted_layers
from vlrl.models.families import family_in

FILE = "quantization.json"
"""File in an adapter's folder that records how the base model was quantized."""

_DTYPES = Literal["float32", "bfloat16", "float16"]


class Quantization(BaseModel):
    """The format in which the frozen linear layers of a model are stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    quantize: Literal["nf4"] = "nf4"
    target: str | tuple[str, ...]
    dtype: _DTYPES
    """Compute type of the quantized layers, and type of the weights before quantization."""

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

        path = cached_file(adapter, FILE, _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)
        if path is None:
            return None
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(f"model.name={adapter!r}: {path} cannot be used ({str(error).splitlines()[0]}). Copy it "
                              "again from the run that wrote the adapter.") from None

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def keywords(self, source: str, device: torch.device) -> dict[str, Any]:
        """Keyword arguments with which from_pretrained loads the model at `source` quantized on a device. Raises
        ConfigError if bitsandbytes is missing or does not support the device."""
        _check(device)
        from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig

        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            empty: Any = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
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
        raise ConfigError("model.lora.quantize=nf4: the package bitsandbytes is not installed; "
                          "pip install 'vlrl[qlora]', or set model.lora.quantize=none")
    import bitsandbytes.functional as bnb

    try:
        rounded, state = bnb.quantize_4bit(torch.zeros(64, 64, device=device), quant_type="nf4")
        bnb.dequantize_4bit(rounded, state)
    except Exception as error:  # whatever a backend raises that lacks a kernel
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model.lora.quantize=nf4: bitsandbytes cannot run on {device.type}: {first.rstrip('.')}. "
                          "Set model.lora.quantize=none.") from error
