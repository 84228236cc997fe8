"""The critic (algo.critic): a linear layer on the policy's hidden states.

It reads what enters the output layer in the passes that are computed anyway. Its weights are in no folder of the model:
they are state of the trainer, with their optimizer group, and an exported model has none.
"""

from __future__ import annotations

from typing import Any

import torch

from vlrl.config.algo import CriticSettings


class Critic(torch.nn.Module):
    """The value of the state before each answer token. Float32; 0 everywhere at the start of a run.

    The layer learns from the value loss, at algo.critic.lr; the policy's weights from algo.critic.coef of it, and from
    nothing of it during algo.critic.warmup.
    """

    def __init__(self, width: int, settings: CriticSettings, device: torch.device | str = "cpu"):
        super().__init__()
        self.settings = settings
        self.layer = torch.nn.Linear(width, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [N, H] -> [N] values, whose gradient to the states is multiplied by algo.critic.coef."""
        alone = states.detach()
        shared = alone + self.settings.coef * (states - alone) if self.settings.coef else alone
        return self.layer(shared.float())[:, 0]

    def warms_up(self, step: int) -> bool:
        """Returns whether the critic learns alone in this step."""
        return step < self.settings.warmup


def make_critic(settings: CriticSettings | None, base: Any, device: torch.device) -> Critic | None:
    """Returns the critic of a transformers model, where the settings want one."""
    return Critic(base.config.get_text_config().hidden_size, settings, device) if settings else None
