"""FSDP2 (train.sharding=fsdp2): weights, gradients and optimizer state are sharded over the ranks.

A pass of a sharded model involves all ranks: each layer is gathered before its computation and freed afterwards. In
generation, however, ranks produce different numbers of tokens. So the full model is gathered once before generation
(`Shards.gather`), and each rank then works alone until `Shards.scatter` at the next update. Checkpoints are the same as
without sharding: tensors are gathered one at a time, and only the main process keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vlrl.config.schema import TrainSettings
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models.policy import Policy
from vlrl.models.shards import Shards
from vlrl.types import Prompt


class FSDPShards(Shards):
    """The FSDP2 models of a policy: the trained model, and its frozen reference if there is one."""

    def __init__(self, roots: list[Any]):
        self.roots, self.gathered = roots, False

    def gather(self) -> None:
        self.scatter()
        for module in _sharded_modules(self.roots[0]):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        self.gathered = True

    def scatter(self) -> None:
        for root in self.roots:
            # FSDP prefetches in the order of earlier passes, and ranks may have had different numbers of passes
            root.reset_iter_state()
            for module in _sharded_modules(root):  # the root holds the output layer, which is used after its forward
                module.set_reshard_after_forward(module is not root, recurse=False)
        self.gathered = False

    def whole(self, weight: torch.Tensor) -> torch.Tensor | None:
        return self.leaf(weight)

    def leaf(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        tensor = comm.full_tensor(value.detach())
        return tensor.cpu() if comm.is_main() else None

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts = {i: {name: _own_shard(value, parameters[i]) for name, value in of.items()}
                 for i, of in state["state"].items()}
        optimizer.load_state_dict({**state, "state": parts})


def _own_shard(value: Any, parameter: torch.Tensor) -> Any:
    """This rank's shard of a tensor that has the parameter's shape. Other values are returned unchanged."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    own = torch.zeros_like(parameter.detach())
    comm.copy_into_shard(own, value)
    return own


def shard(policy: Policy, idle: Prompt, settings: TrainSettings | None = None) -> None:
    """Shards the policy and its reference in place over all ranks. Make the optimizer after this.

    Each decoder layer is sharded by itself. Vision tower, embeddings and output layer are sharded with the root module.
    `idle` is the prompt for idle micro-batches (packing.with_idle): one small image if the data may have images, else a
    few words. Gradients are summed over ranks, not averaged: each rank's loss is a share of the step's loss."""
    settings = settings or TrainSettings()
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(f"train.sharding=fsdp2 needs torch 2.13, but {torch.__version__} is installed: upgrade "
                          "torch, or set train.sharding=none")
    models = [m for m in (policy.model, policy._reference) if m is not None]
    policy.shards = FSDPShards([_sharded(model, policy, settings) for model in models])
    policy.scatter()
    if policy.moving_reference:
        policy.start_moving_reference()  # its tensors have become shards
    policy.idle = idle


def _sharded(model: Any, policy: Policy, settings: TrainSettings) -> Any:
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
    root._get_fsdp_state()._lazy_init()  # else in the first pass, which a rank without prompts may skip
    return root


def decoder_layers(base: Any) -> list[torch.nn.Module]:
    """The decoder layers of a model's language part."""
    return list(base.get_decoder().layers)


def _sharded_modules(root: Any) -> Iterator[Any]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))
