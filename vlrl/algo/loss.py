"""Per-token policy terms, KL, and how tokens become one number.

A policy term is `LossInputs -> (per_token [N], metrics)`; `objective` adds the KL and aggregates with counts that hold
for the whole optimizer step, so the gradient does not depend on micro-batches, accumulation, packing or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Flat tokens of one micro-batch. N answer tokens, R rollouts of the optimizer step on this process."""

    logprobs: torch.Tensor
    """[N] current policy, with gradient."""
    old_logprobs: torch.Tensor
    """[N] trainer at the weights that sampled."""
    advantages: torch.Tensor
    """[N] each token's advantage."""
    mask: torch.Tensor
    """[N] 1.0 on trained tokens, 0.0 on the rest."""
    weights: torch.Tensor
    """[N] the sample's weight."""
    rollout_id: torch.Tensor
    """[N] number of the rollout, 0..R-1."""
    lengths: torch.Tensor
    """[R] trained tokens of each rollout."""
    total_tokens: float
    """Trained tokens of the optimizer step over all processes."""
    total_sequences: float
    """Rollouts with at least one trained token, likewise."""
    max_length: int
    """rollout.max_new_tokens."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    reference_logprobs: torch.Tensor | None = None
    """[N], only when the KL has weight."""


Metrics = dict[str, torch.Tensor]
"""Sums over the trained tokens of this micro-batch; divided by the token count later."""
PolicyTerm = Callable[[LossInputs], tuple[torch.Tensor, Metrics]]


def ppo_clip(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = exp(logp - old logp).

    PPO (arXiv 1707.06347) eq. 7; GRPO (2402.03300) eq. 3; separate sides as in DAPO (2503.14476). -> [N].
    """
    ratio = torch.exp((x.logprobs - x.old_logprobs).clamp(-20, 20))
    clipped = ratio.clamp(1 - x.clip_low, 1 + x.clip_high)
    per_token = -torch.minimum(ratio * x.advantages, clipped * x.advantages)
    inert = ((ratio > 1 + x.clip_high) & (x.advantages > 0)) | ((ratio < 1 - x.clip_low) & (x.advantages < 0))
    return per_token, {"clip_frac": (inert.float() * x.mask).sum()}


def reinforce(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """-logp A per token, without a ratio (REINFORCE, Williams 1992). -> [N]."""
    return -x.logprobs * x.advantages, {}


def supervised(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """-logp per token: cross-entropy on given answers. -> [N]."""
    return -x.logprobs, {}


LOSSES: dict[str, PolicyTerm] = {"ppo_clip": ppo_clip, "reinforce": reinforce, "supervised": supervised}


def k3(x: LossInputs) -> torch.Tensor:
    """exp(d) - d - 1 per token, d = reference logp - logp: unbiased, never negative (Schulman's k3). -> [N]."""
    assert x.reference_logprobs is not None
    d = (x.reference_logprobs - x.logprobs).clamp(-20, 20)
    return torch.exp(d) - d - 1


def token_mean(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Sum over trained tokens / trained tokens of the whole optimizer step (DAPO, arXiv 2503.14476, eq. 8)."""
    return (per_token * x.mask * x.weights).sum() / max(x.total_tokens, 1.0)


def sequence_mean(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Mean over rollouts of the mean over their trained tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    share = x.mask * x.weights / x.lengths[x.rollout_id].clamp(min=1)
    return (per_token * share).sum() / max(x.total_sequences, 1.0)


def constant(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """Sum / (rollouts * rollout.max_new_tokens): no length bias (Dr. GRPO, arXiv 2503.20783)."""
    return (per_token * x.mask * x.weights).sum() / max(x.total_sequences * x.max_length, 1.0)


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant}


def objective(x: LossInputs, term: PolicyTerm, aggregation: str, kl_coef: float) -> tuple[torch.Tensor, Metrics]:
    """This process's share of the loss (summing over micro-batches and processes gives the whole) and metric sums."""
    per_token, metrics = term(x)
    if kl_coef:
        kl = k3(x)
        per_token = per_token + kl_coef * kl
        metrics = {**metrics, "kl": (kl.detach() * x.mask).sum()}
    return AGGREGATIONS[aggregation](per_token, x), metrics
