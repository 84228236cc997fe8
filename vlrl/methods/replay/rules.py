"""Off-policy losses for stored rollouts (algo.stored.rule), and functions that decide which stored groups are drawn,
and in which steps.

    L = L_RL + coef * L_stored

Notation: o are the log-probabilities under the weights that sampled a completion, l those under the current weights, r
those under the reference. A rule is created once per run. Its optional method `keep` selects completions, before the
first gradient of an optimizer step. Its method `loss` returns a micro-batch's share of the loss, divided by counts of
the whole optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from vlrl.algo.effect import reads
from vlrl.algo.inputs import requires
from vlrl.algo.terms import ClipRange
from vlrl.config.base import Fraction, NonNegative, Positive, Rate


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayBatch:
    """Stored completions of a micro-batch, or of a whole optimizer step on this process: R completions with N tokens.
    """

    logprobs: torch.Tensor
    """[N] current log-probabilities l, with gradient."""
    sampler: torch.Tensor
    """[N] sampler log-probabilities o; with algo.stored.logprobs=own, those of the policy before the update."""
    reference: torch.Tensor | None = None
    """[N] reference log-probabilities r, for rules that require "reference"."""
    mask: torch.Tensor
    """[N] 1.0 on trained tokens, 0.0 on all others."""
    answer: torch.Tensor
    """[N] int64 index of each token's completion, 0..R-1."""
    advantages: torch.Tensor
    """[R] advantage of each completion."""
    rewards: torch.Tensor
    """[R] reward of each completion, as this run scores it."""
    correct: torch.Tensor
    """[R] bool: whether each completion is correct."""
    group: torch.Tensor
    """[R] int64 index of each completion's group. All kept completions of a group are on one process."""
    weights: torch.Tensor
    """[R] weight of the data row that each completion belongs to."""
    gain: torch.Tensor
    """[R] D = log p - log p(reference) of each completion, before this optimizer step; 0 without a reference."""
    kept: torch.Tensor
    """[R] bool: whether each completion is trained on."""
    total_tokens: float = 1.0
    """Number of trained tokens of the optimizer step, over all processes."""
    total_answers: float = 1.0
    total_pairs: float = 1.0
    """Number of pairs of kept completions of the same prompt in the optimizer step, over all processes."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[R] sums of `values` [N] over the trained tokens of each completion."""
        return torch.zeros(len(self.advantages), dtype=values.dtype, device=values.device).index_add(
            0, self.answer, values * self.mask)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """[R] means of `values` [N] over the trained tokens of each completion; 0 for a completion without any."""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    @property
    def ratio(self) -> torch.Tensor:
        """[N] log-ratio log p - log p(sampler), clamped to +-20."""
        return (self.logprobs - self.sampler).clamp(-20, 20)

    @property
    def above_reference(self) -> torch.Tensor:
        """[R] D = log p - log p(reference) of each completion at the current weights, with gradient."""
        assert self.reference is not None
        return self.sums(self.logprobs - self.reference)


class Rule(Protocol):
    def loss(self, x: ReplayBatch) -> torch.Tensor: ...


class Truncated:
    """loss = -sum_i w_i A_i sum_t l_t / tokens, where w_i = min(exp(mean_t(l - o)), cap) has no gradient. l and o are
    the current and the sampler's log-probabilities.

    This is the policy gradient with one truncated importance weight per completion, the geometric mean of its token
    ratios. At l = o the gradient is that of REINFORCE. The weight has the form of GSPO's ratio (arXiv 2507.18071); cap
    2 is our choice."""

    def __init__(self, cap: Rate = 2.0):
        self.cap = cap

    def loss(self, x: ReplayBatch) -> torch.Tensor:
        weight = x.means(x.ratio.detach()).exp().clamp(max=self.cap)
        return -((weight * x.advantages * x.weights)[x.answer] * x.logprobs * x.mask).sum() / max(x.total_tokens, 1.0)

    def clipped(self, x: ReplayBatch) -> torch.Tensor:
        return (x.means(x.ratio.detach()).exp() > self.cap)[x.answer]


