"""How likely a policy finds a reference answer, as a reward. Values from log-probabilities of its tokens [t]."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_probability(logprobs: Sequence[float]) -> float:
    """Returns the mean over tokens of their probabilities, in [0, 1]; 0 without tokens. RLPR (2506.18254) takes it in
    place of their product, which one unlikely token takes to 0.
    """
    return math.fsum(math.exp(float(v)) for v in logprobs) / len(logprobs) if len(logprobs) else 0.0


def debiased(reasoned: Sequence[Sequence[float]], alone: Sequence[float] | None) -> list[float]:
    """Returns for each reasoning min(1, max(0, p - p0)): how much likelier it makes the reference answer, whose tokens
    have the mean probability p behind it and p0 `alone`; p where that is None. RLPR (2506.18254) eq. 4.
    """
    base = 0.0 if alone is None else mean_probability(alone)
    return [min(1.0, max(0.0, mean_probability(one) - base)) for one in reasoned]
