"""Linear layers on the policy's hidden states: a method's, and the head of a reward model.

They read what enters the output layer in the passes that are computed anyway, and are state of the trainer, with their
optimizer group. Their weights are in no folder of the model, and an exported model has none; but those of a reward
model stand beside its own, in reward_head.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

HEAD = "reward_head.safetensors"
"""The file of a reward model's head, beside the model's own."""


@dataclass(frozen=True)
class HeadSettings:
    """How a head is trained."""

    lr: float
    coef: float = 1.0
    """Factor of the gradient that its loss sends into the policy."""
    warmup: int = 0
    """First steps in which the head alone is trained."""


class Head(torch.nn.Module):
    """A number for each answer token, of the state before it. Float32; 0 everywhere at the start of a run."""

    key: ClassVar[str]
    """Of its state in checkpoints, and of its metrics."""
    file: ClassVar[str] = ""
    """Beside the model's own weights; empty = it is state of the trainer alone."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of Rollout.per_token that its loss looks at."""

    def __init__(self, width: int, settings: HeadSettings, device: torch.device | str = "cpu"):
        super().__init__()
        self.settings = settings
        self.layer = torch.nn.Linear(width, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N], whose gradient to the states is multiplied by settings.coef."""
        alone = states.detach()
        shared = alone + self.settings.coef * (states - alone) if self.settings.coef else alone
        return self.layer(shared.float())[:, 0]

    def alone(self, step: int) -> bool:
        """Whether it learns alone in this step: the policy stays as it is."""
        return step < self.settings.warmup

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What is learned from the values [N] of a micro-batch (algo.inputs.LossInputs), this process's share, and
        metrics."""
        raise NotImplementedError


class RewardHead(Head):
    """The score of an answer: its value at the answer's last token, whose state has seen all of the text before it."""

    file = HEAD

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], device: torch.device) -> RewardHead:
        """Returns the head with weights that `save` wrote."""
        head = cls(weights["layer.weight"].shape[1], HeadSettings(0.0), device)
        head.load_state_dict(dict(weights))
        return head.requires_grad_(False)
