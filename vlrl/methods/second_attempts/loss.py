"""Losses on retries with guidance (algo.guided): `RetryBatch -> loss`, a micro-batch's share.

With algo.guided.use=beside. Their tokens were sampled under the prompt with guidance, and are trained under the prompt
alone. No importance ratio corrects for that: p(y | x) / p(y | x, guidance) would undo what the guidance found. The
retries are demonstrations that the policy wrote itself; `guided/logratio` measures the distance of the two prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlrl.algo.inputs import requires
from vlrl.config.base import Positive, Rate


@dataclass(frozen=True, eq=False, kw_only=True)
class RetryBatch:
    """Correct retries of one micro-batch, each paired with a failure of its group where a function requires "failures".
    N tokens, P retries."""

    logprobs: torch.Tensor
    """[N] under the prompt without guidance, with gradient."""
    reference: torch.Tensor | None
    """[N] under the reference with the same prompt, for functions that require "reference"."""
    mask: torch.Tensor
    """[N] 1.0 on sampled tokens, 0.0 on the rest."""
    second: torch.Tensor
    """[N] bool: token of the retry itself; False for the failure that it is paired with."""
    pair: torch.Tensor
    """[N] int64 number of the retry, 0..P-1."""
    weights: torch.Tensor
    """[P] the sample's weight."""
    total_tokens: float
    """Sampled tokens of all retries of the optimizer step, over all processes."""
    total_attempts: float
    """Number of these retries."""
    step: int = 0


Loss = Callable[[RetryBatch], torch.Tensor]


def sft(a: RetryBatch) -> torch.Tensor:
    """- sum log p(token | prompt) / tokens, over the retries alone: their cross-entropy. Agent-RLVR (2506.11425)."""
    return -(a.logprobs * a.mask * a.second * a.weights[a.pair]).sum() / max(a.total_tokens, 1.0)


def expo(a: RetryBatch, beta: Rate = 0.1, decay: Positive = 200) -> torch.Tensor:
    """- beta (1 - step / decay) * mean over the retries of the mean of log p(token | prompt); 0 from step `decay` on.

    The self-explanation term of ExPO (arXiv 2507.02834). The linear decay is our choice."""
    own = a.mask * a.second
    lengths, sums = (torch.zeros_like(a.weights).index_add(0, a.pair, v) for v in (own, a.logprobs * own))
    fading = beta * max(0.0, 1 - a.step / decay)
    return -fading * (sums / lengths.clamp(min=1) * a.weights).sum() / max(a.total_attempts, 1.0)


@requires("reference", "failures")
def dpo(a: RetryBatch, beta: Rate = 0.1) -> torch.Tensor:
    """- mean log sigmoid(beta (D(retry) - D(failure))), D = log p - log p(reference) of a whole completion.

    Direct Preference Optimization (2305.18290) on pairs of a guided success and an unguided failure, as Agent-RLVR
    (2506.11425) trains."""
    assert a.reference is not None
    gained = (a.logprobs - a.reference) * a.mask * torch.where(a.second, 1.0, -1.0)
    margin = torch.zeros_like(a.weights).index_add(0, a.pair, gained)
    return -(torch.nn.functional.logsigmoid(beta * margin) * a.weights).sum() / max(a.total_attempts, 1.0)


LOSSES: dict[str, Loss] = {"sft": sft, "expo": expo, "dpo": dpo}
