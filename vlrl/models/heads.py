"""Linear layers on the policy's hidden states: a value head, and the head of a reward model.

They read the inputs of the output layer in passes that are computed anyway. They are state of the trainer, with an
optimizer group of their own, and are not saved with the model, except the head of a reward model, in
reward_head.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

HEAD = "reward_head.safetensors"
"""File of a reward model's head, beside the model's own."""


@dataclass(frozen=True)
class HeadSettings:
    """How a head is trained."""

    lr: float
    coef: float = 1.0
    """Factor of the gradient that its loss sends into the policy."""
    warmup: int = 0
    """First steps in which the head alone is trained."""


class Head(torch.nn.Module):
    """A scalar per completion token, from the state before it. Float32; 0 everywhere at the start of a run."""

    key: ClassVar[str]
    """Key of its state in checkpoints, and prefix of its metrics."""
    file: ClassVar[str] = ""
    """File beside the model's weights; empty = it is state of the trainer alone."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of Rollout.per_token that its loss uses."""

    def __init__(self, width: int, settings: HeadSettings, device: torch.device | str = "cpu"):
        super().__init__()
        self.settings = settings
        self.layer = torch.nn.Linear(width, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N]; its gradient to the states is multiplied by settings.coef."""
        alone = states.detach()
        shared = alone + self.settings.coef * (states - alone) if self.settings.coef else alone
        return self.layer(shared.float())[:, 0]

    def alone(self, step: int) -> bool:
        """Whether only the head is trained in this step, and the policy stays unchanged."""
        return step < self.settings.warmup

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This rank's share of the loss on the values [N] of a micro-batch (algo.inputs.LossInputs), and metrics."""
        raise NotImplementedError


class RewardHead(Head):
    """The score of a completion: the value at its last token, whose state has seen all text before it."""

    file = HEAD

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], device: torch.device) -> RewardHead:
        """The head with saved weights."""
        head = cls(weights["layer.weight"].shape[1], HeadSettings(0.0), device)
        head.load_state_dict(dict(weights))
        return head.requires_grad_(False)
