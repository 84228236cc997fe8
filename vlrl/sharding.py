"""FSDP2: a policy's weights, gradients and optimizer state sharded over the processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from vlrl.policy import Policy
from vlrl.types import Prompt


def shard(policy: Policy, idle: Prompt) -> None:
    """Shards the model in place: each decoder layer by itself, all the rest (vision tower, embeddings, output layer)
    with the root, over the default process group. Make the optimizer after this.

    `idle` fills micro-batches where a process has fewer than another or none with media (packing.with_idle): a prompt
    of one small image where the data may have images, else of a few words. Gradients are summed over processes, as
    losses are shares of the whole step's.
    """
    for layer in decoder_layers(policy.base):
        fully_shard(layer)
    root: Any = fully_shard(policy.model)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    policy.idle = idle


def decoder_layers(base: Any) -> list[torch.nn.Module]:
    """The layers of a model's language part."""
    return list(base.get_decoder().layers)
