"""Distillation losses per token: each function maps a `TokenChunk` of n tokens to [n] losses in nats, with gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """A chunk of n completion tokens with the logits of policy and teacher. Logits are float32 and divided by the
    sampling temperature; they are -inf for tokens that cannot be sampled."""

    logits: torch.Tensor
    """[n, V] logits of the policy, with gradient."""
    teacher: torch.Tensor
    """[n, V] logits of the teacher."""
    tokens: torch.Tensor
    """[n] int64 ids of the sampled tokens."""


Loss = Callable[[TokenChunk], torch.Tensor]


def reverse_kl(x: TokenChunk) -> torch.Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) over all tokens v that can be sampled, with p the policy and q the
    teacher.

    On the policy's own completions this is on-policy distillation: GKD (arXiv 2306.13649) with on-policy data and the
    reverse KL, and the second phase of Qwen3's distillation (arXiv 2505.09388). The gradient with respect to the logits
    z is d KL / d z_v = p_v (log p_v - log q_v - KL), whichever model sampled the token; no gradient goes through the
    sampling.

    The loss is computed as sum_v p_v sg(log p_v - log q_v), where sg stops the gradient. The omitted gradient sum_v p_v
    d log p_v is 0, because it is the derivative of sum_v p_v = 1. So the gradient is exactly 0 if policy and teacher
    agree."""
    own = x.logits.log_softmax(-1)
    gap = (own.detach() - x.teacher.log_softmax(-1)).masked_fill(own.detach() == -torch.inf, 0)
    return (own.exp() * gap).sum(-1)


def sampled_kl(x: TokenChunk) -> torch.Tensor:
    """The loss log p(y) - log q(y) of the sampled token y, with the gradient (log p(y) - log q(y)) d log p(y). p is the
    policy and q the teacher.

    This is a policy gradient in which each token has the advantage -(log p(y) - log q(y)). For y sampled from p, value
    and gradient are unbiased estimates of KL(p || q) and its gradient. The loss needs a single number per token from
    the teacher, and has more variance than reverse_kl. It is biased for tokens sampled by older weights."""
    own, theirs = (z.log_softmax(-1).gather(-1, x.tokens[:, None])[:, 0] for z in (x.logits, x.teacher))
    return kl_of_sampled(own, theirs)


def kl_of_sampled(own: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Computes sampled_kl from the log-probabilities [n] of the sampled tokens under the policy (`own`) and the teacher
    (`theirs`)."""
    gap = (own - theirs).detach()
    return gap * (1 + own - own.detach())


LOSSES: dict[str, Loss] = {"reverse_kl": reverse_kl, "sampled_kl": sampled_kl}
