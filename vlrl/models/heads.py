"""Linear layers on the policy's hidden states: a value head, and the head of a reward model.

A head reads the inputs of the output layer in passes that are computed anyway. It has its own optimizer group, belongs
to the state of the trainer and is not saved with the model. The exception is the head of a reward model, which is saved
in reward_head.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

HEAD = "reward_head.safetensors"
"""File of a reward model's head, in the model's folder."""


@dataclass(frozen=True)
class HeadSettings:
    """Training settings of a head."""

    lr: float
    coef: float = 1.0
    """Factor for the gradient that the head's loss sends into the policy."""
    warmup: int = 0
    """Number of first steps in which only the head is trained."""


class Head(torch.nn.Module):
    """Predicts a scalar for each completion token from the hidden state before it. Float32; 0 everywhere at the start
    of a run."""

    key: ClassVar[str]
    """Key of the head's state in checkpoints, and prefix of its metrics."""
    file: ClassVar[str] = ""
    """File of the head in the model's folder; empty = the head is only stored in checkpoints."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays in Rollout.per_token that the head's loss uses."""

    def __init__(self, width: int, settings: HeadSettings, device: torch.device | str = "cpu"):
        super().__init__()
        self.settings = settings
        self.layer = torch.nn.Linear(width, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Values [N] for hidden states [N, H]; the gradient sent to the states is multiplied by settings.coef."""
        alone = states.detach()
        shared = alone + self.settings.coef * (states - alone) if self.settings.coef else alone
        return self.layer(shared.float())[:, 0]

    def alone(self, step: int) -> bool:
        """Whether only the head is trained in this step, and the policy is not."""
        return step < self.settings.warmup

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(this rank's share of the loss on a micro-batch, metrics), for the predicted `values` [N] of its tokens.

        `x` is the algo.inputs.LossInputs of the micro-batch."""
        raise NotImplementedError


class RewardHead(Head):
    """Scores a completion: the value at its last token, whose hidden state depends on all text before it."""

    file = HEAD

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], device: torch.device) -> RewardHead:
        """A frozen head with saved weights."""
        head = cls(weights["layer.weight"].shape[1], HeadSettings(0.0), device)
        head.load_state_dict(dict(weights))
        return head.requires_grad_(False)
