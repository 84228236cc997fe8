"""Determines train.sharding from the settings and `accelerate launch`, and refuses settings that conflict with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, MutableMapping
from typing import Any

from vlrl.config.schema import Config
from vlrl.config.sections import WITHOUT_HEAD, active, head_of
from vlrl.errors import ConfigError

_STAGES = {"2": "zero2", "3": "zero3"}  # value of train.sharding for each ZeRO stage of `accelerate launch`
_LEAST = "0.19.8"
"""First version of DeepSpeed in which the training loop can choose the number of micro-batches of a step."""


def resolved_by_launcher(config: Config, environ: MutableMapping[str, str]) -> Config:
    """The config with train.sharding=auto resolved by the options of `accelerate launch`.

    `--use_fsdp --fsdp_version 2` gives fsdp2, and `--use_deepspeed --zero_stage 2` or `3` gives zero2 or zero3. Without
    such options the result is train.sharding=none. Raises ConfigError if the launcher asks for something that is
    unsupported or contradicts the settings. The launcher's variables in `environ` are then set to false, because
    otherwise transformers would load weights only on rank 0."""
    def on(name: str) -> bool:
        return environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")

    if on("ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError("accelerate launch --use_megatron_lm: vlrl uses its own training loop, which Megatron-LM "
                          "would replace. Launch without --use_megatron_lm, and set train.sharding=fsdp2, which "
                          "shards weights, gradients and optimizer state (docs/scaling.md)")
    train, launched_as, offload = config.train, "none", config.train.cpu_offload
    if on("ACCELERATE_USE_FSDP"):
        _check_fsdp(config, environ.get("FSDP_VERSION", "1"), on)
        environ["ACCELERATE_USE_FSDP"] = "false"
        launched_as, offload = "fsdp2", offload or on("FSDP_OFFLOAD_PARAMS")
    elif on("ACCELERATE_USE_DEEPSPEED"):
        launched_as = _stage(config, environ)
        environ["ACCELERATE_USE_DEEPSPEED"] = "false"
    kind = train.sharding if train.sharding != "auto" else launched_as
    if offload and kind == "none":
        raise ConfigError("train.cpu_offload=true keeps shards in main memory, but nothing is sharded: set "
                          "train.sharding=fsdp2, or train.cpu_offload=false")
    settled = config.model_copy(update={"train": train.model_copy(update={"sharding": kind, "cpu_offload": offload})})
    check(settled)
    return settled


def check(config: Config) -> None:
    """Raises ConfigError for settings that do not work with train.sharding, which must not be auto."""
    kind = config.train.sharding
    if kind != "none":
        _check_model(config, kind)
    if kind in _STAGES.values():
        _check_zero(config, kind)


def _check_fsdp(config: Config, version: str, on: Any) -> None:
    if version != "2":
        raise ConfigError(f"accelerate launch --use_fsdp --fsdp_version {version}: vlrl only supports FSDP2. Launch "
                          "with --fsdp_version 2, or without --use_fsdp and with train.sharding=fsdp2")
    if config.train.sharding == "none":
        raise ConfigError("accelerate launch --use_fsdp, but train.sharding=none: remove --use_fsdp, "
                          "or set train.sharding=fsdp2")
    if on("FSDP_ACTIVATION_CHECKPOINTING") and config.model.gradient_checkpointing is False:
        raise ConfigError("accelerate launch --fsdp_activation_checkpointing true, but "
                          "model.gradient_checkpointing=false: remove the flag, and set "
                          "model.gradient_checkpointing=true if you want checkpointing")


def _stage(config: Config, environ: Mapping[str, str]) -> str:
    own, stage = config.train.sharding, environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
    sharding, way_out = _STAGES.get(stage), "launch only with --use_deepspeed --zero_stage 2 or 3"
    if file := environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        raise ConfigError(f"accelerate launch --deepspeed_config_file {file}: vlrl does not read such files; {way_out}")
    if sharding is None:
        raise ConfigError(f"accelerate launch --use_deepspeed --zero_stage {stage or '?'}: vlrl supports stages 2 and "
                          f"3; {way_out}")
    for part in ("OPTIMIZER", "PARAM"):
        if environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") != "none":
            raise ConfigError(f"accelerate launch --offload_{part.lower()}_device: vlrl does not offload with "
                              "DeepSpeed; launch without this option, or set train.sharding=fsdp2 and "
                              "train.cpu_offload=true")
    if own not in ("auto", sharding):
        raise ConfigError(f"accelerate launch --use_deepspeed --zero_stage {stage}, but train.sharding={own}: "
                          f"remove the options of accelerate launch, or set train.sharding={sharding}")
    return sharding


def _check_zero(config: Config, kind: str) -> None:
    train, reference = config.train, config.algo.reference.name
    if head := head_of(config):
        raise ConfigError(f"train.sharding={kind} cannot be combined with {head}: DeepSpeed's engine trains only the "
                          f"model's own weights, not an additional head. Set train.sharding=fsdp2, or choose "
                          f"{WITHOUT_HEAD[head]}")
    for wrong, setting, way_out in (
            (train.cpu_offload, "train.cpu_offload=true", "train.cpu_offload=false"),
            (train.gather == "compute", "train.gather=compute", "train.gather=stored"),
            (config.model.dtype == "float16", "model.dtype=float16", "model.dtype=bfloat16"),
            *((True, *refused) for _, settings in active(config) if (refused := settings.without_zero)),
            (reference not in ("auto", "frozen"), f"algo.reference={reference}", "algo.reference=frozen"),
            (config.asynchronous.max_staleness > 0, f"async.max_staleness={config.asynchronous.max_staleness}",
             "async.max_staleness=0"),
            (kind == "zero3" and config.engine.name != "hf", f"engine.name={config.engine.name}", "engine.name=hf")):
        if wrong:
            raise ConfigError(f"train.sharding={kind} cannot be combined with {setting}: set {way_out}, or "
                              "train.sharding=fsdp2")


def _check_model(config: Config, kind: str) -> None:
    if config.model.lora.quantize != "none":
        raise ConfigError(f"train.sharding={kind}: 4-bit weights (model.lora.quantize={config.model.lora.quantize}) "
                          "cannot be sharded. Set model.lora.quantize=none, or train.sharding=none")
    if config.model.feature_cache_mib:
        raise ConfigError(f"train.sharding={kind}: with model.feature_cache_mib={config.model.feature_cache_mib} the "
                          "vision tower is called outside of the model's forward, so its sharded weights are not "
                          "gathered. Set model.feature_cache_mib=0 or train.sharding=none")


def check_installed(config: Config) -> None:
    """Raises ConfigError if train.sharding needs DeepSpeed, and DeepSpeed is missing or too old."""
    name = config.train.sharding
    if not name.startswith("zero"):
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"train.sharding={name}: DeepSpeed is not installed. Run: pip install 'vlrl[deepspeed]', or "
                          "set train.sharding=fsdp2")
    from packaging.version import Version  # DeepSpeed needs it too

    version = importlib.metadata.version("deepspeed")
    if Version(version) < Version(_LEAST):
        raise ConfigError(f"train.sharding={name} needs DeepSpeed {_LEAST}, but {version} is installed: upgrade "
                          "DeepSpeed, or set train.sharding=fsdp2")
