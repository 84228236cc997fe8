"""The clipped surrogate that most policy terms share."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vlrl.algo.inputs import LossInputs, Metrics

ClipRange = Annotated[float, Field(ge=0)]
"""How far a ratio (or its log, or a probability) may go to one side."""
AboveOne = Annotated[float, Field(gt=1)]


def surrogate(x: LossInputs, ratio: torch.Tensor, low: float, high: float, delta: float | None = None,
              dual_clip: float | None = None) -> tuple[torch.Tensor, Metrics]:
    """Returns -min(r A, clip(r, 1 - low, 1 + high) A) per token, with the metrics of `clip_metrics`.

    ratio [N] -> [N]. `delta` caps the ratio of the branch that is not clipped, `dual_clip` = c bounds the loss of a
    negative advantage by -c A.
    """
    a = x.advantages
    free = ratio if delta is None else ratio.clamp(max=delta)
    gain = torch.minimum(free * a, ratio.clamp(1 - low, 1 + high) * a)
    inert = ((ratio > 1 + high) & (a > 0)) | ((ratio < 1 - low) & (a < 0))
    if delta is not None:
        inert = inert | ((ratio > delta) & (a < 0))
    if dual_clip is not None:
        gain = torch.where(a < 0, torch.maximum(gain, dual_clip * a), gain)
        inert = inert | ((ratio > dual_clip) & (a < 0))
    return -gain, clip_metrics(ratio, inert)


def clip_metrics(ratio: torch.Tensor, inert: torch.Tensor) -> Metrics:
    """Of each token whether a bound takes hold of it, and its ratio: what the store keeps and clip_frac counts."""
    return {"clipped": inert, "ratio": ratio.detach()}
