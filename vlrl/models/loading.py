"""Loads a transformers model and its processor as the settings ask. All errors are one-line ConfigErrors.

Loading includes adapters, a check for missing weights, and the choice of the trainable parameters."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from vlrl.config.registry import Table
from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError, VlrlError, did_you_mean
from vlrl.models.attention import ATTENTION
from vlrl.models.chat_template import ChatTemplate, time_limit
from vlrl.models.families import Family, family_in, family_of
from vlrl.models.model_config import embedded
from vlrl.models.pixel_limits import set_pixel_limits
from vlrl.models.saving import drop_unused_sampling
from vlrl.store.aligned_memory import align_weights
from vlrl.store.files import read_json

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables that transformers passes to every chat template."""
ADAPTERS = Table({
    "add": "vlrl.models.adapters:add",
    "load": "vlrl.models.adapters:load",
    "refuse_second": "vlrl.models.adapters:refuse_second",
    "check_target": "vlrl.models.adapters:check_target",
    "several_parts": "vlrl.models.adapters:several_parts",
    "quantization": "vlrl.models.adapters:Quantization",
})
"""Functions for LoRA adapters, imported when the settings (model.lora) or the loaded model need them."""
_TEMPLATE_S = 30.0  # time limit in seconds for a chat template to render a question, which usually takes milliseconds


class Quantized(Protocol):
    """Interface of adapters.Quantization: the format of frozen weights that are stored in 4 bits."""

    def keywords(self, source: str, device: torch.device) -> dict[str, Any]:
        """Keyword arguments with which from_pretrained loads the model at `source` quantized on a device."""
        ...

    def write(self, folder: Path) -> None:
        """Records the quantization in the folder of an adapter."""
        ...


def load_processor(settings: ModelSettings, family: Family) -> Any:
    """The Hugging Face processor of a model, with the pixel limits of the settings applied."""
    from transformers import AutoProcessor

    with loading_errors(f"model.name={settings.name!r}"):
        processor = AutoProcessor.from_pretrained(resolve(settings.name), trust_remote_code=False)
    check_processor(processor, settings.name, family)
    _check_template_options(processor, settings)
    set_pixel_limits(processor, family, settings)
    return processor


def check_processor(processor: Any, name: str, family: Family) -> None:
    """Raises ConfigError if the processor cannot turn a message with an image into a prompt."""
    lacks = [p for p in ("tokenizer", "image_processor") if getattr(processor, p, None) is None]
    if lacks:
        raise ConfigError(f"model.name={name!r}: its processor has no {' and no '.join(lacks)}. Save the processor of "
                          "the original model into the folder of the weights (AutoProcessor...save_pretrained).")
    with time_limit(_TEMPLATE_S):
        problem = ChatTemplate(processor, family.template).problem("user")
    if problem:
        raise ConfigError(f"model.name={name!r}: it has no usable chat template: {problem.rstrip('.')}. Copy "
                          "chat_template.jinja of the original instruction-tuned model into the model's folder.")


def _check_template_options(processor: Any, settings: ModelSettings) -> None:
    if not settings.chat_template_kwargs:
        return
    read = template_variables(processor) - _GIVEN
    for option in settings.chat_template_kwargs:
        if option not in read:
            raise ConfigError(f"model.chat_template_kwargs.{option}: the chat template of {settings.name} does not "
                              f"use this option.{did_you_mean(option, read)} Options of the template: "
                              f"{', '.join(sorted(read)) or 'none'}")


def template_variables(processor: Any) -> set[str]:
    """Names of all variables that a processor's chat template uses."""
    from jinja2 import Environment, meta

    template = processor.chat_template
    text = template if isinstance(template, str) else template["default"]
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text)  # tags that transformers adds to Jinja's
    syntax = Environment(extensions=["jinja2.ext.loopcontrols"])
    return meta.find_undeclared_variables(syntax.parse(plain))


def resolve(name: str) -> str:
    """The path or Hub name of a model. `embedded/...` becomes the path of a model that is shipped with the package."""
    if not name.startswith("embedded/"):
        check_hub(name)
        return name
    return str(embedded(name))


def adapter_base(name: str) -> str | None:
    """Name of the base model on which the adapter `name` was trained; None if `name` is not an adapter."""
    from transformers.utils import find_adapter_config_file

    path = find_adapter_config_file(resolve(name))
    if path is None:
        return None
    base = (read_json(Path(path)) or {}).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"model.name={name!r} is an adapter, but {path} names no base model. Set "
                          "base_model_name_or_path in this file.")
    return base


def load_model(source: str | Path, dtype: torch.dtype, what: str = "", quantized: Quantized | None = None,
               device: torch.device | None = None, merge: bool = True) -> Any:
    """Loads the complete model at `source` (folder or Hub name), with weights of type `dtype`. An adapter is merged
    into its base model, or with merge=False kept as a PEFT model. `what` names the source in error messages.
    `quantized`: format of 4-bit weights; None = no quantization. `device`: None = the CPU. Raises ConfigError if the
    model cannot be loaded."""
    name = str(source)
    what = what or f"model.name={name!r}"
    with loading_errors(what):
        base = adapter_base(name)
        if base is None:
            return _load_whole(name, dtype, what, quantized, device)
        return ADAPTERS["load"](name, base, dtype, f"{base!r}, the base model of the adapter {what},", device, merge)


