"""The value head of algo.critic: the value of the state before each completion token."""

from __future__ import annotations

from typing import Any

import torch

from vlrl.config.schema import Config
from vlrl.methods.critic.gae import value_loss
from vlrl.models.heads import Head, HeadSettings


class Critic(Head):
    """Learns from the value loss at algo.critic.lr; the policy's weights get algo.critic.coef of its gradient, and none
    during algo.critic.warmup."""

    key = "critic"
    reads = ("values", "targets")
    clip: float | None = None

    def loss(self, x: Any, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return value_loss(x, values, self.clip)


def of_run(config: Config, width: int, device: torch.device) -> Critic:
    settings: Any = config.algo.critic
    critic = Critic(width, HeadSettings(settings.lr, settings.coef, settings.warmup), device)
    critic.clip = settings.clip
    return critic
