"""Estimators of the KL to the reference: `(LossInputs, options) -> per_token [N]`, with d = reference logp - logp.

In the loss they are added after weights and correction. Nothing but an exponential is clamped: exp(d) goes on along its
tangent from d = `clamp` on, so that the gradient of a token is at most e^clamp and a token that has collapsed is still
pulled back. J. Schulman, Approximating KL Divergence (2020) has k1, k2 and k3; which of them has a useful gradient as a
loss is in A Comedy of Estimators (arXiv 2506.09477) and in docs/objectives.md."""

from __future__ import annotations

from typing import Literal

import torch

from vlrl.algo.inputs import LossInputs
from vlrl.algo.named import Bound, parameters
from vlrl.config.base import Rate


def k1(x: LossInputs) -> torch.Tensor:
    """-d. Unbiased, but as a loss its gradient is zero in expectation: for the reward. -> [N]."""
    return -_distance(x)


def k2(x: LossInputs) -> torch.Tensor:
    """d^2 / 2. Biased as a value; its gradient is that of the reverse KL. -> [N]."""
    return _distance(x) ** 2 / 2


def k3(x: LossInputs, clamp: Rate = 20.0, limit: Rate | None = None) -> torch.Tensor:
    """exp(d) - d - 1, at most `limit`: unbiased and never negative; GRPO (arXiv 2402.03300) eq. 4. -> [N].

    limit=10 is verl's and EasyR1's; above it a token has no gradient."""
    d = _distance(x)
    value = _exp(d, clamp) - d - 1
    return value if limit is None else value.clamp(max=limit)


def k3_bounded(x: LossInputs, clamp: Rate = 3.0) -> torch.Tensor:
    """k3 with a low `clamp`: the same up to d = 3, and then no token outweighs the others of an optimizer step. With
    `clamp` 20 one at d = 12 has the gradient of 160,000. -> [N]."""
    return k3(x, clamp)


def k1_plus(x: LossInputs) -> torch.Tensor:
    """The value of k1 with the gradient of k2 (straight-through), as in verl. -> [N]."""
    return _straight_through(k1(x), k2(x))


def k3_plus(x: LossInputs, clamp: Rate = 20.0, limit: Rate | None = None) -> torch.Tensor:
    """The value of k3 with the gradient of k2 (straight-through), as in verl. -> [N]."""
    return _straight_through(k3(x, clamp, limit), k2(x))


def k3_unbiased(x: LossInputs, clamp: Rate = 20.0, level: Literal["token", "sequence"] = "token") -> torch.Tensor:
    """r * k3, r = the ratio to the weights that begin the update, not clipped: for answers of these weights it is
    unbiased at every optimizer step, and so is its gradient. -> [N].

    Not for answers of older weights or another sampler: algo.correction does not multiply the KL.

    `level` of the ratio: of each token, or exp(mean_t log-ratio) of its rollout. DeepSeek-V3.2 (arXiv 2512.02556)."""
    log_r = x.log_ratio if level == "token" else x.spread(x.sequence_mean(x.log_ratio))
    return log_r.exp() * k3(x, clamp)


def k3_score(x: LossInputs, clamp: Rate = 20.0, from_sampler: bool = False) -> torch.Tensor:
    """w * k3, w = exp(logp - sg(logp)) = 1: adds the gradient that sampling has, which k3 alone lacks. -> [N].

    `from_sampler`: w = exp(logp - the engine's logp), the ratio to the old weights where the engine does not know it.
    Arxiv 2506.09477 section 4; the default of NeMo-RL."""
    log_w = x.log_ratio + x.sampler_gap if from_sampler else x.logprobs - x.logprobs.detach()
    return log_w.clamp(-20, 20).exp() * k3(x, clamp)


def clamped(kl: Bound, x: LossInputs) -> torch.Tensor | None:
    """[N] bool: tokens whose exponential is clamped or whose value is at its limit; None without such an option."""
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
    """exp(d), and its tangent from d = clamp on."""
    near = d.clamp(max=clamp)
    return near.exp() * (1 + d - near)


def _straight_through(value: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return slope + (value - slope).detach()
