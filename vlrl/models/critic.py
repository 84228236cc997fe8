"""Linear layers on the policy's hidden states: the critic (algo.critic), and the head of a reward model.

They read what enters the output layer in the passes that are computed anyway, and are state of the trainer, with their
optimizer group. The critic's weights are in no folder of the model, and an exported model has none; those of a reward
model stand beside its own, in reward_head.safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vlrl.config.algo import HEAD_LR, PAIRS, AlgoSettings, CriticSettings

HEAD = "reward_head.safetensors"
"""The file of a reward model's head, beside the model's own."""


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


class RewardHead(Critic):
    """The score of an answer: its value at the answer's last token, whose state has seen all of the text before it.

    It learns from pairs of answers, at algo.loss.head_lr, and the model with it.
    """

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], device: torch.device) -> RewardHead:
        """Returns the head with weights that `save` wrote."""
        head = cls(weights["layer.weight"].shape[1], CriticSettings(), device)
        head.load_state_dict(dict(weights))
        return head.requires_grad_(False)


def make_critic(algo: AlgoSettings, base: Any, device: torch.device) -> Critic | None:
    """Returns the critic of a transformers model, or the head of one that learns to score, where the settings want one.
    """
    width = base.config.get_text_config().hidden_size
    if algo.loss.name == PAIRS:
        lr = algo.loss.options.get("head_lr", HEAD_LR)
        return RewardHead(width, CriticSettings(lr=lr, coef=1.0, clip=None), device)
    return Critic(width, algo.critic, device) if algo.critic else None
