"""A model sharded over the ranks of a run (train.sharding): when it is, and the interface of its shards.

The implementations, FSDP2 and DeepSpeed's ZeRO, are in models/sharding and imported where settings or launcher ask."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.distributed import comm

SHARDED = ("fsdp2", "zero2", "zero3")
"""Values of train.sharding that shard."""
KINDS = Table({
    "fsdp2": "vlrl.models.sharding.fsdp:shard",
    "zero": "vlrl.models.sharding.zero:start",
})
"""(policy, idle, settings) -> None, before the engine is made; (policy, optimizer, config) -> the optimizer."""
_CHECKS = Table({
    "launched": "vlrl.models.sharding.launch:launched",
    "installed": "vlrl.models.sharding.launch:check_installed",
})
_LAUNCHERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


class Shards(ABC):
    """The models of a policy, its own and its reference, of which each process holds a part.

    Checkpoints get tensors gathered one at a time, in main memory, on the main process; None elsewhere. `gather`,
    `whole`, `state` and `weights` are calls of all processes.
    """

    gathered: bool
    """Whether this process holds the whole model, for passes without gradient."""
    steps: bool = False
    """Whether an engine calls the model, sums gradients, clips and steps: then it is a sharding.zero.Zero."""

    @abstractmethod
    def gather(self) -> None:
        """Gives every process the whole model with its current weights, for passes without gradient of its own."""

    @abstractmethod
    def scatter(self) -> None:
        """Leaves every process its shards alone and frees what it gathered. Needs no other process."""

    @abstractmethod
    def whole(self, weight: torch.Tensor) -> torch.Tensor | None:
        """A weight gathered for a checkpoint."""

    @abstractmethod
    def leaf(self, value: Any) -> Any:
        """A value of the optimizer's or another state, gathered where it is sharded."""

    @abstractmethod
    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads an optimizer's whole state, of which each process keeps what belongs to its shards."""

    def state(self, tree: Any) -> Any:
        """Nested dictionaries, lists and tuples with each sharded tensor gathered."""
        if isinstance(tree, Mapping):
            return {key: self.state(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)([self.state(value) for value in tree])
        return self.leaf(tree)

    def weights(self, policy: Any) -> dict[str, torch.Tensor]:
        """What `Policy.save` writes, under its names: the adapter under LoRA, else everything."""
        self.scatter()
        named = dict(policy.trainable()) if policy.lora else policy.model.state_dict(keep_vars=True)
        by_id: dict[int, Any] = {}
        for tensor in named.values():
            if id(tensor) not in by_id:  # tied weights stay one
                by_id[id(tensor)] = self.whole(tensor)
        return {name: by_id[id(tensor)] for name, tensor in named.items()}


def engine_of(shards: Shards | None) -> Any:
    """The shards whose engine trains the model (a sharding.zero.Zero); None without one."""
    return shards if shards is not None and shards.steps else None


def is_sharded(config: Config, *kinds: str) -> bool:
    """Whether the model is sharded, in one of the ways `kinds`, over several ranks."""
    return config.train.sharding in (kinds or SHARDED) and comm.world() > 1


def backend(config: Config, device: str) -> str | None:
    """Backend of collectives, where it is not the device's default: shards in main memory (resolved settings, see
    `settle_sharding`) are summed and gathered there too, which NCCL does not support."""
    return "cuda:nccl,cpu:gloo" if device == "cuda" and config.train.cpu_offload else None


def settle_sharding(config: Config, environ: MutableMapping[str, str] = os.environ) -> Config:
    """The config with train.sharding=auto resolved by what `accelerate launch` asks for; see sharding.launch.

    Raises ConfigError where the launcher asks for something unsupported or contradicts the settings."""
    train = config.train
    if train.sharding in SHARDED or train.cpu_offload or any(environ.get(name) for name in _LAUNCHERS):
        return _CHECKS["launched"](config, environ)
    return config.model_copy(update={"train": train.model_copy(update={"sharding": "none"})})


def check_installed(config: Config) -> None:
    """Raises ConfigError when a package that train.sharding needs is missing or too old."""
    if config.train.sharding in SHARDED:
        _CHECKS["installed"](config)


def state(policy: Any, tree: Any) -> Any:
    """As Shards.state; without shards `tree` unchanged."""
    return policy.shards.state(tree) if policy.shards else tree


def weights(policy: Any) -> dict[str, torch.Tensor] | None:
    """As Shards.weights; None without shards."""
    return policy.shards.weights(policy) if policy.shards else None


def load_optimizer(policy: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's whole state, with or without shards."""
    if policy.shards:
        policy.shards.load(optimizer, state)
    else:
        optimizer.load_state_dict(state)
