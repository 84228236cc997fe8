"""FSDP2 as a setting (train.sharding): weights, gradients and optimizer state sharded over the processes.

Sharded, a pass is a call of all processes: each layer is gathered for it and dropped after. Processes generate
different numbers of tokens, so for that the whole model is gathered once (`Shards.gather`), and what a process then
computes concerns no other, until `Shards.scatter` at the next update. Checkpoints hold what a run without sharding
writes: tensors are gathered one at a time, and only the main process keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vlrl.config.schema import Config, TrainSettings
from vlrl.config.sections import WITHOUT_HEAD, active, head_of
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models.deepspeed_zero import Average, Shardable, ZeroOptimizer
from vlrl.types import Prompt

_STAGES = {"2": "zero2", "3": "zero3"}
"""Of DeepSpeed's ZeRO, as the launcher names them."""


class Shards:
    """The sharded models of a policy: its own first, then its reference, if that is another."""

    def __init__(self, roots: list[Any]):
        self.roots, self.gathered = roots, False

    def gather(self) -> None:
        """Gives every process the whole model, as the weights are now. A call of all processes.

        Passes then are of each process alone; only without gradient.
        """
        self.scatter()
        for module in _sharded_modules(self.roots[0]):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        self.gathered = True

    def scatter(self) -> None:
        """Leaves every process its shards alone; of what it gathered, nothing is left. Needs no other process."""
        for root in self.roots:
            # FSDP prefetches by the passes that it remembers, and processes may have had different numbers of them
            root.reset_iter_state()
            for module in _sharded_modules(root):  # the root holds the output layer, which is used after its forward
                module.set_reshard_after_forward(module is not root, recurse=False)
        self.gathered = False

    def whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """As `whole`."""
        return whole(tensor)


def wanted(config: Config, *kinds: str) -> bool:
    """Returns whether this process is one of several among which the model is to be sharded, in one of the ways
    `kinds`.
    """
    return config.train.sharding in (kinds or ("fsdp2", "zero2", "zero3")) and comm.world() > 1


def backend(config: Config, device: str) -> str | None:
    """Returns what carries collectives, where it is not the usual one of the device: shards that rest in main memory
    (settled settings, see `launched`) are summed and gathered there too, which NCCL does not do.
    """
    return "cuda:nccl,cpu:gloo" if device == "cuda" and config.train.cpu_offload else None


def shard(policy: Shardable, idle: Prompt, settings: TrainSettings | None = None) -> None:
    """Shards the policy and its reference in place: each decoder layer by itself, all the rest (vision tower,
    embeddings, output layer) with the root, over all processes. Make the optimizer after this.

    `idle` fills micro-batches where a process has fewer than another or none with media (packing.with_idle): a prompt
    of one small image where the data may have images, else of a few words. Gradients are summed over processes, as
    losses are shares of the whole step's.
    """
    settings = settings or TrainSettings()
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(f"train.sharding=fsdp2 needs torch 2.13, and this is {torch.__version__}: install that, or "
                          "set train.sharding=none")
    models = [m for m in (policy.model, policy._reference) if m is not None]
    policy.shards = Shards([_sharded(model, policy, settings) for model in models])
    policy.shards.scatter()
    if policy.moving_reference:
        policy.free_reference()  # its tensors have become shards
    policy.idle = idle


def _sharded(model: Any, policy: Shardable, settings: TrainSettings) -> Any:
    offload = CPUOffloadPolicy(pin_memory=policy.device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    dtype = policy.dtype if settings.gather == "compute" else None
    cut = partial(fully_shard, mesh=init_device_mesh(policy.device.type, (comm.world(),)), offload_policy=offload,
                  mp_policy=MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False))
    for layer in decoder_layers(model.get_base_model() if hasattr(model, "get_base_model") else model):
        cut(layer)
    root: Any = cut(model)
    for module in _sharded_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    root._get_fsdp_state()._lazy_init()  # else done by the first pass, which a process without prompts may not have
    return root


def decoder_layers(base: Any) -> list[torch.nn.Module]:
    """Returns the layers of a model's language part."""
    return list(base.get_decoder().layers)


def _sharded_modules(root: Any) -> Iterator[Any]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def whole(tree: Any) -> Any:
    """Returns `tree`, nested dictionaries, lists and tuples, with each sharded tensor whole and in main memory, on the
    main process; None elsewhere. A call of all processes. Without shards, and so with one process, it is as it was.
    """
    if isinstance(tree, DTensor):
        tensor = comm.whole(tree.detach())
        return tensor.cpu() if comm.is_main() else None
    if isinstance(tree, Average):
        return tree.whole()
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([whole(value) for value in tree])
    return tree


