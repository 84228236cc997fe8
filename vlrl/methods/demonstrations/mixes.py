"""Mixes of demonstrations and RL (algo.demonstrations.mix): the weight of each loss in a step, and the loss of the
demonstrations' tokens.

    L = rl * L_RL + share * L_demonstrations,    (rl, share) = mix.shares(step, seed)

The policy did not sample the tokens of a demonstration, so they have cross-entropy only and never an advantage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlrl.algo.state import Saved
from vlrl.config.base import Count, Fraction, NonNegative, Positive, Rate

_STREAM = 12
"""Key of the random stream that `sasr` uses."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DemonstrationBatch:
    """The demonstrations of one micro-batch, N tokens."""

    logprobs: torch.Tensor
    """[N] log-probabilities under the policy, with gradient."""
    mask: torch.Tensor
    """[N] 1.0 on trained tokens, 0.0 on all others."""
    weights: torch.Tensor
    """[N] weight of the data row that each token belongs to."""
    total_tokens: float
    """Number of trained tokens of all demonstrations of the optimizer step, over all processes."""
    entropy: torch.Tensor | None = None
    """[N] policy entropy in nats, with gradient. Set only in the supervised steps of an interleaving mix."""


def interleaves(mix: Any) -> bool:
    """Whether the mix trains demonstrations in separate optimizer steps."""
    return getattr(mix, "interleaves", False)


def cross_entropy(d: DemonstrationBatch, factor: torch.Tensor | float = 1.0) -> torch.Tensor:
    """A micro-batch's share of the cross-entropy: -sum(factor * log p * weight) / total_tokens, over the trained
    tokens. `factor` is one number, or one per token [N]."""
    return -(factor * d.logprobs * d.mask * d.weights).sum() / max(d.total_tokens, 1.0)


class Chord:
    """L = (1 - mu) L_RL + mu L_SFT. mu rises from 0 to `peak` over `warmup` steps, then falls along a cosine to
    `valley` over `decay` steps.

    CHORD-mu: On-Policy RL Meets Off-Policy Experts (arXiv 2508.11408)."""

    def __init__(self, peak: Fraction = 0.9, valley: Fraction = 0.05, warmup: Count = 0, decay: Positive = 200):
        if valley > peak:
            raise ValueError(f"valley={valley:g} is above peak={peak:g}: lower valley, or raise peak")
        self.peak, self.valley, self.warmup, self.decay = peak, valley, warmup, decay

    def shares(self, step: int, seed: int) -> tuple[float, float]:
        """The weights of the RL loss and of the demonstrations' loss: (1 - mu, mu)."""
        if step < self.warmup:
            mu = self.peak * step / self.warmup
        else:
            gone = min((step - self.warmup) / self.decay, 1.0)
            mu = self.valley + (self.peak - self.valley) * (1 + math.cos(math.pi * gone)) / 2
        return 1.0 - mu, mu

    def loss(self, d: DemonstrationBatch) -> torch.Tensor:
        return cross_entropy(d)


class ChordPhi:
    """L = (1 - mu) L_RL + mu L_phi with a constant `mu`. L_phi weights each token of a demonstration by phi = p (1 -
    p), without gradient; phi is small both for tokens that the policy already predicts and for improbable tokens.

    CHORD-phi (arXiv 2508.11408); the constant 0.1 is our choice."""

    def __init__(self, mu: Fraction = 0.1):
        self.mu = mu

    def shares(self, step: int, seed: int) -> tuple[float, float]:
        """The weights of the RL loss and of the demonstrations' loss: (1 - mu, mu)."""
        return 1.0 - self.mu, self.mu

    def factor(self, d: DemonstrationBatch) -> torch.Tensor:
        """[N] phi of each token."""
        p = d.logprobs.detach().exp()
        return p * (1 - p)

    def loss(self, d: DemonstrationBatch) -> torch.Tensor:
        return cross_entropy(d, self.factor(d))


