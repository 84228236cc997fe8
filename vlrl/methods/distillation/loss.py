"""Per-token losses of distillation: `TokenChunk -> [n]` nats, with gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """A chunk of n completion tokens. Logits are float32, at the sampled temperature; -inf for tokens that cannot be
    sampled."""

    logits: torch.Tensor
    """[n, V] of the policy, with gradient."""
    teacher: torch.Tensor
    """[n, V] of the teacher."""
    tokens: torch.Tensor
    """[n] int64, as sampled."""


Loss = Callable[[TokenChunk], torch.Tensor]


def reverse_kl(x: TokenChunk) -> torch.Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) over all tokens that can be sampled, p the policy and q the teacher.

    On the policy's own completions this is on-policy distillation: GKD (arXiv 2306.13649) with on-policy data and the
    reverse KL, and the second phase of Qwen3's (arXiv 2505.09388). The gradient with respect to the logits z is d KL /
    d z_v = p_v (log p_v - log q_v - KL), for any token, whichever model sampled it; no gradient goes through the
    sampling.

    It is computed from sum_v p_v sg(log p_v - log q_v): the rest, sum_v p_v d log p_v, is the derivative of 1. So it is
    exactly 0 where both agree."""
    own = x.logits.log_softmax(-1)
    gap = (own.detach() - x.teacher.log_softmax(-1)).masked_fill(own.detach() == -torch.inf, 0)
    return (own.exp() * gap).sum(-1)


def sampled_kl(x: TokenChunk) -> torch.Tensor:
    """log p(y) - log q(y) of the sampled token y, with the gradient (log p(y) - log q(y)) d log p(y).

    That is a policy gradient with the advantage -(log p(y) - log q(y)) for each token. Over y sampled from p both are
    unbiased: E = KL(p || q), and E[gap d log p] = d KL. It needs one number per token from the teacher, and has more
    variance than reverse_kl; it is biased for tokens sampled by older weights."""
    own, theirs = (z.log_softmax(-1).gather(-1, x.tokens[:, None])[:, 0] for z in (x.logits, x.teacher))
    return kl_of_sampled(own, theirs)


def kl_of_sampled(own: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """sampled_kl from the log-probabilities [n] of the sampled tokens under policy and teacher."""
    gap = (own - theirs).detach()
    return gap * (1 + own - own.detach())


LOSSES: dict[str, Loss] = {"reverse_kl": reverse_kl, "sampled_kl": sampled_kl}