def _load_whole(name: str, dtype: torch.dtype, what: str, quantized: Quantized | None,
                device: torch.device | None) -> Any:
    from transformers import AutoModelForImageTextToText

    more = quantized.keywords(resolve(name), device or torch.device("cpu")) if quantized else {}
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        resolve(name), dtype=dtype, attn_implementation=_attention(name), trust_remote_code=False,
        use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,  # refused below, by name
        **more)
    model, report = loaded
    tied = getattr(model, "all_tied_weights_keys", {})
    wrong = [f"{key} is missing" for key in sorted(report["missing_keys"]) if key not in tied]
    wrong += [f"{key} is {list(has)} instead of {list(wants)}" for key, has, wants in sorted(report["mismatched_keys"])]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"{what} lacks weights that its config requires: {', '.join(wrong[:3])}{more}. These "
                          "weights would be random, so give a folder with the complete model.")
    check_finite(model, what)
    drop_unused_sampling(model, name)
    forbid_repacking(model)
    if device is None or device.type == "cpu":
        align_weights(model)
    model.name_or_path = model.config.name_or_path = name  # adapters store this name as their base
    return model


def _attention(name: str) -> str | None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(resolve(name), trust_remote_code=False)
    return ATTENTION if family_of(config).shared else None


@contextlib.contextmanager
def loading_errors(what: str) -> Iterator[None]:
    """Context manager that turns any library error about a missing or broken model into a one-line ConfigError. `what`
    names the model in the message."""
    try:
        yield
    except VlrlError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {_first_line(error).rstrip('.')}. Give the folder of a "
                          "saved model or, if the hub can be reached, the name of a model there.") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    kind = "" if lines and isinstance(error, (OSError, ValueError)) else type(error).__name__
    return ": ".join(w for w in (kind, *lines[:1]) if w)


def compute_dtype(settings: ModelSettings) -> torch.dtype:
    """The compute type of the model: `model.dtype`, or the device's default if `model.dtype` is "auto"."""
    if settings.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, settings.dtype)


def forbid_repacking(model: Any) -> None:
    """Stops bitsandbytes from repacking weights for generation on CPUs with AVX512-BF16. The fused kernel for repacked
    weights has no backward pass, and the weights would stay repacked in training."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def choose_trained(model: Any, family: Family, settings: ModelSettings, dtype: torch.dtype) -> None:
    """Marks as trainable the parameters that model.train selects, and converts all others to `dtype`. If
    model.lora.rank is set, no parameter is marked, because only the adapter is trained then. Trainable parameters
    stay float32, because small updates would vanish in bfloat16."""
    parts = () if settings.lora.rank else settings.train
    if not settings.lora.rank:
        _refuse_absent_parts(model, family, settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(family.part_of(name) in parts)
        if not parameter.requires_grad and parameter.is_floating_point():  # 4-bit weights are packed bytes
            parameter.data = parameter.data.to(dtype)


def _refuse_absent_parts(model: Any, family: Family, settings: ModelSettings) -> None:
    has = {family.part_of(name) for name, _ in model.named_parameters()}
    absent = [part for part in settings.train if part not in has]
    if absent:
        raise ConfigError(f"model.train=[{', '.join(settings.train)}]: this model ({family.model_type}) has no "
                          f"{' and no '.join(absent)}. Choose among its parts ({', '.join(sorted(has - {'audio'}))}), "
                          "or set model.lora.rank to train an adapter")


# --- NaN and infinity -------------------------------------------------------------------------------------------------


def not_finite(model: Any) -> str:
    """A description of the model's tensors that contain NaN or infinity; "" if there are none."""
    bad = [(name, tensor) for name, tensor in model.named_parameters() if not _is_finite(tensor)]
    if not bad:
        return ""
    name, tensor = bad[0]
    count = int((~tensor.detach().isfinite()).sum())
    more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
    return f"{name} holds NaN or inf in {count:,} of its {tensor.numel():,} values{more}"


def check_finite(model: Any, what: str) -> None:
    """Raises ConfigError if a tensor of the model contains NaN or infinity. `what` names the model in the message."""
    if bad := not_finite(model):
        raise ConfigError(f"{what} cannot be used: {bad}. Copy the weights again, or use an earlier checkpoint.")


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return True
    return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor.detach()))


# --- the hub ----------------------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)
_PATIENCE_S = 10


def check_hub(name: str) -> None:
    """Switches huggingface_hub to offline mode and its local cache if the hub does not answer. Called before the model
    `name` is loaded. Without this check huggingface_hub tries to download each file of a model six times, with
    pauses that add up to minutes. Does nothing if `name` is a folder."""
    if not os.path.isdir(name):
        _check_hub()


@cache
def _check_hub() -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # of requests or httpx, by version
        _log.warning("the model hub %s cannot be reached (%s): only models in the local cache can be loaded",
                    constants.ENDPOINT, " ".join(str(error).split()) or type(error).__name__)
        constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets


# --- without weights --------------------------------------------------------------------------------------------------


def skeleton(settings: ModelSettings, config: Any = None) -> tuple[Any, Family]:
    """Builds the model of the settings on the meta device, without weights. Returns the model and its Family. `config`
    is the model's transformers config; None = the config of model.name. Trainable parameters are marked as in
    `policy.load`. Raises ConfigError if the model is not found."""
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