def weights(policy: Shardable) -> dict[str, torch.Tensor] | None:
    """Returns what `Policy.save` writes, under its names: of an adapter what learns, else everything. A call of all
    processes; None without shards, when the model is whole anyway.
    """
    if not policy.shards:
        return None
    policy.shards.scatter()
    named = dict(policy.trainable()) if policy.lora else policy.model.state_dict(keep_vars=True)
    by_id: dict[int, Any] = {}
    for tensor in named.values():
        if id(tensor) not in by_id:  # tied weights stay one
            by_id[id(tensor)] = policy.shards.whole(tensor)
    return {name: by_id[id(tensor)] for name, tensor in named.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Takes a whole state, as `whole` gave it, of which each process keeps what belongs to its shards."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def part(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        own = torch.zeros_like(parameter.detach())
        comm.fill(own, value)
        return own

    parts = {i: {name: part(value, parameters[i]) for name, value in of.items()} for i, of in state["state"].items()}
    optimizer.load_state_dict({**state, "state": parts})


# --- accelerate launch -----------------------------------------------------------------------------------------------


def launched(config: Config, environ: MutableMapping[str, str] = os.environ) -> Config:
    """Returns the config with train.sharding=auto settled: fsdp2 under `accelerate launch --use_fsdp --fsdp_version 2`,
    zero2 or zero3 under `--use_deepspeed --zero_stage 2` or 3, else none. Raises ConfigError where the launcher asks
    for what is not done, or for other than the settings say.

    What the launcher set is then taken back, as transformers would load no weights on other processes for it.
    """
    def on(name: str) -> bool:
        return environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")

    if on("ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError("accelerate launch --use_megatron_lm: vlrl has a loop of its own, which that engine would "
                          "replace. Launch without it and set train.sharding=fsdp2, which shards weights, gradients "
                          "and optimizer state (docs/scaling.md)")
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
    """Raises ConfigError for settings that do not go with train.sharding, which is not auto any more."""
    kind = config.train.sharding
    if kind != "none":
        _check_model(config, kind)
    if kind in _STAGES.values():
        _check_zero(config, kind)


def _check_fsdp(config: Config, version: str, on: Any) -> None:
    """Raises ConfigError where the launcher's FSDP is not that of the settings."""
    if version != "2":
        raise ConfigError(f"accelerate launch --use_fsdp --fsdp_version {version}: vlrl shards by FSDP2 alone. Launch "
                          "with --fsdp_version 2, or without --use_fsdp and with train.sharding=fsdp2")
    if config.train.sharding == "none":
        raise ConfigError("accelerate launch --use_fsdp, but train.sharding=none: leave out one of them")
    if on("FSDP_ACTIVATION_CHECKPOINTING") and not config.model.gradient_checkpointing:
        raise ConfigError("accelerate launch --fsdp_activation_checkpointing true, but "
                          "model.gradient_checkpointing=false: set that instead")


def _stage(config: Config, environ: Mapping[str, str]) -> str:
    """Returns what the launcher's DeepSpeed is as train.sharding. Raises ConfigError where it is not that of the
    settings.
    """
    own, stage = config.train.sharding, environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
    sharding, way_out = _STAGES.get(stage), "launch with --use_deepspeed --zero_stage 2 or 3 alone"
    if file := environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        raise ConfigError(f"accelerate launch --deepspeed_config_file {file}: such files are not read; {way_out}")
    if sharding is None:
        raise ConfigError(f"accelerate launch --use_deepspeed --zero_stage {stage or '?'}: vlrl knows the stages 2 and "
                          f"3; {way_out}")
    for part in ("OPTIMIZER", "PARAM"):
        if environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") != "none":
            raise ConfigError(f"accelerate launch --offload_{part.lower()}_device: under DeepSpeed nothing is kept in "
                              "main memory; launch without it, or set train.sharding=fsdp2 and train.cpu_offload=true")
    if own not in ("auto", sharding):
        raise ConfigError(f"accelerate launch --use_deepspeed --zero_stage {stage}, but train.sharding={own}: leave "
                          "out one of them")
    return sharding


def _check_zero(config: Config, kind: str) -> None:
    """Raises ConfigError for settings that do not go with DeepSpeed."""
    train, reference = config.train, config.algo.reference.name
    if head := head_of(config):
        raise ConfigError(f"train.sharding={kind} does not go with {head}: DeepSpeed's engine trains the model's own "
                          f"weights alone, and not a layer beside them. Set train.sharding=fsdp2, or leave {head} out "
                          f"({WITHOUT_HEAD[head]})")
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
            raise ConfigError(f"train.sharding={kind} does not go with {setting}: set {way_out}, or "
                              "train.sharding=fsdp2")


def _check_model(config: Config, kind: str) -> None:
    """Raises ConfigError for settings of the model that do not go with shards."""
    if config.model.lora.quantize != "none":
        raise ConfigError(f"train.sharding={kind}: 4-bit weights (model.lora.quantize={config.model.lora.quantize}) "
                          "cannot be sharded. Set model.lora.quantize=none, or train.sharding=none")
    if config.model.feature_cache_mib:
        raise ConfigError(f"train.sharding={kind}: model.feature_cache_mib={config.model.feature_cache_mib} calls the "
                          "vision tower apart from the model, when its weights are sharded. Set it to 0, or "
                          "train.sharding=none")
