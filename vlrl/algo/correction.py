"""Importance weights that correct for a sampler whose probabilities differ from the trainer's.

Each function is `(LossInputs, options) -> (weights [N], metrics)`. The weights are computed from D = log p(trainer,
with the weights that sampled) - log p(engine) of the trained tokens. They carry no gradient. They multiply the policy
term after its clipping, but not the KL. A bound of null means that there is no bound. D is clamped to +-20. D is 0 for
tokens that were sampled under a different prompt from the one they are trained under, or whose engine log-probability
is unknown.

Metrics: `correction/weight` is the mean weight, `correction/outside` the share of tokens whose weight was out of
bounds."""

from __future__ import annotations

import math
from typing import Literal

import torch

from vlrl.algo.inputs import LossInputs, Metrics
from vlrl.config.base import NonNegative

_Bound = NonNegative | None


def token_truncate(x: LossInputs, low: _Bound = None, high: _Bound = 2.0) -> tuple[torch.Tensor, Metrics]:
    """clip(exp(D), low, high) of each token: truncated importance sampling (TIS, Yao et al. 2025, high = 2). D = log
    p(trainer) - log p(engine)."""
    return _truncated(x, x.sampler_gap, low, high)


def token_mask(x: LossInputs, low: _Bound = 0.5, high: _Bound = 5.0) -> tuple[torch.Tensor, Metrics]:
    """exp(D) of each token, 0 outside the bounds: IcePop (arXiv 2510.18855). D = log p(trainer) - log p(engine)."""
    return _masked(x, x.sampler_gap, x.sampler_gap, low, high)


def sequence_truncate(x: LossInputs, low: _Bound = None, high: _Bound = 3.0) -> tuple[torch.Tensor, Metrics]:
    """clip(exp(sum of D over a rollout's tokens), low, high) for all tokens of the rollout. D = log p(trainer) - log
    p(engine). The longer the rollout, the more the sum varies."""
    return _truncated(x, _sequence(x), low, high)


def sequence_mask(x: LossInputs, low: _Bound = None, high: _Bound = 3.0) -> tuple[torch.Tensor, Metrics]:
    """exp(sum of D over a rollout's tokens) for all tokens of the rollout, 0 outside the bounds. D = log p(trainer) -
    log p(engine). Masked importance sampling (MIS), the default of TRL."""
    return _masked(x, _sequence(x), _sequence(x), low, high)


def geometric_truncate(x: LossInputs, low: _Bound = None, high: _Bound = 2.0) -> tuple[torch.Tensor, Metrics]:
    """clip(exp(mean of D over a rollout's tokens), low, high) for all tokens of the rollout, as in ms-swift. D = log
    p(trainer) - log p(engine). The mean does not grow with the length of the rollout."""
    return _truncated(x, _geometric(x), low, high)


def geometric_mask(x: LossInputs, low: _Bound = 0.99, high: _Bound = 1.01,
                   kept: Literal["token", "geometric", "one"] = "token") -> tuple[torch.Tensor, Metrics]:
    """0 for all tokens of a rollout whose exp(mean of D) is outside the bounds (by default SkyRL's), else the weight
    `kept`: "token" = exp(D) of each token (NeMo-RL, ms-swift), "geometric" = exp(mean of D), "one" = 1. D = log
    p(trainer) - log p(engine)."""
    mean = _geometric(x)
    return _masked(x, mean, {"token": x.sampler_gap, "geometric": mean, "one": torch.zeros_like(mean)}[kept], low, high)


def _sequence(x: LossInputs) -> torch.Tensor:
    return x.spread(x.per_sequence(x.sampler_gap)).clamp(-20, 20)


def _geometric(x: LossInputs) -> torch.Tensor:
    return x.spread(x.sequence_mean(x.sampler_gap))


def _truncated(x: LossInputs, log_weight: torch.Tensor, low: _Bound, high: _Bound) -> tuple[torch.Tensor, Metrics]:
    weight, outside = log_weight.exp(), _outside(log_weight, low, high)
    return _with_metrics(x, weight.clamp(0.0 if low is None else low, math.inf if high is None else high), outside)


def _masked(x: LossInputs, judged: torch.Tensor, log_weight: torch.Tensor, low: _Bound,
            high: _Bound) -> tuple[torch.Tensor, Metrics]:
    outside = _outside(judged, low, high)
    return _with_metrics(x, torch.where(outside, 0, log_weight.exp()), outside)


def _outside(log_weight: torch.Tensor, low: _Bound, high: _Bound) -> torch.Tensor:
    weight = log_weight.exp()
    return (weight < (0.0 if low is None else low)) | (weight > (math.inf if high is None else high))


def _with_metrics(x: LossInputs, weight: torch.Tensor, outside: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    return weight, {"correction/weight": (weight * x.mask).sum(), "correction/outside": (outside * x.mask).sum()}
