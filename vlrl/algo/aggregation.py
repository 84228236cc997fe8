"""Functions that aggregate token losses: `(per_token [N], LossInputs) -> scalar`, this micro-batch's share of the loss.

The loss is the sum of these shares over all micro-batches and processes, because every count is taken over the whole
optimizer step. Only trained tokens count, and each is multiplied by the weight of its sample. A rollout without trained
tokens (truncated and masked) does not count."""

from __future__ import annotations

from typing import Any

import torch

from vlrl.algo.inputs import LossInputs
from vlrl.config.base import Positive


def token_mean(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """The sum of the token losses divided by the number of tokens: all tokens have equal weight (DAPO, 2503.14476, eq.
    8)."""
    return _sum(per_token, x) / max(x.total_tokens, 1.0)


def sequence_mean(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """The mean over rollouts of each rollout's mean token loss (GRPO, arXiv 2402.03300, eq. 3). All rollouts have equal
    weight, so tokens of a long rollout have less weight."""
    return _sum(per_token / x.spread(x.lengths).clamp(min=1), x) / max(x.total_sequences, 1.0)


def constant(per_token: torch.Tensor, x: LossInputs, length: Positive | None = None) -> torch.Tensor:
    """The sum of the token losses divided by (rollouts * length), which has no length bias (Dr. GRPO, arXiv
    2503.20783). `length`: rollout.max_new_tokens by default; GUI-G1 (arXiv 2505.15810) uses 64."""
    return _sum(per_token, x) / max(x.total_sequences * (length or x.max_length), 1.0)


def sequence_sum(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """The mean over rollouts of each rollout's summed token loss. With algo.loss=gspo: LUSPO (arXiv 2602.05261)."""
    return _sum(per_token, x) / max(x.total_sequences, 1.0)


def _sum(per_token: torch.Tensor, x: LossInputs) -> torch.Tensor:
    return (per_token * x.mask * x.weights).sum()


AGGREGATIONS: dict[str, Any] = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant,
                                "sequence_sum": sequence_sum}
