"""The likelihood of a reference answer under a policy as a reward, from log-probabilities of its tokens [t]."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_probability(logprobs: Sequence[float]) -> float:
    """Mean token probability, in [0, 1]; 0 without tokens. RLPR (2506.18254) uses it instead of the product, which a
    single unlikely token drives to 0."""
    return math.fsum(math.exp(float(v)) for v in logprobs) / len(logprobs) if len(logprobs) else 0.0


def debiased(reasoned: Sequence[Sequence[float]], alone: Sequence[float] | None) -> list[float]:
    """min(1, max(0, p - p0)) of each reasoning: how much likelier it makes the reference answer, whose tokens have the
    mean probability p after it and p0 `alone`; p if `alone` is None. RLPR (2506.18254) eq. 4."""
    base = 0.0 if alone is None else mean_probability(alone)
    return [min(1.0, max(0.0, mean_probability(one) - base)) for one in reasoned]
