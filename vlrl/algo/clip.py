"""The clipped surrogate that most policy terms share."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from vlrl.algo.inputs import LossInputs, Metrics

ClipRange = Annotated[float, Field(ge=0)]
"""Distance of a clip bound from 1 (of a log-ratio or probability: from 0)."""
AboveOne = Annotated[float, Field(gt=1)]


def surrogate(x: LossInputs, ratio: torch.Tensor, low: float, high: float, delta: float | None = None,
              dual_clip: float | None = None) -> tuple[torch.Tensor, Metrics]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token, with the metrics of `clip_metrics`.

    ratio [N] -> [N]. `delta` caps the unclipped ratio, `dual_clip` = c bounds the loss of a negative advantage by -c A.
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
    """Per token, whether a bound applies, and the ratio: stored, and counted in clip_frac."""
    return {"clipped": inert, "ratio": ratio.detach()}
