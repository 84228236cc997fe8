"""Advantage estimators of papers, from the rewards of each group or of the whole step: each maps `Scores` to one
advantage per rollout, [R]. reinforce_pp and clip_delta return an array [T] per rollout, with 0 on tokens that are
not trained."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from vlrl.algo import grouped
from vlrl.algo.advantage import centred, nan_to_zero, std
from vlrl.algo.effect import reads
from vlrl.algo.grouped import whitened
from vlrl.algo.inputs import Scores, requires
from vlrl.algo.state import Saved
from vlrl.config.base import Beta, Fraction, NonNegative, Rate
from vlrl.methods.objectives.turn_advantage import warn_once


def batch_std(s: Scores, eps: NonNegative = 1e-4) -> torch.Tensor:
    """The advantage (R - mean of the group) / (std of the raw rewards of the whole step + eps), with Bessel's
    correction.

    Lite PPO: Tricks or Traps (arXiv 2508.08221) section 4; goes with algo.aggregation=token_mean."""
    return nan_to_zero(centred(s) / (std(s.rewards) + eps))


@requires("parts")
def gdpo(s: Scores, eps: NonNegative = 1e-4) -> torch.Tensor:
    """Normalizes each reward part before summing. The advantage is (S - mean) / (std + eps), with mean and std over the
    whole step and Bessel's correction. S = sum over reward parts of weight * (part - mean) / (std + eps), with mean
    and std over the group. The combined reward is not used.

    GDPO: group reward-decoupled normalization (arXiv 2601.05242); as TRL's normalize_then_sum, except that a group
    whose completions are equal in every part has exactly 0 here."""
    unscorable = s.rewards.isnan()
    summed, quiet = torch.zeros_like(s.rewards), torch.ones_like(unscorable)
    for name, weight in s.part_weights.items():
        part = torch.where(unscorable, torch.nan, s.parts[name])
        summed += nan_to_zero(grouped.normalized(part, s.group, eps) * weight)
        quiet &= grouped.all_equal(part, s.group)
    summed = torch.where(unscorable, torch.nan, summed)
    return nan_to_zero(torch.where(quiet, 0.0, (summed - summed.nanmean()) / (std(summed) + eps)))


def reinforce_pp_baseline(s: Scores, eps: NonNegative = 1e-8) -> torch.Tensor:
    """The advantage is (x - mean) / sqrt(var + eps), where x = R - mean of the group, and mean and var are over all
    trained tokens of the step. So longer completions weigh more in mean and variance (with Bessel's correction).

    REINFORCE++ with baseline (arXiv 2501.03262), as in verl. In a group with equal rewards x is 0, and the advantage is
    minus the scaled mean of the step."""
    values = centred(s)
    return nan_to_zero(whitened(values, torch.where(values.isnan(), 0.0, s.lengths), eps))


@requires("local", "greedy")
def remax(s: Scores) -> torch.Tensor:
    """The advantage R - reward of the greedy completion of the same prompt, which is generated as a baseline.

    ReMax (arXiv 2310.10505) algorithm 1. The advantage is 0 if the greedy completion is unscorable."""
    assert s.greedy is not None
    return nan_to_zero(s.rewards - s.greedy)


def gpg(s: Scores, f_norm: Rate = 1.0) -> torch.Tensor:
    """The advantage alpha * (R - mean of the group) / f_norm, where alpha = number of rollouts / number of rollouts in
    groups whose rewards differ, counted over the whole step. f_norm: the paper's constant F_norm.

    GPG: group policy gradient (arXiv 2504.02546) eq. 7; goes with algo.loss=reinforce. In the denominator of alpha verl
    counts the rollouts whose reward is not 0."""
    scorable = ~s.rewards.isnan()
    valid = scorable & ~grouped.all_equal(s.rewards, s.group)
    return nan_to_zero(centred(s) * (scorable.sum() / valid.sum().clamp(min=1)) / f_norm)


@requires("local")
def opo(s: Scores) -> torch.Tensor:
    """The advantage R - sum_j L_j R_j / sum_j L_j, with sums over the group and lengths L_j: the baseline of least
    variance, in which longer completions weigh more.

    On-policy RL with optimal reward baseline (OPO, arXiv 2505.23585) eq. 8."""
    lengths = torch.where(s.rewards.isnan(), torch.nan, s.lengths)
    weights = torch.where(grouped.total(lengths, s.group) > 0, lengths, torch.ones_like(lengths))
    baseline = grouped.total(s.rewards * weights, s.group) / grouped.total(
        torch.where(s.rewards.isnan(), torch.nan, weights), s.group)
    return nan_to_zero(torch.where(grouped.all_equal(s.rewards, s.group), 0.0, s.rewards - baseline))


@requires("local")
def pass_at_k(s: Scores, normalize: bool = False, eps: NonNegative = 1e-6) -> torch.Tensor:
    """The advantage is R_best - R_second for the best completion of the group, and 0 for all others; 0 for all if
    several share the best reward. normalize: divided by (std of the group + eps).

    This optimizes the best of k completions. arXiv 2503.19595, as verl's grpo_passk."""
    best = grouped.largest(s.rewards, s.group)
    is_best = s.rewards == best
    second = grouped.largest(torch.where(is_best, torch.nan, s.rewards), s.group)
    alone = is_best & (grouped.total(is_best.to(s.rewards.dtype), s.group) == 1) & second.isfinite()
    values = torch.where(alone, best - second, 0.0)
    return nan_to_zero(values / (grouped.std(s.rewards, s.group) + eps)) if normalize else values


@requires("local")
def maxrl(s: Scores) -> torch.Tensor:
    """The advantage is (R - mean) / mean if the mean reward of the group is above 0, else 0. With this advantage the
    policy gradient is that of the log-likelihood of success.

    Maximum Likelihood Reinforcement Learning (arXiv 2602.02710); for rewards of at least 0."""
    mean = grouped.mean(s.rewards, s.group)
    return nan_to_zero(torch.where(mean > 0, centred(s) / mean, 0.0))


@reads("outcome", alone={})
@requires("local")
def w_reinforce(s: Scores, positive: NonNegative = 0.1, correct: float | None = None, part: str = "") -> torch.Tensor:
    """The advantage is `positive` for a correct completion and -1 for a wrong one, without a baseline. The task decides
    what is correct. If `correct` or `part` is set, a completion is correct when its reward, or its reward part
    `part`, is above `correct`.

    The surprising effectiveness of negative reinforcement (W-REINFORCE, arXiv 2506.01347): positive = 1 is REINFORCE on
    rewards of +-1."""
    right = grouped.correct(s, part, correct)
    return torch.where(right, positive, -torch.ones_like(s.rewards)).masked_fill(s.rewards.isnan(), 0.0)


@reads("outcome", alone={})
@requires("local")
def nsr(s: Scores, correct: float | None = None, part: str = "") -> torch.Tensor:
    """The advantage is -1 for a wrong completion and 0 for a correct one, so only wrong completions are trained on.
    `correct` and `part`: see w_reinforce. Negative sample reinforcement (arXiv 2506.01347)."""
    return w_reinforce(s, 0.0, correct, part)


class EmaStd(Saved):
    """The advantage (R - mean of the group) / (std of the task + eps). The std of a task is sqrt(max(m2 - m1^2,
    least^2)), where m1 and m2 are exponential averages over steps, including the current one: m1 of the mean of the
    task's rewards, m2 of the mean of their squares.

    In a group with any |A| above `limit`, R - mean is divided by the group's std + eps instead (without Bessel's
    correction). EMA-GRPO, OneThinker (arXiv 2512.03043), as in its code. It suits mixtures, because the rewards of
    different tasks have different spreads."""

    saved = ("moments",)

    def __init__(self, decay: Beta = 0.99, limit: Rate = 5.0, least: Rate = 1e-3, eps: NonNegative = 1e-6):
        self.decay, self.limit, self.least, self.eps = decay, limit, least, eps
        self.moments: dict[str, list[float]] = {}
        """The averages [m1, m2] by task name."""

    def __call__(self, s: Scores) -> torch.Tensor:
        spread = torch.ones_like(s.rewards)
        for number in s.task.unique().tolist():
            mine = s.task == number
            spread[mine] = self._std(s.task_names[int(number)], s.rewards[mine & ~s.rewards.isnan()])
        moved = centred(s)
        values = moved / (spread + self.eps)
        wild = grouped.largest(values.abs(), s.group) > self.limit
        own = grouped.mean(moved ** 2, s.group).sqrt()
        return nan_to_zero(torch.where(wild, moved / (own + self.eps), values))

    def _std(self, task: str, rewards: torch.Tensor) -> float:
        if len(rewards):
            now = [float(rewards.mean()), float((rewards ** 2).mean())]
            before = self.moments.get(task, now)
            self.moments[task] = [self.decay * old + (1 - self.decay) * new
                                  for old, new in zip(before, now, strict=True)]
        m1, m2 = self.moments.get(task, (0.0, 0.0))
        return max(m2 - m1 ** 2, self.least ** 2) ** 0.5


@requires("tokens", "token_kl")
def reinforce_pp(s: Scores, gamma: Fraction = 1.0, eps: NonNegative = 1e-8) -> list[torch.Tensor]:
    """The advantage is (G - mean) / sqrt(var + eps), with mean and var over all trained tokens of the step and Bessel's
    correction. G_t = sum_{u >= t} gamma^(u - t) r_u is the return over the trained tokens of a completion.

    r_u is the reward of the completion at the last trained token, else 0. With algo.kl_in=reward, kl_coef * (log
    p(sampler) - log p(reference)) is subtracted from the reward of every trained token. There is no group baseline.
    REINFORCE++ (arXiv 2501.03262) section 3, whitened as in verl."""
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
    """The advantage A + scale * min(r_k - eta, 0) on the tokens of reasoning step k of a completion, where r_k is the
    value of that reasoning step. A = R - mean of the group. Tokens outside reasoning steps have the advantage A.
    eta: by default the mean of all values in the training step. normalize: A is divided by (std of the group + eps).

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
