"""LoRA adapters (PEFT): adds a new adapter, loads a saved one, and merges one into its base model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError
from vlrl.models.adapters.layers import adapted_layers
from vlrl.models.adapters.quantization import Quantization, dequantized
from vlrl.models.families import Family
from vlrl.models.finite import check_finite
from vlrl.models.loading import adapter_base, load_model, loading_errors, resolve
from vlrl.store.aligned_memory import align_weights, aligned_copy


def refuse_second(settings: ModelSettings) -> None:
    """Raises ConfigError if model.name is itself an adapter, because model.lora.rank would add a second adapter to it.
    """
    with loading_errors(f"model.name={settings.name!r}"):
        base = adapter_base(settings.name)
    if base:
        raise ConfigError(
            f"model.lora.rank={settings.lora.rank}, but model.name={settings.name!r} is itself a LoRA adapter, and a "
            "second one cannot be saved on top of it. Continue the run that wrote it (its run.dir, resume=must), "
            f"start from its base model (model.name={base}), or merge first: the same command with model.lora.rank=0 "
            "steps=0 and another run.dir saves the whole model there.")


def add(model: Any, family: Family, settings: ModelSettings, checkpoint: Path | None) -> Any:
    """The model wrapped by PEFT, with a new adapter or the one saved in the folder `checkpoint`. The adapter's weights
    are float32."""
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
