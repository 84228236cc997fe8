"""Advantages of a step's rollouts from their rewards: `Scores -> [R]`, or R arrays [T] for advantages per token.

R is the number of rollouts, n the number of scorable completions of a group. Unscorable rollouts (reward NaN) are
excluded from all statistics and have advantage 0. Where a formula subtracts the group mean, a group of equal rewards
has advantages of exactly 0 (in reinforce_pp_baseline: before whitening). A function that only needs the groups of its
own process requires "local"."""

from __future__ import annotations

import torch

from vlrl.algo import grouped
from vlrl.algo.inputs import Scores, requires
from vlrl.config.base import NonNegative


@requires("local")
def grpo(s: Scores, eps: NonNegative = 1e-4) -> torch.Tensor:
    """The advantage (reward - mean) / (std + eps), with mean and standard deviation of the group (Bessel's correction).
    DeepSeekMath (arXiv 2402.03300) section 4.1.2; eps as in TRL."""
    return nan_to_zero(grouped.normalized(s.rewards, s.group, eps))


@requires("local")
def dr_grpo(s: Scores) -> torch.Tensor:
    """The advantage reward - mean of the group, without division by the standard deviation, so that easy and hard
    prompts keep their weight. Dr. GRPO (arXiv 2503.20783), which also uses algo.aggregation=constant."""
    return nan_to_zero(centred(s))


def rloo(s: Scores, normalize: bool = False, eps: NonNegative = 1e-4) -> torch.Tensor:
    """The advantage is the reward minus the mean of the group's other completions, i.e. n / (n - 1) * (reward - mean)
    in a group of n. RLOO (arXiv 2402.14740); for TRL's version set algo.kl_in=reward. normalize: the advantages A
    become (A - mean) / (std + eps), with mean and std over the whole step."""
    n = grouped.count(s.rewards, s.group)
    values = centred(s) * (n / (n - 1))
    if normalize:
        quiet = grouped.all_equal(s.rewards, s.group)
        values = torch.where(quiet, 0.0, (values - values.nanmean()) / (std(values) + eps))
    return nan_to_zero(values)


def centred(s: Scores) -> torch.Tensor:
    return grouped.centred(s.rewards, s.group)


def std(values: torch.Tensor) -> torch.Tensor:
    """Standard deviation of all values except NaN, with Bessel's correction."""
    return values[~values.isnan()].std() if (~values.isnan()).sum() > 1 else values.new_tensor(torch.nan)


def nan_to_zero(values: torch.Tensor) -> torch.Tensor:
    """Replaces NaN (an unscorable rollout, or a group without statistics) with 0."""
    return torch.where(values.isnan(), 0.0, values)
