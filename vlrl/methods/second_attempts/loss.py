"""What is learned from second attempts under guidance (algo.guided): `Attempts -> loss`, a micro-batch's share.

With algo.guided.use=beside. Their tokens were sampled under the prompt and its guidance, and are read under the prompt
alone. No importance ratio makes up for that: p(y | x) / p(y | x, guidance) would undo what the guidance found. The
answers are demonstrations that the policy wrote itself; `guided/logratio` says how far the two prompts are apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vlrl.algo.inputs import requires
from vlrl.config.base import Positive, Rate


@dataclass(frozen=True, eq=False, kw_only=True)
class RetryBatch:
    """Correct second attempts of one micro-batch, each with a failure of its group where a function requires
    "failures". N tokens, P attempts.
    """

    logprobs: torch.Tensor
    """[N] under the prompt without guidance, with gradient."""
    reference: torch.Tensor | None
    """[N] of the reference under the same prompt, for functions that require "reference"."""
    mask: torch.Tensor
    """[N] 1.0 on sampled tokens, 0.0 on the rest."""
    second: torch.Tensor
    """[N] bool, of the attempt itself; False on the failure that it is compared with."""
    pair: torch.Tensor
    """[N] int64 number of the attempt, 0..P-1."""
    weights: torch.Tensor
    """[P] the sample's weight."""
    total_tokens: float
    """Sampled tokens of all attempts of the optimizer step, over all processes."""
    total_attempts: float
    """How many these are."""
    step: int = 0


Loss = Callable[[RetryBatch], torch.Tensor]


def sft(a: RetryBatch) -> torch.Tensor:
    """- sum log p(token | prompt) / tokens, over the attempts alone: their cross-entropy. Agent-RLVR (2506.11425)."""
    return -(a.logprobs * a.mask * a.second * a.weights[a.pair]).sum() / max(a.total_tokens, 1.0)


def expo(a: RetryBatch, beta: Rate = 0.1, decay: Positive = 200) -> torch.Tensor:
    """- beta (1 - step / decay) * mean over the attempts of the mean of log p(token | prompt); 0 from step `decay` on.

    The self-explanation term of ExPO (arXiv 2507.02834). That it fades, and how, is our choice.
    """
    own = a.mask * a.second
    lengths, sums = (torch.zeros_like(a.weights).index_add(0, a.pair, v) for v in (own, a.logprobs * own))
    fading = beta * max(0.0, 1 - a.step / decay)
    return -fading * (sums / lengths.clamp(min=1) * a.weights).sum() / max(a.total_attempts, 1.0)


@requires("reference", "failures")
def dpo(a: RetryBatch, beta: Rate = 0.1) -> torch.Tensor:
    """- mean log sigmoid(beta (D(attempt) - D(failure))), D = log p - log p(reference) of a whole answer.

    Direct Preference Optimization (2305.18290) on pairs of a guided success and a plain failure, as Agent-RLVR
    (2506.11425) trains.
    """
    assert a.reference is not None
    gained = (a.logprobs - a.reference) * a.mask * torch.where(a.second, 1.0, -1.0)
    margin = torch.zeros_like(a.weights).index_add(0, a.pair, gained)
    return -(torch.nn.functional.logsigmoid(beta * margin) * a.weights).sum() / max(a.total_attempts, 1.0)


LOSSES: dict[str, Loss] = {"sft": sft, "expo": expo, "dpo": dpo}
