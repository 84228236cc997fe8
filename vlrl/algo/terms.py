"""Policy terms: `(LossInputs, options) -> (per_token [N], metrics)`, the loss of each token before aggregation.

In the formulas, A is the token's advantage, and r = exp(logp - old logp) the ratio. Log-ratios are clamped to +-20
before they are exponentiated. Terms of other papers are in methods/objectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field

from vlrl.algo.inputs import LossInputs, Metrics
from vlrl.algo.ratio import acts_through_ratio

ClipRange = Annotated[float, Field(ge=0)]
"""Distance of a clip bound from a ratio of 1, or from 0 for a log-ratio or a difference of probabilities."""
AboveOne = Annotated[float, Field(gt=1)]


def surrogate(x: LossInputs, ratio: torch.Tensor, low: float, high: float, delta: float | None = None,
              dual_clip: float | None = None) -> tuple[torch.Tensor, Metrics]:
    """The clipped surrogate loss of each token, -min(r A, clip(r, 1 - low, 1 + high) A), with ratio r [N] and advantage
    A. Also returns the metrics of `clip_metrics`. `delta` caps the unclipped ratio. With `dual_clip` = c, the loss
    of a negative advantage is at most -c A."""
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
    """Returns {"clipped": inert, "ratio": ratio without gradient}, each per token [N]. inert: whether a bound applies
    to the token. The metric clip_frac is computed from "clipped"."""
    return {"clipped": inert, "ratio": ratio.detach()}


def _beyond_delta(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if given.get("delta") and (given.get("dual_clip") or 0) >= given["delta"]:
        yield "dual_clip", f"algo.loss.delta={given['delta']:g} applies first"


@acts_through_ratio("clip_low", "clip_high", "dual_clip", "delta", hidden=_beyond_delta)
def ppo_clip(x: LossInputs, clip_low: ClipRange = 0.2, clip_high: ClipRange = 0.2, dual_clip: AboveOne | None = None,
             delta: AboveOne | None = None) -> tuple[torch.Tensor, Metrics]:
    """The clipped loss of PPO, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, with ratio r and advantage
    A.

    PPO (arXiv 1707.06347) eq. 7; GRPO (2402.03300) eq. 3. clip_high=0.28 is clip-higher of DAPO (2503.14476) eq. 8.
    `dual_clip` = c: for A < 0 the loss is at most -c A (arXiv 1912.09729, with c = 3). `delta` > 1 + clip_high is
    two-sided clipping: the ratio in the unclipped branch is at most delta (INTELLECT-2, 2505.07291)."""
    return surrogate(x, x.log_ratio.exp(), clip_low, clip_high, delta, dual_clip)


def reinforce(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The loss -log p * advantage per token, without a ratio (REINFORCE, Williams 1992; GPG, arXiv 2504.02546)."""
    return -x.logprobs * x.advantages, {}


def supervised(x: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The loss -log p per token: cross-entropy on given completions (supervised fine-tuning)."""
    return -x.logprobs, {}
