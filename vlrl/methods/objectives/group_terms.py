"""Policy terms in which the loss of a rollout depends on other rollouts: those of its group, or all rollouts of an
optimizer step over all processes.

A term over a group needs no communication: all rollouts of the group are on one process, and their rewards are in every
micro-batch. Statistics over the whole optimizer step are computed in `prepare`, before the first micro-batch. They
reduce the influence of all other rollouts on a token to one number, so the loss of a single rollout has the gradient
that it would have in the loss of the whole step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from vlrl.algo.effect import reads
from vlrl.algo.inputs import LossInputs, Metrics, gather_values, requires
from vlrl.algo.ratio import acts_through_ratio
from vlrl.algo.terms import AboveOne, ClipRange, clip_metrics, surrogate
from vlrl.config.base import NonNegative, Rate, Share
from vlrl.distributed import comm

Prepared = dict[str, torch.Tensor]


@reads("outcome", alone={})
def nft(x: LossInputs, above: float | None = None, floor: Rate = 1.0, negative: NonNegative = 1.0,
        like: Literal["dr_grpo", "grpo", "none"] = "dr_grpo") -> tuple[torch.Tensor, Metrics]:
    """[N] -log r on the tokens of a correct rollout, and -log max((1 - q r) / (1 - q), floor) on those of any other
    rollout, where r is the ratio (at most e^10) and q the group's share of correct rollouts (within 0.02 .. 0.98).

    The floor changes the value, but not the gradient. The task decides what is correct; with `above`, correct means
    reward > `above`. A group whose rollouts are all correct or all wrong has no loss. `negative` is the weight of wrong
    rollouts. `like` sets the weight of a group: "dr_grpo" gives 1 - q, "grpo" gives sqrt((1 - q) / q), so that
    on-policy the gradient is that of Dr. GRPO or GRPO. The term uses rewards, not advantages. NFT (negative-aware,
    arXiv 2505.18116), with the values of its released training script and algo.aggregation=constant."""
    assert x.rewards is not None
    scorable, good = ~x.rewards.isnan(), x.correct(above)
    counts, hits = x.group_sum(scorable.to(x.logprobs.dtype)), x.group_sum(good.to(x.logprobs.dtype))
    q = (hits / counts.clamp(min=1)).clamp(0.02, 0.98)
    weight = {"dr_grpo": 1 - q, "grpo": ((1 - q) / q).sqrt(), "none": torch.ones_like(q)}[like]
    weight = weight * (scorable & (hits > 0) & (hits < counts)) * torch.where(good, 1.0, negative)
    log_r, q, good = x.log_ratio.clamp(max=10), x.spread(q), x.spread(good)
    rest = (1 - q * log_r.exp()) / (1 - q)
    rest = rest + (rest.clamp(min=floor) - rest).detach()
    return -torch.where(good, log_r, rest.log()) * x.spread(weight).to(x.logprobs.dtype), {}


@reads("outcome", alone={})
@requires("step", "{anchor}")
@dataclass(frozen=True)
class Pacs:
    """[N] binary cross-entropy of a rollout's score against its outcome, spread over the rollout's tokens.

    The score is z_i = s_i - mean of s_j over the other rollouts of the group, with s = beta sum_t (logp - anchor's
    logp). The outcome is y = 1 for a correct rollout, else 0. The task decides what is correct; with `above`, correct
    means reward > `above`. `balanced`: in a group of n rollouts with both outcomes, each rollout has the weight n / (2
    * number of rollouts with its outcome). PACS (arXiv 2509.02522), with algo.aggregation=sequence_sum. The anchor is
    the policy that sampled the rollouts, as in the released code, or the reference with anchor=reference. The term uses
    rewards, not advantages; unscorable and masked rollouts are excluded.

    With e_i = w_i (sigmoid(z_i) - y_i), where w_i is the rollout's weight and G the number of rollouts in the group,
    the derivative of the loss with respect to s_j is e_j - sum_{i != j} e_i / (G - 1), called "pull". So the loss of
    one rollout is its pull times s, plus a constant that makes the value right."""

    beta: Rate = 1.0
    above: float | None = None
    balanced: bool = True
    anchor: Literal["old", "reference"] = "old"

    def prepare(self, x: LossInputs) -> Prepared:
        """Returns "pull" and "value", [N] each: the derivative and the value of the loss of each token's rollout."""
        assert x.rewards is not None
        anchor = x.old_logprobs if self.anchor == "old" else x.reference_logprobs
        assert anchor is not None
        member = (~x.rewards.isnan() & (x.lengths > 0)).double()
        score = self.beta * x.per_sequence((x.logprobs - anchor).clamp(-20, 20).double()) * member
        size = x.group_sum(member)
        others = (size - 1).clamp(min=1)
        z = score - (x.group_sum(score) - score) / others
        y = x.correct(self.above).double()
        weight = member * (size > 1)
        if self.balanced:
            hits = x.group_sum(y * member)
            same = torch.where(y > 0, hits, size - hits)
            weight = torch.where((hits > 0) & (hits < size), weight * size / (2 * same.clamp(min=1)), weight)
        error = weight * (torch.sigmoid(z) - y)
        pull = (error - (x.group_sum(error) - error) / others) * member
        value = weight * binary_cross_entropy_with_logits(z, y, reduction="none")
        return {name: x.spread(v).to(x.mask.dtype) for name, v in (("pull", pull), ("value", value))}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        own = self.beta * (x.logprobs - x.logprobs.detach())
        return x.prepared["pull"] * own + x.prepared["value"] / x.spread(x.lengths).clamp(min=1), {}


