"""What the policy learns of a token from its teacher: `Told -> [n]` nats, with gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """A chunk of n answer tokens, V choices each: -inf where nothing can be sampled, before the softmax, at the sampled
    temperature, float32."""

    logits: torch.Tensor
    """[n, V] of the policy, with gradient."""
    teacher: torch.Tensor
    """[n, V] of the teacher."""
    tokens: torch.Tensor
    """[n] int64, as sampled."""


Loss = Callable[[TokenChunk], torch.Tensor]


def reverse_kl(x: TokenChunk) -> torch.Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) over all tokens that can be sampled, p the policy and q the teacher.

    On the policy's own answers that is on-policy distillation: GKD (arXiv 2306.13649) with its answers alone and the
    reverse KL, and the second phase of Qwen3's (arXiv 2505.09388). The gradient with respect to the logits z is
    d KL / d z_v = p_v (log p_v - log q_v - KL), for any token whoever sampled it; none goes through the sampling.

    It is had from sum_v p_v stopped(log p_v - log q_v): the rest, sum_v p_v d log p_v, is the derivative of 1. So it is
    0, and not its rounding, where both agree.
    """
    own = x.logits.log_softmax(-1)
    gap = (own.detach() - x.teacher.log_softmax(-1)).masked_fill(own.detach() == -torch.inf, 0)
    return (own.exp() * gap).sum(-1)


def sampled_kl(x: TokenChunk) -> torch.Tensor:
    """log p(y) - log q(y) of the sampled token y, with the gradient (log p(y) - log q(y)) d log p(y).

    That is a policy gradient whose advantage of a token is -(log p(y) - log q(y)). Over y drawn of p both are right in
    the mean: E = KL(p || q), and E[gap d log p] = d KL. It asks the teacher for one number a token, and varies more
    than reverse_kl; of a token that older weights have sampled it is not the mean.
    """
    own, theirs = (z.log_softmax(-1).gather(-1, x.tokens[:, None])[:, 0] for z in (x.logits, x.teacher))
    return kl_of_sampled(own, theirs)


def kl_of_sampled(own: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """sampled_kl of the log-probabilities [n] that policy and teacher give the sampled tokens."""
    gap = (own - theirs).detach()
    return gap * (1 + own - own.detach())


LOSSES: dict[str, Loss] = {"reverse_kl": reverse_kl, "sampled_kl": sampled_kl}
