"""Additional heads on the policy's hidden states: a value head, and the head of a reward model.

A head reads the inputs of the output layer in passes that are computed anyway. It has its own optimizer group. Its
weights are saved in checkpoints with the state of the trainer, not with the model; only the head of a reward model is
saved with the model, in reward_head.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

HEAD = "reward_head.safetensors"  # file in the model's folder with the head of a reward model


@dataclass(frozen=True)
class HeadSettings:
    """Training settings of a head (value head or head of a reward model)."""

    lr: float
    coef: float = 1.0  # factor for the gradient that the head's loss sends into the policy
    warmup: int = 0  # number of first steps in which only the head is trained


class Head(torch.nn.Module):
    """A linear layer, float32 and initially zero, that predicts a scalar for each completion token from the hidden
    state before the token."""

    key: ClassVar[str]  # key of the head's state in checkpoints, and prefix of the names of its metrics
    file: ClassVar[str] = ""  # file of the head in the model's folder; "" if the head is stored only in checkpoints
    reads: ClassVar[tuple[str, ...]] = ()  # names of the Rollout.per_token arrays that the head's loss needs

    def __init__(self, width: int, settings: HeadSettings, device: torch.device | str = "cpu"):
        super().__init__()
        self.settings = settings
        self.layer = torch.nn.Linear(width, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Predicted values [N] for hidden states [N, H]. The states' gradient is multiplied by settings.coef."""
        alone = states.detach()
        shared = alone + self.settings.coef * (states - alone) if self.settings.coef else alone
        return self.layer(shared.float())[:, 0]

    def warming_up(self, step: int) -> bool:
        """Whether only the head is trained in this step (warmup), and not the policy."""
        return step < self.settings.warmup

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the head's loss on a micro-batch (this rank's share of the step's loss), and metrics. values: [N]
        predicted values of the micro-batch's tokens. x: its algo.inputs.LossInputs."""
        raise NotImplementedError


class RewardHead(Head):
    """The head of a reward model. A completion's score is the value at its last token, which depends on all text."""

    file = HEAD

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], device: torch.device) -> RewardHead:
        """A frozen head with the given weights."""
        head = cls(weights["layer.weight"].shape[1], HeadSettings(0.0), device)
        head.load_state_dict(dict(weights))
        return head.requires_grad_(False)
