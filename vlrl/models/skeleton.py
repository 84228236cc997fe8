"""Builds a model without weights, for counting parameters and computing positions."""

from __future__ import annotations

from typing import Any

import torch

from vlrl.config.schema import ModelSettings
from vlrl.models.families import Family, family_in, family_of
from vlrl.models.loading import ADAPTERS, adapter_base, choose_trained, loading_errors, resolve


def skeleton(settings: ModelSettings, config: Any = None) -> tuple[Any, Family]:
    """Builds the model of the settings on the meta device, without weights. Returns the model and its Family. `config`
    is the model's transformers config; None = that of model.name. Trainable parameters are marked as in `policy.load`.
    Raises ConfigError if the model is not found."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    name = settings.name
    if settings.lora.rank and config is None:
        ADAPTERS["refuse_second"](settings)
    with loading_errors(f"model.name={name!r}"):
        while config is None and (base := adapter_base(name)):
            name = base
        config = config or AutoConfig.from_pretrained(resolve(name), trust_remote_code=False)
        family_of(config)  # raises for unsupported models
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
            family = family_in(model)
            choose_trained(model, family, settings, torch.float32)
            return (ADAPTERS["add"](model, family, settings, None) if settings.lora.rank else model), family