class Clipped:
    """loss = -sum min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) / tokens, where w = exp(l - o) of each token. l and
    o are the current and the sampler's log-probabilities.

    This is PPO's clipped term (arXiv 1707.06347), relative to the weights that sampled. With algo.stored.batch=right
    this is RAFT++ (A Minimalist Approach to LLM Reasoning, 2504.11343). With algo.stored.logprobs=own this is the
    experience sharing of Swarm SAPO (2509.08721)."""

    def __init__(self, clip_low: ClipRange = 0.2, clip_high: ClipRange = 0.2):
        self.clip_low, self.clip_high = clip_low, clip_high

    def loss(self, x: ReplayBatch) -> torch.Tensor:
        w, a = x.ratio.exp(), (x.advantages * x.weights)[x.answer]
        worse = torch.minimum(w * a, w.clamp(1 - self.clip_low, 1 + self.clip_high) * a)
        return -(worse * x.mask).sum() / max(x.total_tokens, 1.0)

    def clipped(self, x: ReplayBatch) -> torch.Tensor:
        w, a = x.ratio.detach().exp(), x.advantages[x.answer]
        return ((w > 1 + self.clip_high) & (a > 0)) | ((w < 1 - self.clip_low) & (a < 0))


class ALol:
    """loss = -sum_i A'_i w_i sum_t l_t / completions, over completions with A > 0 only. l are the current
    log-probabilities, r those of the reference, and D = sum_t (l - r).

    `form` defines A' and w. ratio: A' = A and w = clip(exp(D), 1 - clip, 1 + clip) without gradient. free: A' = A and w
    = 1, so the gradient does not depend on the reference. kl: A' = A - beta D and w = 1. Advantage-Leftover Lunch RL
    (arXiv 2305.14718). In the paper A = R - V with a value head fitted to rewards of the reference's completions; here
    algo.stored.advantage=dr_grpo takes the mean reward of the group for V. clip 0.2 is our choice."""

    def __init__(self, form: Literal["ratio", "free", "kl"] = "ratio", clip: ClipRange = 0.2, beta: NonNegative = 0.1):
        self.form, self.clip, self.beta = form, clip, beta
        self.requires = frozenset[str]() if form == "free" else frozenset({"reference"})

    def keep(self, x: ReplayBatch) -> torch.Tensor:
        return x.advantages > 0

    def loss(self, x: ReplayBatch) -> torch.Tensor:
        advantages, weight = x.advantages, torch.ones_like(x.advantages)
        if self.form != "free":
            away = x.above_reference.detach().clamp(-20, 20)
            if self.form == "kl":
                advantages = advantages - self.beta * away
            else:
                weight = away.exp().clamp(1 - self.clip, 1 + self.clip)
        return -(advantages * weight * x.weights * x.sums(x.logprobs)).sum() / max(x.total_answers, 1.0)


@requires("reference")
class CoPG:
    """loss = -sum over pairs of [(R_b - R_b') sum_t l_t + (R_b' - R_b) sum_t l'_t] / pairs. A pair is any two stored
    completions of one prompt; the prime marks the second.

    l are the current log-probabilities, r those of the reference, and D = sum_t (l - r). R_b = R - beta D has no
    gradient. Contrastive Policy Gradient (arXiv 2406.19185): 1 / (2 beta) of the gradient of (R - R' - beta (D -
    D'))^2. At beta = 0, for completions sampled by the current weights, it is RLOO up to a factor. The influence of all
    other completions on one completion is a single number (`pull`), computed before the optimizer step, so a group may
    be split over several micro-batches."""

    def __init__(self, beta: NonNegative = 0.1):
        self.beta = beta

    def pull(self, x: ReplayBatch) -> torch.Tensor:
        """[R] sum of R_b - R_b' over the other completions of each completion's group."""
        retained = x.kept.to(x.rewards.dtype)
        worth = (x.rewards - self.beta * x.gain) * retained
        groups = int(x.group.max()) + 1 if len(x.group) else 0
        total, count = (worth.new_zeros(groups).index_add(0, x.group, v)[x.group] for v in (worth, retained))
        return (count * worth - total) * retained

    def loss(self, x: ReplayBatch) -> torch.Tensor:
        return -(self.pull(x) * x.weights * x.sums(x.logprobs)).sum() / max(x.total_pairs, 1.0)