@reads("outcome", alone={"weighted": False, "negative": 0})
@dataclass(frozen=True)
class Oreal:
    """[N] -logp A per token, normalised separately over correct and wrong rollouts. The loss of correct rollouts is
    multiplied by `positive` and divided by the number of their trained tokens. The loss of wrong rollouts is
    multiplied by `negative` and divided by the number of trained tokens of wrong rollouts. The task decides what is
    correct; with `above`, correct means reward > `above`.

    Behaviour cloning on best-of-N completions, and a policy gradient on the other completions, with the reward reshaped
    by the pass rate. OREAL (arXiv 2502.06781) as in its released trainer, without the token-level reward model, with
    algo.advantage=rloo, algo.aggregation=token_mean and kl_coef=0.01. `weighted`=false: correct rollouts are cloned
    with weight 1 instead of A. Unscorable rollouts have no loss.

    For wrong rollouts the released trainer computes exp(logp - sg(logp)) A with logp from the same forward pass, so the
    ratio is always 1. Its gradient is A grad logp, the same as that of -A logp here."""

    positive: NonNegative = 1.0
    negative: NonNegative = 0.5
    above: float | None = None
    weighted: bool = True

    def prepare(self, x: LossInputs) -> Prepared:
        """Returns "share", [N]: the factor by which each token's term is multiplied."""
        assert x.rewards is not None
        good, bad = x.correct(self.above), x.wrong(self.above)
        hits, misses = comm.total(float(x.lengths[good].sum()), float(x.lengths[bad].sum()))
        share = (good * (self.positive / max(hits, 1.0)) + bad * (self.negative / max(misses, 1.0))) * x.total_tokens
        return {"share": x.spread(share).to(x.mask.dtype)}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        a = x.advantages if self.weighted else torch.where(x.spread(x.correct(self.above)), 1.0, x.advantages)
        return -x.logprobs * a * x.prepared["share"], {}


@acts_through_ratio("clip_low", "clip_high", "pre_clip", alone=False)
@dataclass(frozen=True)
class StableReinforce:
    """[N] PPO's clipped term, with the log-ratio clamped to +-log(pre_clip) before it is exponentiated. Tokens whose
    advantage is more than `sigma` standard deviations from the step's mean are excluded.

    StableReinforce of R1-Reward (arXiv 2505.02835), following the paper's text. Mean and (population) standard
    deviation are over the trained tokens. The paper uses the advantages of Reinforce++."""

    clip_low: ClipRange = 0.2
    clip_high: ClipRange = 0.2
    pre_clip: AboveOne = 1e3
    sigma: Rate = 3.0

    def prepare(self, x: LossInputs) -> Prepared:
        """Returns "keep", [N]: 0 on excluded tokens, 1 on all others."""
        a, mask = x.advantages.double(), x.mask.double()
        n, total = comm.total(float(mask.sum()), float((a * mask).sum()))
        mean = total / max(n, 1.0)
        (squares,) = comm.total(float(((a - mean) ** 2 * mask).sum()))
        reach = self.sigma * (squares / max(n, 1.0)) ** 0.5
        return {"keep": ((a - mean).abs() <= reach * (1 + 1e-9) + 1e-12).to(x.mask.dtype)}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        bound = math.log(self.pre_clip)
        ratio, keep = x.log_ratio.clamp(-bound, bound).exp(), x.prepared["keep"]
        per_token, metrics = surrogate(x, ratio, self.clip_low, self.clip_high)
        return per_token * keep, clip_metrics(ratio, metrics["clipped"] | (keep == 0))


