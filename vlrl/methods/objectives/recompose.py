"""Filters that choose which rollouts of a step are trained on: each function maps `Scores` to a boolean mask [R]. All
other rollouts are left out of every term and every count of the loss."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch

from vlrl.algo import grouped
from vlrl.algo.effect import idle, reads
from vlrl.algo.inputs import Scores, requires
from vlrl.config.base import Fraction, Positive, Rate

_STREAM = 21
"""Key of the random stream that `pf_ppo` uses."""
_EVERY = "algo.batch.{}=1: every rollout is trained on in every step"


@reads("outcome")
@idle(_EVERY.format("keep"), keep=1)
@idle(_EVERY.format("floor"), floor=1, buffered=False)
@requires("local")
def rorecomp(s: Scores, keep: Fraction = 0.5, decay: Positive = 200, floor: Fraction = 0.0,
             correct: float | None = None, part: str = "", buffered: bool = False) -> torch.Tensor:
    """Boolean mask [R] of the rollouts in priority batches: from each group the shortest `keep` of the correct
    completions, and the longest `keep` of the wrong ones (rounded up, ties included). In a compensation step the
    mask is true for all completions.

    The frequency of compensation steps falls from 1 to `floor` along a cosine over `decay` steps. A step compensates
    when the sum of the frequencies so far passes a whole number, so a resumed run has the same compensation steps.
    Advantages are computed over the whole group. correct, part: as in `right`. RoRecomp (arXiv 2509.25958), as
    described in the paper, except that a compensation batch is here the rest of the same step, sampled by the current
    policy. `buffered`: no step compensates; the rest is stored instead, and algo.stored.batch=rest replays it like the
    paper's replay buffer."""
    if not buffered and _compensates(s.step, decay, floor):
        return grouped.every_rollout(s)
    return _priority(s, keep, correct, part)


@reads("outcome")
@requires("local")
def rest(s: Scores, keep: Fraction = 0.5, correct: float | None = None, part: str = "") -> torch.Tensor:
    """Boolean mask [R] of the completions that `rorecomp` with the same options leaves out: long correct and short
    wrong ones."""
    return ~_priority(s, keep, correct, part) & ~s.rewards.isnan()


@reads("outcome")
@requires("local")
def right(s: Scores, correct: float | None = None, part: str = "") -> torch.Tensor:
    """Boolean mask [R] of the completions that the task calls correct. With `correct` or `part`, the reward, or the
    reward part `part`, must be above `correct`. With this filter the loss is that of RAFT++ (arXiv 2504.11343),
    which trains on correct completions only."""
    return grouped.correct(s, part, correct)


@reads("reward")
def pf_ppo(s: Scores, policy: Literal["best_random", "best_worst", "square"] = "best_worst", keep: Fraction = 0.5,
           best: Rate = 0.4, others: Rate = 0.1) -> torch.Tensor:
    """Boolean mask [R] of the fraction `keep` of each group (rounded up), drawn without replacement with weights from
    the rewards.

    The weights depend on `policy`. best_random: `best` for the largest reward, `others` for all others. best_worst: 1
    for the largest and the smallest reward, 0 for all others. square: R^2. Unscorable completions and those of weight 0
    are never chosen. PF-PPO: Policy Filtration for RLHF (arXiv 2409.06957), which draws with replacement. It is meant
    for rewards of a reward model; the paper takes the `policy` under which the reward predicts the true score best."""
    most, least = grouped.largest(s.rewards, s.group), grouped.smallest(s.rewards, s.group)
    top, bottom = s.rewards == most, s.rewards == least
    weights = {"best_random": torch.where(top, best, others), "best_worst": (top | bottom).double(),
               "square": s.rewards ** 2}[policy].double()
    weights = torch.where(s.rewards.isnan(), 0.0, weights)
    chosen = torch.zeros_like(top)
    for number in s.group.unique().tolist():
        places = torch.nonzero((s.group == number) & (weights > 0))[:, 0]
        draw = np.random.default_rng([s.seed, _STREAM, s.step, number]).random(len(places))
        keys = torch.from_numpy(np.log1p(-draw)) / weights[places]  # the largest win: Efraimidis and Spirakis 2006
        count = math.ceil(keep * int((s.group == number).sum()))
        chosen[places[keys.sort(descending=True).indices[:count]]] = True
    return chosen


def _priority(s: Scores, keep: float, correct: float | None, part: str) -> torch.Tensor:
    good = grouped.correct(s, part, correct)
    wrong = ~good & ~s.rewards.isnan()
    return _first(good, s.lengths, s.group, keep) | _first(wrong, -s.lengths, s.group, keep)


def _compensates(step: int, decay: int, floor: float) -> bool:
    def so_far(steps: int) -> int:
        falling = min(steps, decay)
        area = falling / 2 + decay / (2 * math.pi) * math.sin(math.pi * falling / decay)
        return math.floor(floor * steps + (1 - floor) * area + 1e-9)
    return so_far(step + 1) > so_far(step)


def _first(among: torch.Tensor, key: torch.Tensor, group: torch.Tensor, keep: float) -> torch.Tensor:
    """[R] bool: of each group's rollouts in `among` [R], the fraction `keep` (rounded up) with the smallest `key`."""
    chosen = torch.zeros_like(among)
    for number in group[among].unique().tolist():
        own = among & (group == number)
        count = math.ceil(keep * int(own.sum()))
        if count:
            chosen |= own & (key <= key[own].sort().values[count - 1])
    return chosen