@reads("outcome")
@requires("reference")
class WebRL:
    """loss = sum_i (beta D - A)^2 / completions, over correct completions whose mean probability exp(mean_t l) before
    the update is between `low` and `high`. l are the current log-probabilities, r those of the reference, and D =
    sum_t (l - r).

    WebRL (arXiv 2411.02337): replays successes whose perplexity under the actor is within [1 / high, 1 / low], and fits
    the policy to their advantage. Here a completion is one action, and the mean reward of its group stands for the
    critic (algo.stored.advantage=dr_grpo): A = R - V. The reference is algo.reference; in the paper it is the policy of
    the previous phase. beta 0.1 is our choice."""

    def __init__(self, beta: Rate = 0.1, low: Fraction = 0.5, high: Fraction = 0.95):
        if low > high:
            raise ValueError(f"low={low:g} is above high={high:g}: lower low, or raise high")
        self.beta, self.low, self.high = beta, low, high

    def keep(self, x: ReplayBatch) -> torch.Tensor:
        sure = x.means(x.logprobs.detach())
        return x.correct & (sure >= math.log(max(self.low, 1e-300))) & (sure <= math.log(max(self.high, 1e-300)))

    def loss(self, x: ReplayBatch) -> torch.Tensor:
        own = x.kept.to(x.rewards.dtype) * x.weights
        away = (self.beta * x.above_reference - x.advantages) ** 2
        present = x.sums(torch.ones_like(x.logprobs)) > 0  # trained tokens in this micro-batch
        return (own * away * present).sum() / max(x.total_answers, 1.0)


RULES: dict[str, Any] = {"truncated": Truncated, "clipped": Clipped, "a_lol": ALol, "copg": CoPG, "webrl": WebRL}


def uniform(groups: np.ndarray, ages: np.ndarray) -> np.ndarray:
    """[n] ones: all groups have the same sampling weight."""
    return np.ones(len(groups))


def by_advantage(groups: np.ndarray, ages: np.ndarray) -> np.ndarray:
    """[n] sampling weights: (largest reward - mean reward) of each group. A-LoL (arXiv 2305.14718) samples by
    advantage."""
    return groups["best"]


def recent(groups: np.ndarray, ages: np.ndarray, half_life: Rate = 10.0) -> np.ndarray:
    """[n] sampling weights 2^-(age / half_life), with ages in steps."""
    return 0.5 ** (ages / half_life)


DRAWS: dict[str, Any] = {"uniform": uniform, "by_advantage": by_advantage, "recent": recent}


def constant(step: int, k: Positive = 1) -> bool:
    """Returns whether `step` replays stored groups: every k-th step does."""
    return step % k == k - 1


def growing(step: int, first: Positive = 2, last: Positive = 8, over: Positive = 200) -> bool:
    """Returns whether `step` replays stored groups. The interval between replaying steps grows linearly from `first` to
    `last` over `over` steps. RoRecomp (arXiv 2509.25958); 2, 8 and 200 are our choices."""
    def so_far(steps: int) -> float:
        slope, early = (last - first) / over, min(steps, over)
        area = early / first if slope == 0 else math.log1p(slope * early / first) / slope
        return math.floor(area + (steps - early) / last + 1e-9)

    return so_far(step + 1) > so_far(step)


SCHEDULES: dict[str, Any] = {"constant": constant, "growing": growing}


def apply_keep(x: ReplayBatch, rule: Any) -> ReplayBatch:
    """Returns the stored completions `x` of a whole optimizer step, where those that the rule does not keep have
    kept=False and mask 0."""
    retained = x.kept & rule.keep(x) if hasattr(rule, "keep") else x.kept
    return replace(x, kept=retained, mask=x.mask * retained[x.answer])
