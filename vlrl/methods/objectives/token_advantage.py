"""Advantage estimators with a value per token: each maps `Scores` to one array [T] per rollout, with 0 on tokens that
are not trained."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from vlrl.algo import grouped
from vlrl.algo.inputs import Scores, requires
from vlrl.config.base import Fraction, NonNegative
from vlrl.methods.objectives.turn_advantage import warn_once


@requires("tokens", "token_kl")
def reinforce_pp(s: Scores, gamma: Fraction = 1.0, eps: NonNegative = 1e-8) -> list[torch.Tensor]:
    """The advantage is (G - mean) / sqrt(var + eps), with mean and var over all trained tokens of the step and Bessel's
    correction. G_t = sum_{u >= t} gamma^(u - t) r_u is the return over the trained tokens of a completion.

    The last trained token has the reward of the completion. If the KL is part of the reward, every trained token also
    has -kl_coef * k1. There is no group baseline. REINFORCE++ (arXiv 2501.03262) section 3, whitened as in verl."""
    known = (~s.rewards.isnan()).tolist()
    trained = [np.asarray(mask, bool) & scorable for mask, scorable in zip(s.masks, known, strict=True)]
    penalties = [s.kl_coef * kl for kl in s.kl] or [np.zeros(len(mask)) for mask in trained]
    returns = [_returns(reward, penalty[mask], gamma) for reward, penalty, mask in
               zip(s.rewards.tolist(), penalties, trained, strict=True)]
    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *returns])
    white = grouped.whitened(flat, torch.ones_like(flat), eps).split([len(r) for r in returns])
    out = []
    for mask, values in zip(trained, white, strict=True):
        out.append(torch.zeros(len(mask), dtype=torch.float64))
        out[-1][torch.from_numpy(mask)] = values
    return out


def _returns(reward: float, penalty: np.ndarray, gamma: float) -> torch.Tensor:
    """[L] discounted return of each trained token. `penalty` [L] is subtracted from the tokens' rewards; `reward` is
    paid at the last token."""
    paid = (-penalty).tolist()
    if paid:
        paid[-1] += reward
    return torch.tensor([*accumulate(reversed(paid), lambda later, now: now + gamma * later)][::-1],
                        dtype=torch.float64)


@requires("steps")
def clip_delta(s: Scores, scale: NonNegative = 0.1, eta: float | None = None, normalize: bool = True,
               eps: NonNegative = 1e-4) -> list[torch.Tensor]:
    """The advantage A + scale * min(r_k - eta, 0) on the tokens of reasoning step k of a completion. r_k is the value
    of that reasoning step, and eta the mean of all values in the training step. A = R - mean of the group. Tokens
    outside reasoning steps have the advantage A. normalize: A is divided by (std of the group + eps).

    Clip and Delta (arXiv 2410.15115): Clip pays c_k = min(r_k - eta, 0) at step k, and Delta pays c_k - c_{k+1}, or c_k
    at the last step. From step k to the end Delta's payments add up to c_k, so that repeating a good step gains
    nothing."""
    base = grouped.normalized(s.rewards, s.group, eps, normalize)
    known = [value for own, r in zip(s.steps, s.rewards.tolist(), strict=True) if r == r for *_, value in own]
    if not known and bool((~s.rewards.isnan()).any()):
        warn_once("algo.advantage=clip_delta: no answer has step values, so this acts as grpo: add "
                  "task.parts=[process]")
    if eta is None and known:  # clipped, because the mean of equal values may differ from them by rounding
        eta = float(np.clip(np.mean(known), min(known), max(known)))
    out = []
    for value, mask, own in zip(base.tolist(), s.masks, s.steps, strict=True):
        tokens = torch.full((len(mask),), value if value == value else 0.0, dtype=torch.float64)
        for start, end, r in own if value == value else ():
            tokens[start:end] += scale * min(r - float(eta or 0.0), 0.0)
        out.append(torch.where(torch.from_numpy(np.asarray(mask, bool)), tokens, 0.0))
    return out
