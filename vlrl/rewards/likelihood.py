"""Rewards from the likelihood of a reference answer under the policy, given the log-probabilities [t] of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_probability(logprobs: Sequence[float]) -> float:
    """The mean probability of the tokens, in [0, 1]; 0 if there are none. RLPR (2506.18254) uses the mean instead of
    the product, which a single unlikely token reduces to almost 0."""
    return math.fsum(math.exp(float(v)) for v in logprobs) / len(logprobs) if len(logprobs) else 0.0


def debiased(reasoned: Sequence[Sequence[float]], alone: Sequence[float] | None) -> list[float]:
    """RLPR's reward (2506.18254, eq. 4) for each reasoning: min(1, max(0, p - p0)), i.e. how much more likely the
    reasoning makes the reference answer.

    p is the mean probability of the reference answer's tokens after the reasoning, from an item of `reasoned`. p0 is
    their mean probability without any reasoning, from `alone`; 0 if `alone` is None."""
    base = 0.0 if alone is None else mean_probability(alone)
    return [min(1.0, max(0.0, mean_probability(one) - base)) for one in reasoned]
