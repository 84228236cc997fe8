"""The head of a reward model that is trained on pairs of answers (algo.loss=bradley_terry)."""

from __future__ import annotations

from typing import Any

import torch

from vlrl.config.algo import HEAD_LR
from vlrl.config.schema import Config
from vlrl.methods.preferences.loss import pair_loss
from vlrl.models.heads import HeadSettings, RewardHead


class PairHead(RewardHead):
    """A reward head trained on pairs of answers, together with the model, at learning rate algo.loss.head_lr."""

    key = "critic"
    """The name of the head in checkpoints of reward models."""
    centre: float = 0.0

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return pair_loss(x, values, self.centre)


def of_run(config: Config, width: int, device: torch.device) -> PairHead:
    options = config.algo.loss.options
    head = PairHead(width, HeadSettings(options.get("head_lr", HEAD_LR)), device)
    head.centre = float(options.get("centre", 0.0))
    return head
