"""Where the answers to the same requests part when they are written in batches of another shape.

Every rollout draws from a random stream of its own, so only the last bits of the logits, which depend on the shape of
the batch, can tip a draw. What parts with a large gap in log-probability on one side only is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlrl.engine.base import Request
from vlrl.engine.hf import HFEngine
from vlrl.models.policy import Policy
from vlrl.types import Completion


@dataclass(frozen=True, kw_only=True)
class RolloutComparison:
    """One rollout, written at two batch shapes."""

    request: int
    index: int
    """Number of the rollout in its request."""
    place: int | None
    """First token that differs; None when all are the same."""
    tokens: tuple[int, int] | None
    """The two tokens at that place ..."""
    logprobs: tuple[float, float] | None
    """... and the log-probability of each, in its own batch."""
    drift: float
    """Largest difference of the log-probabilities of the tokens before it."""

    @property
    def gap(self) -> float | None:
        """How far the two candidates are apart in log-probability."""
        return None if self.logprobs is None else abs(self.logprobs[0] - self.logprobs[1])

    def __str__(self) -> str:
        where = f"request {self.request}, answer {self.index}"
        if self.place is None or self.tokens is None or self.logprobs is None:
            return f"{where}: the same, log-probabilities within {self.drift:.1e}"
        (a, b), (p, q) = self.tokens, self.logprobs
        return (f"{where}: token {self.place} is {a} or {b}, log-probabilities {p:.4f} and {q:.4f} (gap "
                f"{self.gap:.1e}); those before it within {self.drift:.1e}")


def compare(policy: Policy, requests: Sequence[Request], shapes: tuple[int, int],
            seed: int = 0) -> list[RolloutComparison]:
    """Generates the same requests with `shapes` rows side by side, and compares each rollout with itself."""
    one, other = (HFEngine(policy, seed, rows).generate(requests) for rows in shapes)
    return [_compared(i, k, a, b) for i, (x, y) in enumerate(zip(one, other, strict=True))
            for k, (a, b) in enumerate(zip(x, y, strict=True))]


def _compared(request: int, index: int, a: Completion, b: Completion) -> RolloutComparison:
    same = min(len(a.tokens), len(b.tokens))  # no answer is the beginning of another: the same tokens end alike
    differs = np.flatnonzero(a.tokens[:same] != b.tokens[:same])
    place = int(differs[0]) if len(differs) else None
    drift = float(np.abs(a.logprobs[:same] - b.logprobs[:same])[:place].max(initial=0))
    return RolloutComparison(request=request, index=index, place=place, drift=drift,
                    tokens=None if place is None else (int(a.tokens[place]), int(b.tokens[place])),
                    logprobs=None if place is None else (float(a.logprobs[place]), float(b.logprobs[place])))
