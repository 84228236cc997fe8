"""The interface of a model that is sharded over ranks (train.sharding), and functions that tell whether a model is
sharded.

The implementations, FSDP2 and DeepSpeed's ZeRO, are in models/sharding. They are imported only if needed."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.distributed import comm

SHARDED = ("fsdp2", "zero2", "zero3")  # values of train.sharding for which the model is sharded
KINDS = Table({"fsdp2": "vlrl.models.sharding.fsdp:shard", "zero": "vlrl.models.sharding.zero:start"})
"""Functions that shard a policy. fsdp2: (policy, idle, settings) -> None, called before the engine is made. zero:
(policy, optimizer, config) -> new optimizer."""
_CHECKS = Table({
    "launched": "vlrl.models.sharding.launch:resolved_by_launcher",
    "installed": "vlrl.models.sharding.launch:check_installed",
})
_LAUNCHERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


class Shards(ABC):
    """The sharded models of a policy: the trained model and its reference. Each process holds a part of the weights.
    For a checkpoint, tensors are gathered one at a time into main memory on the main process; other processes get
    None. `gather`, `whole`, `state` and `weights` must be called on all processes."""

    gathered: bool  # whether this process holds the full model, for passes without gradient
    steps: bool = False
    """Whether a DeepSpeed engine (sharding.zero.Zero) runs passes, clips gradients and steps the optimizer."""

    @abstractmethod
    def gather(self) -> None:
        """Gives every process the full model with its current weights, for passes without gradient."""

    @abstractmethod
    def scatter(self) -> None:
        """Frees what `gather` gathered, so that each process holds only its shards. Not a collective call."""

    @abstractmethod
    def whole(self, weight: torch.Tensor) -> torch.Tensor | None:
        """A full weight for a checkpoint, gathered on the main process; None on other processes."""

    @abstractmethod
    def leaf(self, value: Any) -> Any:
        """One value of a state dictionary (such as the optimizer's), gathered if it is sharded."""

    @abstractmethod
    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads a full optimizer state. Each process keeps the part that belongs to its shards."""

    def state(self, tree: Any) -> Any:
        """A copy of nested dictionaries, lists and tuples, with each sharded tensor gathered."""
        if isinstance(tree, Mapping):
            return {key: self.state(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)([self.state(value) for value in tree])
        return self.leaf(tree)

    def weights(self, policy: Any) -> dict[str, torch.Tensor]:
        """The weights that `Policy.save` writes, by name: under LoRA only the adapter's."""
        self.scatter()
        named = dict(policy.trainable()) if policy.lora else policy.model.state_dict(keep_vars=True)
        by_id: dict[int, Any] = {}
        for tensor in named.values():
            if id(tensor) not in by_id:  # tied weights stay one
                by_id[id(tensor)] = self.whole(tensor)
        return {name: by_id[id(tensor)] for name, tensor in named.items()}


def engine_of(shards: Shards | None) -> Any:
    """The shards if they are a DeepSpeed engine that trains the model (sharding.zero.Zero); else None."""
    return shards if shards is not None and shards.steps else None


def is_sharded(config: Config, *kinds: str) -> bool:
    """Whether the model is sharded over several ranks, and train.sharding is one of `kinds` (default: any)."""
    return config.train.sharding in (kinds or SHARDED) and comm.world() > 1


def backend(config: Config, device: str) -> str | None:
    """The torch.distributed backend, if it must differ from the device's default; else None. Shards in main memory
    (train.cpu_offload) are summed and gathered there, which NCCL does not support. train.sharding must not be auto (see
    `resolve_sharding`)."""
    return "cuda:nccl,cpu:gloo" if device == "cuda" and config.train.cpu_offload else None


def resolve_sharding(config: Config, environ: MutableMapping[str, str] = os.environ) -> Config:
    """The config with train.sharding=auto resolved by the options of `accelerate launch`; see sharding.launch. Raises
    ConfigError if the launcher asks for something that is unsupported or contradicts the settings."""
    train = config.train
    if train.sharding in SHARDED or train.cpu_offload or any(environ.get(name) for name in _LAUNCHERS):
        return _CHECKS["launched"](config, environ)
    return config.model_copy(update={"train": train.model_copy(update={"sharding": "none"})})


def check_installed(config: Config) -> None:
    """Raises ConfigError if a package that train.sharding needs is missing or too old."""
    if config.train.sharding in SHARDED:
        _CHECKS["installed"](config)


def state(policy: Any, tree: Any) -> Any:
    """`tree` with all sharded tensors gathered (Shards.state); unchanged if the policy is not sharded."""
    return policy.shards.state(tree) if policy.shards else tree


def weights(policy: Any) -> dict[str, torch.Tensor] | None:
    """The weights of a sharded policy that `Policy.save` writes (Shards.weights); None if the policy is not sharded."""
    return policy.shards.weights(policy) if policy.shards else None


def load_optimizer(policy: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a full optimizer state into the optimizer of a policy, sharded or not."""
    if policy.shards:
        policy.shards.load(optimizer, state)
    else:
        optimizer.load_state_dict(state)
