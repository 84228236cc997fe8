"""Estimators of the KL to the reference policy: `(LossInputs, options) -> per_token [N]`.

In all formulas, d = log p(reference) - log p. In the loss, the KL is added after weights and correction are applied to
the policy term. Only exponentials are clamped: above d = `clamp`, exp(d) continues along its tangent. So a token's
gradient is at most e^clamp, and a token whose probability has collapsed is still pulled back. k1, k2 and k3 are from J.
Schulman, Approximating KL Divergence (2020). A Comedy of Estimators (arXiv 2506.09477) and
docs/objectives.md tell which of these estimators have a useful gradient as a loss."""

from __future__ import annotations

from typing import Literal

import torch

from vlrl.algo.inputs import LossInputs
from vlrl.algo.named import Bound, parameters
from vlrl.config.base import Rate


def k1(x: LossInputs) -> torch.Tensor:
    """-d with d = log p(reference) - log p. Unbiased, but as a loss its gradient is zero in expectation, so it is meant
    for algo.kl_in=reward."""
    return -_distance(x)


def k2(x: LossInputs) -> torch.Tensor:
    """d^2 / 2 with d = log p(reference) - log p. A biased estimate whose gradient is that of the reverse KL."""
    return _distance(x) ** 2 / 2


def k3(x: LossInputs, clamp: Rate = 20.0, limit: Rate | None = None) -> torch.Tensor:
    """exp(d) - d - 1 with d = log p(reference) - log p, at most `limit`. Unbiased and never negative; GRPO (arXiv
    2402.03300) eq. 4. verl and EasyR1 use limit=10. A token above the limit has no gradient. `clamp`: the value of d
    above which exp(d) continues along its tangent."""
    d = _distance(x)
    value = _exp(d, clamp) - d - 1
    return value if limit is None else value.clamp(max=limit)


def k3_bounded(x: LossInputs, clamp: Rate = 3.0) -> torch.Tensor:
    """k3 with clamp=3, so that no token outweighs the rest of an optimizer step. Equal to k3 for log p(reference) - log
    p up to 3; at 12, k3 with clamp=20 would have a gradient of 160,000."""
    return k3(x, clamp)


def k1_plus(x: LossInputs) -> torch.Tensor:
    """The value of k1 with the gradient of k2 (straight-through), as in verl."""
    return _straight_through(k1(x), k2(x))


def k3_plus(x: LossInputs, clamp: Rate = 20.0, limit: Rate | None = None) -> torch.Tensor:
    """The value of k3 with the gradient of k2 (straight-through), as in verl."""
    return _straight_through(k3(x, clamp, limit), k2(x))


def k3_unbiased(x: LossInputs, clamp: Rate = 20.0, level: Literal["token", "sequence"] = "token") -> torch.Tensor:
    """r * k3, where r is the unclipped ratio to the weights at the start of the update. DeepSeek-V3.2 (arXiv
    2512.02556).

    For completions sampled by the weights at the start of the update, value and gradient are unbiased at every
    optimizer step. For completions sampled by older weights, or by an engine with other probabilities, they are biased,
    as algo.correction does not multiply the KL. `level`: "token" = r is the ratio of the token; "sequence" = r is
    exp(mean of the log-ratio) of its rollout."""
    log_r = x.log_ratio if level == "token" else x.spread(x.sequence_mean(x.log_ratio))
    return log_r.exp() * k3(x, clamp)


def k3_score(x: LossInputs, clamp: Rate = 20.0, from_sampler: bool = False) -> torch.Tensor:
    """w * k3 with w = exp(logp - stop_gradient(logp)) = 1, which adds the gradient through sampling that k3 lacks.
    `from_sampler`: w = exp(logp - engine's logp), or the ratio to the old weights if the engine's logp is unknown.
    arXiv 2506.09477 section 4; the default of NeMo-RL."""
    log_w = x.log_ratio + x.sampler_gap if from_sampler else x.logprobs - x.logprobs.detach()
    return log_w.clamp(-20, 20).exp() * k3(x, clamp)


def clamped(kl: Bound, x: LossInputs) -> torch.Tensor | None:
    """[N] bool: whether a token's exponential is clamped, or its KL value exceeds the option `limit`, in the estimator
    `kl`. None if the estimator has no option `clamp`."""
    options = {**{name: default for name, (_, default) in parameters(kl.function).items()}, **kl.options}
    if "clamp" not in options:
        return None
    d = _distance(x).detach()
    far, limit = d > options["clamp"], options.get("limit")
    return far if limit is None else far | (d.exp() - d - 1 > limit)


def _distance(x: LossInputs) -> torch.Tensor:
    assert x.reference_logprobs is not None
    return x.reference_logprobs - x.logprobs


def _exp(d: torch.Tensor, clamp: float) -> torch.Tensor:
    """exp(d), continued along its tangent above d = clamp."""
    near = d.clamp(max=clamp)
    return near.exp() * (1 + d - near)


def _straight_through(value: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return slope + (value - slope).detach()