@acts_through_ratio("clip_low", "clip_high", alone=False)
@requires("step")
@dataclass(frozen=True)
class ClipCov:
    """[N] PPO's clipped term, where a few random tokens with a high covariance have no gradient.

    The covariance of a token is (A - mean A)(logp - mean logp), with means over the trained tokens of the step.
    Candidates are the tokens with a covariance between `cov_low` and `cov_high` whose gradient is not removed by the
    clip. Among the candidates, a number of tokens equal to `share` of all trained tokens (at least one) is drawn. The
    random choice depends on the seed, the step and the rollout, but not on micro-batches or processes. Clip-Cov of The
    Entropy Mechanism of RL (arXiv 2505.22617)."""

    share: Share = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    clip_low: ClipRange = 0.2
    clip_high: ClipRange = 0.2

    def prepare(self, x: LossInputs) -> Prepared:
        """Returns "keep", [N]: 0 on the randomly chosen tokens, 1 on all others."""
        cov, ratio, a = _covariance(x), x.log_ratio.exp(), x.advantages
        clipped = ((ratio > 1 + self.clip_high) & (a > 0)) | ((ratio < 1 - self.clip_low) & (a < 0))
        eligible = (cov > self.cov_low) & (cov < self.cov_high) & (x.mask > 0) & ~clipped
        drawn = _first(eligible, torch.zeros_like(cov), token_keys(x), _portion(x, self.share))
        return {"keep": (~drawn).to(x.mask.dtype)}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        ratio, keep = x.log_ratio.exp(), x.prepared["keep"]
        per_token, metrics = surrogate(x, ratio, self.clip_low, self.clip_high)
        return per_token * keep, clip_metrics(ratio, metrics["clipped"] | (keep == 0))


@acts_through_ratio("share", "coef")
@requires("step")
@dataclass(frozen=True)
class KlCov:
    """[N] -r A per token, unclipped. On the tokens with the highest covariance (see ClipCov), a fraction `share` of the
    step's trained tokens (at least one), a penalty coef |logp - old logp| is added.

    KL-Cov of The Entropy Mechanism of RL (arXiv 2505.22617). In the first optimizer step on a batch the penalty has no
    gradient, because logp = old logp. So KL-Cov needs rollout.updates or rollout.minibatches above 1."""

    share: Share = 2e-4
    coef: NonNegative = 1.0

    def prepare(self, x: LossInputs) -> Prepared:
        """Returns "held", [N]: 1 on tokens with the penalty, 0 on all others."""
        penalized = _first(x.mask > 0, -_covariance(x), token_keys(x), _portion(x, self.share))
        return {"held": penalized.to(x.mask.dtype)}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        log_r = x.log_ratio
        return -log_r.exp() * x.advantages + self.coef * x.prepared["held"] * log_r.abs(), {}


def token_keys(x: LossInputs) -> torch.Tensor:
    """[N] int64 pseudo-random keys of the tokens, from the seed, the step, the rollout and the token's position in the
    rollout. A token has the same key in any micro-batch and on any process."""
    _, counts = torch.unique_consecutive(x.rollout_id, return_counts=True)
    place = torch.arange(len(x.rollout_id), device=x.rollout_id.device)
    place = place - (counts.cumsum(0) - counts).repeat_interleave(counts)
    rollout = x.rollout_id if x.identity is None else x.spread(x.identity)
    key = torch.full_like(place, x.seed)
    for part in (torch.full_like(place, x.step), rollout, place):
        key = _mixed(key ^ _mixed(part))
    return key


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Hashes int64 numbers by splitmix64 (Steele et al. 2014). Products overflow on purpose."""
    z = z + (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ ((z >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return z ^ ((z >> 31) & (2**33 - 1))


def _covariance(x: LossInputs) -> torch.Tensor:
    """[N] float64 covariance of each token, as defined in ClipCov."""
    a, logp, mask = x.advantages.double(), x.logprobs.detach().double(), x.mask.double()
    n, sum_a, sum_l = comm.total(float(mask.sum()), float((a * mask).sum()), float((logp * mask).sum()))
    return (a - sum_a / max(n, 1.0)) * (logp - sum_l / max(n, 1.0))


def _portion(x: LossInputs, share: float) -> int:
    return max(int(share * x.total_tokens), 1)


def _first(eligible: torch.Tensor, values: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """[N] bool: marks the `count` tokens with the smallest values among the `eligible` tokens of all processes; ties
    are broken by key."""
    every_value, every_key = gather_values(values[eligible]), gather_values(keys[eligible])
    if len(every_key) <= count:
        return eligible
    order = every_key.argsort()
    order = order[every_value[order].argsort(stable=True)]
    value, key = every_value[order[count - 1]], every_key[order[count - 1]]
    return eligible & ((values < value) | ((values == value) & (keys <= key)))
