"""Losses on retries with guidance (algo.guided.loss): each function maps a `RetryBatch` to a micro-batch's share of the
loss.

They apply with algo.guided.use=beside. The retries were sampled under the prompt with guidance, and are trained under
the prompt without it. No importance ratio corrects for this: p(y | x) / p(y | x, guidance) would undo what the guidance
achieved. In effect the retries are demonstrations that the policy wrote itself; the metric `guided/logratio` measures
how much the guidance changes their log-probability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlrl.algo.inputs import requires
from vlrl.config.base import Positive, Rate


@dataclass(frozen=True, eq=False, kw_only=True)
class RetryBatch:
    """P correct retries of one micro-batch. For a loss that requires "failures", each retry is paired with a failed
    completion of its group. All rows together have N tokens."""

    logprobs: torch.Tensor
    """[N] log-probabilities under the prompt without guidance, with gradient."""
    reference: torch.Tensor | None
    """[N] log-probabilities under the reference model and the same prompt, for losses that require "reference"."""
    mask: torch.Tensor
    """[N] 1.0 on sampled tokens, 0.0 on all others."""
    second: torch.Tensor
    """[N] bool: True on tokens of a retry, False on tokens of the failed completion that it is paired with."""
    pair: torch.Tensor
    """[N] int64 index of the retry that each token belongs to or is paired with, 0..P-1."""
    weights: torch.Tensor
    """[P] weight of each retry's sample."""
    total_tokens: float
    """Number of sampled tokens of all retries of the optimizer step, over all processes."""
    total_attempts: float
    """Number of retries of the optimizer step, over all processes."""
    step: int = 0


Loss = Callable[[RetryBatch], torch.Tensor]


def sft(a: RetryBatch) -> torch.Tensor:
    """Cross-entropy of the retries: loss = -sum log p(token | prompt) / tokens. Agent-RLVR (2506.11425)."""
    return -(a.logprobs * a.mask * a.second * a.weights[a.pair]).sum() / max(a.total_tokens, 1.0)


def expo(a: RetryBatch, beta: Rate = 0.1, decay: Positive = 200) -> torch.Tensor:
    """loss = -beta (1 - step / decay) * (mean over the retries of their mean log p(token | prompt)). The loss is 0 from
    step `decay` on.

    The self-explanation term of ExPO (arXiv 2507.02834). The linear decay is our choice."""
    own = a.mask * a.second
    lengths, sums = (torch.zeros_like(a.weights).index_add(0, a.pair, v) for v in (own, a.logprobs * own))
    fading = beta * max(0.0, 1 - a.step / decay)
    return -fading * (sums / lengths.clamp(min=1) * a.weights).sum() / max(a.total_attempts, 1.0)


@requires("reference", "failures")
def dpo(a: RetryBatch, beta: Rate = 0.1) -> torch.Tensor:
    """loss = -mean log sigmoid(beta (D(retry) - D(failure))), where D = log p - log p(reference) of a whole completion.

    Direct Preference Optimization (2305.18290) on pairs of a correct retry with guidance and a failed completion
    without it, as Agent-RLVR (2506.11425) trains."""
    assert a.reference is not None
    gained = (a.logprobs - a.reference) * a.mask * torch.where(a.second, 1.0, -1.0)
    margin = torch.zeros_like(a.weights).index_add(0, a.pair, gained)
    return -(torch.nn.functional.logsigmoid(beta * margin) * a.weights).sum() / max(a.total_attempts, 1.0)


LOSSES: dict[str, Loss] = {"sft": sft, "expo": expo, "dpo": dpo}
