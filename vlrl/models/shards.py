"""The interface of a model sharded over ranks (train.sharding), and whether a model is sharded.

The implementations, FSDP2 and DeepSpeed's ZeRO, are in models/sharding and imported if settings or launcher ask for
them."""

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
"""Values of train.sharding with which the model is sharded."""
KINDS = Table({
    "fsdp2": "vlrl.models.sharding.fsdp:shard",
    "zero": "vlrl.models.sharding.zero:start",
})
"""Functions that shard a policy. fsdp2: (policy, idle, settings) -> None, called before the engine is made. zero:
(policy, optimizer, config) -> the new optimizer."""
_CHECKS = Table({
    "launched": "vlrl.models.sharding.launch:launched",
    "installed": "vlrl.models.sharding.launch:check_installed",
})
_LAUNCHERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


class Shards(ABC):
    """The models of a policy (the trained model and its reference), of which each process holds a part.

    For a checkpoint, tensors are gathered one at a time into main memory on the main process; other processes get None.
    `gather`, `whole`, `state` and `weights` must be called on all processes."""

    gathered: bool
    """Whether this process holds the whole model, for passes without gradient."""
    steps: bool = False
    """Whether an engine calls the model, sums gradients, clips and runs the optimizer step; it is then a
    sharding.zero.Zero."""

    @abstractmethod
    def gather(self) -> None:
        """Gives every process the whole model with its current weights, so that it can run passes without gradient
        alone."""

    @abstractmethod
    def scatter(self) -> None:
        """Frees what `gather` gathered, so that each process holds only its shards. Needs no other process."""

    @abstractmethod
    def whole(self, weight: torch.Tensor) -> torch.Tensor | None:
        """One weight, gathered for a checkpoint."""

    @abstractmethod
    def leaf(self, value: Any) -> Any:
        """One value of a state (such as the optimizer's), gathered if it is sharded."""

    @abstractmethod
    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads a complete optimizer state; each process keeps the part that belongs to its shards."""

    def state(self, tree: Any) -> Any:
        """The nested dictionaries, lists and tuples of `tree`, with each sharded tensor gathered."""
        if isinstance(tree, Mapping):
            return {key: self.state(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)([self.state(value) for value in tree])
        return self.leaf(tree)

    def weights(self, policy: Any) -> dict[str, torch.Tensor]:
        """The weights that `Policy.save` writes, by name: those of the adapter under LoRA, else all."""
        self.scatter()
        named = dict(policy.trainable()) if policy.lora else policy.model.state_dict(keep_vars=True)
        by_id: dict[int, Any] = {}
        for tensor in named.values():
            if id(tensor) not in by_id:  # tied weights stay one
                by_id[id(tensor)] = self.whole(tensor)
        return {name: by_id[id(tensor)] for name, tensor in named.items()}


def engine_of(shards: Shards | None) -> Any:
    """The shards if they are an engine that trains the model (a sharding.zero.Zero); else None."""
    return shards if shards is not None and shards.steps else None


def is_sharded(config: Config, *kinds: str) -> bool:
    """Whether the model is sharded over several ranks, with train.sharding among `kinds`."""
    return config.train.sharding in (kinds or SHARDED) and comm.world() > 1


def backend(config: Config, device: str) -> str | None:
    """Backend of collectives if it must not be the device's default, else None.

    Shards in main memory (train.cpu_offload) are summed and gathered there too, which NCCL does not support. The
    settings must be resolved (see `settle_sharding`)."""
    return "cuda:nccl,cpu:gloo" if device == "cuda" and config.train.cpu_offload else None


def settle_sharding(config: Config, environ: MutableMapping[str, str] = os.environ) -> Config:
    """The config with train.sharding=auto resolved by what `accelerate launch` asks for; see sharding.launch.

    Raises ConfigError if the launcher asks for something unsupported or contradicts the settings."""
    train = config.train
    if train.sharding in SHARDED or train.cpu_offload or any(environ.get(name) for name in _LAUNCHERS):
        return _CHECKS["launched"](config, environ)
    return config.model_copy(update={"train": train.model_copy(update={"sharding": "none"})})


def check_installed(config: Config) -> None:
    """Raises ConfigError if a package that train.sharding needs is missing or too old."""
    if config.train.sharding in SHARDED:
        _CHECKS["installed"](config)


def state(policy: Any, tree: Any) -> Any:
    """The result of Shards.state if the policy is sharded, else `tree` unchanged."""
    return policy.shards.state(tree) if policy.shards else tree


def weights(policy: Any) -> dict[str, torch.Tensor] | None:
    """The result of Shards.weights if the policy is sharded, else None."""
    return policy.shards.weights(policy) if policy.shards else None


def load_optimizer(policy: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a complete optimizer state, with or without shards."""
    if policy.shards:
        policy.shards.load(optimizer, state)
    else:
        optimizer.load_state_dict(state)