class Sasr(Saved):
    """Each step is either supervised or RL. After `warmup` supervised steps, a step is supervised with probability g /
    (g + gamma g_w), where g is the gradient norm of the latest supervised step and g_w that of the last warm-up
    step.

    SASR: Step-wise Adaptive Integration of Supervised Fine-tuning and RL (arXiv 2505.13026). The paper's warm-up is an
    epoch, here it is a number of steps; `gamma` 1 is our choice."""

    saved = ("warm", "latest")

    def __init__(self, warmup: Positive = 20, gamma: Rate = 1.0):
        self.warmup, self.gamma = warmup, gamma
        self.warm = self.latest = 0.0

    def chance(self, step: int) -> float:
        """The probability that this step is supervised."""
        if step < self.warmup:
            return 1.0
        return self.latest / (self.latest + self.gamma * self.warm) if self.latest else 0.0

    def shares(self, step: int, seed: int) -> tuple[float, float]:
        """The weights of the RL loss and of the demonstrations' loss: (0, 1) in a supervised step, (1, 0) in an RL
        step. A resumed run makes the same choices."""
        drawn = np.random.default_rng([seed, _STREAM, step]).random()
        return (0.0, 1.0) if drawn < self.chance(step) else (1.0, 0.0)

    def loss(self, d: DemonstrationBatch) -> torch.Tensor:
        return cross_entropy(d)

    def observe(self, step: int, norm: float) -> None:
        """Records the gradient norm of a supervised step."""
        self.latest = norm
        self.warm = norm if step < self.warmup else self.warm

    def metrics(self, step: int) -> dict[str, float]:
        return {"demonstrations/chance": self.chance(step)}


class Relift:
    """All regular steps are RL steps. Prompts whose completions all failed are collected, with their demonstrations.
    Once `size` prompts are collected, an RL step is followed by a supervised step on their demonstrations, with a
    separate optimizer and an entropy bonus of weight `entropy`.

    ReLIFT: Learning What Reinforcement Learning Can't (arXiv 2506.07527)."""

    interleaves = True

    def __init__(self, size: Positive = 128, lr: Rate = 1e-6, entropy: NonNegative = 0.001):
        self.size, self.lr, self.entropy = size, lr, entropy
        self.buffer: list[int] = []
        self._optimizer: torch.optim.AdamW | None = None
        self._state: dict[str, Any] = {}

    def shares(self, step: int, seed: int) -> tuple[float, float]:
        return 1.0, 0.0

    def collect(self, indices: Sequence[int]) -> None:
        """Adds indices of training rows to the buffer; ignores indices that are already in the buffer."""
        self.buffer = [*dict.fromkeys([*self.buffer, *indices])]

    def due(self) -> list[int]:
        """Removes the first `size` indices from the buffer and returns them; returns [] if the buffer holds fewer."""
        if len(self.buffer) < self.size:
            return []
        out, self.buffer = self.buffer[:self.size], self.buffer[self.size:]
        return out

    def loss(self, d: DemonstrationBatch) -> torch.Tensor:
        loss = cross_entropy(d)
        if d.entropy is None:
            return loss
        return loss - self.entropy * (d.entropy * d.mask).sum() / max(d.total_tokens, 1.0)

    def optimizer(self, weights: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of the supervised steps, which trains the parameters `weights`. Created on first use."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(weights, lr=self.lr, weight_decay=0.0)
            if self._state:
                self._optimizer.load_state_dict(self._state)
        return self._optimizer

    def metrics(self, step: int) -> dict[str, float]:
        return {"demonstrations/buffer": float(len(self.buffer))}

    def state_dict(self) -> dict[str, Any]:
        state = self._optimizer.state_dict() if self._optimizer else self._state
        return {"buffer": [*self.buffer], **({"optimizer": state} if state else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer, self._state, self._optimizer = [*state["buffer"]], state.get("optimizer", {}), None


MIXES = {"chord": Chord, "chord_phi": ChordPhi, "sasr": Sasr, "relift": Relift}
