"""How token losses become one number: `(per_token [N], LossInputs) -> scalar`, this micro-batch's share.

The shares of all micro-batches and processes add up to the loss, because every count is that of the whole optimizer
step. Only trained tokens count, each with its sample's weight. A rollout without trained tokens (truncated and masked)
does not count."""

from __future__ import annotations

from typing import Any

import torch

from vlrl.algo.inputs import LossInputs
from vlrl.config.base import Positive


def token_mean(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """The sum over tokens / tokens: every token counts the same (DAPO, arXiv 2503.14476, eq. 8)."""
    return _sum(per_token, x) / max(x.total_tokens, 1.0)


def sequence_mean(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """The mean over rollouts of the mean over their tokens: every rollout counts the same, so a token of a long one
    counts less (GRPO, arXiv 2402.03300, eq. 3)."""
    return _sum(per_token / x.spread(x.lengths).clamp(min=1), x) / max(x.total_sequences, 1.0)


def constant(per_token: torch.Tensor, x: LossInputs,
             length: Positive | None = None) -> torch.Tensor:
    """The sum over tokens / (rollouts * length): no bias by length (Dr. GRPO, arXiv 2503.20783).

    `length`: rollout.max_new_tokens by default; GUI-G1 (2505.15810) has 64."""
    return _sum(per_token, x) / max(x.total_sequences * (length or x.max_length), 1.0)


def sequence_sum(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """The mean over rollouts of the sum over their tokens; with the term gspo it is LUSPO (arXiv 2602.05261)."""
    return _sum(per_token, x) / max(x.total_sequences, 1.0)


def _sum(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    return (per_token * x.mask * x.weights).sum()


AGGREGATIONS: dict[str, Any] = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant,
                                "sequence_sum": sequence_sum}
