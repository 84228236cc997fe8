"""A model sharded over the processes of a run (train.sharding): when it is, and what the trainer asks of its shards.

What shards it, FSDP2 or DeepSpeed's ZeRO, lies in models/sharding and is imported where settings or launcher ask.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import torch

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.distributed import comm

SHARDED = ("fsdp2", "zero2", "zero3")
"""Values of train.sharding."""
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


class Shards(Protocol):
    """The models of a policy, its own and its reference, of which each process holds a part."""

    gathered: bool
    """Whether this process holds the whole model, for passes without gradient."""
    steps: bool
    """Whether its engine calls the model, sums gradients, clips and steps: then it is a sharding.zero.Zero."""

    def gather(self) -> None:
        """Gives every process the whole model, as the weights are now. A call of all processes.

        Passes then are of each process alone; only without gradient.
        """
        ...

    def scatter(self) -> None:
        """Leaves every process its shards alone; of what it gathered, nothing is left. Needs no other process."""
        ...

    def state(self, tree: Any) -> Any:
        """Returns nested dictionaries, lists and tuples with each sharded tensor whole and in main memory, on the main
        process; None elsewhere. A call of all processes.
        """
        ...

    def weights(self, policy: Any) -> dict[str, torch.Tensor]:
        """Returns what `Policy.save` writes, under its names: of an adapter what learns, else everything; on the main
        process. A call of all processes.
        """
        ...

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes an optimizer's whole state, of which each process keeps what belongs to its shards."""
        ...


class Engine(Shards, Protocol):
    """Shards whose engine trains the model (`steps`)."""

    def run(self, work: Callable[[], Any]) -> Any:
        """Returns a pass of the model; a call of all processes, unless the model is gathered."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of all processes to those before."""
        ...

    def step(self) -> float:
        """Clips and steps, except where the gradient is not finite, and forgets the gradient; returns its norm."""
        ...


def engine_of(shards: Shards | None) -> Any:
    """Returns the shards whose engine trains the model (an Engine); None without such."""
    return shards if shards is not None and shards.steps else None


def is_sharded(config: Config, *kinds: str) -> bool:
    """Whether this process is one of several among which the model is to be sharded, in one of the ways `kinds`."""
    return config.train.sharding in (kinds or SHARDED) and comm.world() > 1


def backend(config: Config, device: str) -> str | None:
    """What carries collectives, where it is not the usual one of the device: shards that rest in main memory (settled
    settings, see `launched`) are summed and gathered there too, which NCCL does not do.
    """
    return "cuda:nccl,cpu:gloo" if device == "cuda" and config.train.cpu_offload else None


def settle_sharding(config: Config, environ: MutableMapping[str, str] = os.environ) -> Config:
    """Returns the config with train.sharding=auto settled by what `accelerate launch` asks for; see sharding.launch.

    Raises ConfigError where the launcher asks for what is not done, or for other than the settings say.
    """
    train = config.train
    if train.sharding in SHARDED or train.cpu_offload or any(environ.get(name) for name in _LAUNCHERS):
        return _CHECKS["launched"](config, environ)
    return config.model_copy(update={"train": train.model_copy(update={"sharding": "none"})})


def check_installed(config: Config) -> None:
    """Raises ConfigError when a package that train.sharding asks for is not installed, or too old."""
    if config.train.sharding in SHARDED:
        _CHECKS["installed"](config)


def state(policy: Any, tree: Any) -> Any:
    """As Shards.state; without shards, and so with one process, `tree` as it is."""
    return policy.shards.state(tree) if policy.shards else tree


def weights(policy: Any) -> dict[str, torch.Tensor] | None:
    """As Shards.weights; None without shards, when the model is whole anyway."""
    return policy.shards.weights(policy) if policy.shards else None


def load_optimizer(policy: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As Shards.load; also without shards."""
    if policy.shards:
        policy.shards.load(optimizer, state)
    else:
        optimizer.load_state_dict(state)
