"""Advantages of one group from its rewards: `(rewards [G], scorable [G]) -> advantages [G]`."""

from __future__ import annotations

from collections.abc import Callable

import torch

Advantage = Callable[[torch.Tensor], torch.Tensor]

GRPO_EPS = 1e-4


def grpo(rewards: torch.Tensor) -> torch.Tensor:
    """(R - mean) / (std + 1e-4) with Bessel's correction; exactly 0 when all rewards are equal.

    rewards [G] -> [G]. DeepSeekMath (arXiv 2402.03300) section 4.1.2.
    """
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + GRPO_EPS)


def dr_grpo(rewards: torch.Tensor) -> torch.Tensor:
    """R - mean, no division by the standard deviation: easy and hard prompts keep their weight.

    rewards [G] -> [G]. Understanding R1-Zero-like training (Dr. GRPO, arXiv 2503.20783).
    """
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo}


def group_advantages(rewards: list[float | None], advantage: Advantage) -> list[float]:
    """One advantage per rollout; an unscorable one (None) is left out of the statistics and gets 0."""
    scored = [i for i, r in enumerate(rewards) if r is not None]
    out = [0.0] * len(rewards)
    if scored:
        values = advantage(torch.tensor([rewards[i] for i in scored], dtype=torch.float64))
        for i, value in zip(scored, values.tolist(), strict=True):
            out[i] = value
    return out
