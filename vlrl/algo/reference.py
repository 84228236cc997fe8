"""The reference policy of the KL term and of the service reference_logprobs: frozen, a moving average, or reset.

Without an adapter the reference policy is a copy of the initial model. With LoRA a frozen reference is the base model
with the adapter disabled, and a moving reference is a second set of adapter weights. `after_step` changes the
reference's weights in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vlrl.config.base import Beta, Count, Positive, Rate


class Frozen:
    """A frozen reference: the model at the start of the run."""

    moves = False

    def after_step(self, reference: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor],
                   optimizer: torch.optim.Optimizer, kl: float, done: int) -> bool:
        """Called after a step. Does nothing here; other references change the weights in `reference`. Returns whether
        the reference was reset to the policy. reference, policy: trained weights by name. kl: mean KL per token.
        done: number of completed steps."""
        return False


class Ema(Frozen):
    """A moving average: reference <- decay * reference + (1 - decay) * policy, every `every` steps. GRPO-CARE (arXiv
    2506.16141) has decay 0.995 and every=10, and starts from the policy's initial weights."""

    moves = True

    def __init__(self, decay: Beta = 0.995, every: Positive = 10):
        self.decay, self.every = decay, every

    def after_step(self, reference: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor],
                   optimizer: torch.optim.Optimizer, kl: float, done: int) -> bool:
        if done % self.every == 0:
            for name, weight in reference.items():
                weight.lerp_(policy[name].detach().to(weight.dtype), 1 - self.decay)
        return False


class Reset(Frozen):
    """Sets the reference to the policy every `every` steps (0 = never), and after a step whose KL per token exceeds
    `kl`. The optimizer state is cleared too, unless `optimizer` is false. ProRL (arXiv 2505.24864) section 3.3. Kimi
    k1.5 (arXiv 2501.12599) resets in every iteration: `every=1`."""

    moves = True

    def __init__(self, every: Count = 100, kl: Rate | None = None, optimizer: bool = True):
        if not every and kl is None:
            raise ValueError("with every=0 and without kl the reference would never be reset: set every or kl")
        self.every, self.kl, self.optimizer = every, kl, optimizer

    def after_step(self, reference: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor],
                   optimizer: torch.optim.Optimizer, kl: float, done: int) -> bool:
        due = bool(self.every) and done % self.every == 0
        if not due and (self.kl is None or kl <= self.kl):
            return False
        for name, weight in reference.items():
            weight.copy_(policy[name].detach())
        if self.optimizer:
            optimizer.state.clear()
        return True


REFERENCES: dict[str, Any] = {"auto": Frozen, "frozen": Frozen, "ema": Ema, "reset": Reset}
