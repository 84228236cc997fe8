"""Policy terms of papers that look at one rollout at a time. Terms that look at several rollouts are in `group_terms`.

For some terms (CISPO, VESPO ...) the gradient is meaningful, but not the value. If a term covers a whole rollout, the
docstring names the algo.aggregation of its paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vlrl.algo.effect import FunctionUse, idle_when, reads
from vlrl.algo.inputs import LossInputs, Metrics, requires
from vlrl.algo.ratio import LARGEST_LOG, acts_through_ratio
from vlrl.algo.terms import ClipRange, clip_metrics, surrogate
from vlrl.config.base import Fraction, Positive, Rate
from vlrl.config.sections import active


def _without_attempts(use: FunctionUse) -> str:
    if any(settings.adds_members for _, settings in active(use.config)):
        return ""
    return ("no answer of a group is a second attempt, and without any the loss is ppo_clip; set algo.guided.use=join "
            "or replace")


@idle_when(_without_attempts)
@acts_through_ratio("clip_low", "clip_high", alone=False)
@requires("variant:guided")
def critique_grpo(x: LossInputs, shape: Rate = 0.1, clip_low: ClipRange = 0.2,
                  clip_high: ClipRange = 0.2) -> tuple[torch.Tensor, Metrics]:
    """[N] PPO's clipped term per token, except on the tokens of retries, which were sampled with a critique in the
    prompt. There the term is -A p / (p + shape), where p = exp(logp) under the prompt without the critique. This
    term is not clipped, and its gradient is largest for p near `shape`.

    Critique-GRPO (arXiv 2506.03106). For algo.guided.use=join."""
    clipped_term, metrics = surrogate(x, x.log_ratio.exp(), clip_low, clip_high)
    if "guided" not in x.variants:
        return clipped_term, metrics
    guided, p = x.spread(x.variants["guided"]), x.logprobs.exp()
    term = torch.where(guided, -x.advantages * p / (p + shape), clipped_term)
    clipped = metrics["clipped"] & ~guided
    return term, {**metrics, "clipped": clipped, "guided/term": (term.detach() * guided * x.mask).sum()}


@acts_through_ratio("clip_low", "clip_high")
def gspo(x: LossInputs, clip_low: ClipRange = 3e-4, clip_high: ClipRange = 4e-4) -> tuple[torch.Tensor, Metrics]:
    """[N] PPO's clipped term with one ratio per rollout, s = exp(mean_t (logp - old logp)). The gradient goes through
    the mean.

    GSPO (arXiv 2507.18071) eq. 5 and 7, clip ranges of section 5.1. With algo.aggregation=sequence_mean; with
    sequence_sum it is LUSPO (2602.05261)."""
    return surrogate(x, x.spread(x.sequence_mean(x.log_ratio)).exp(), clip_low, clip_high)


@acts_through_ratio("clip_low", "clip_high")
def gspo_token(x: LossInputs, clip_low: ClipRange = 3e-4, clip_high: ClipRange = 4e-4) -> tuple[torch.Tensor, Metrics]:
    """[N] like gspo, but with the ratio s_t = sg(s) p / sg(p) on token t, where s is the ratio of gspo, p the
    probability of the token, and sg stops the gradient. So s_t has the value of s. The gradient of each token's
    ratio is that of its own probability, so advantages may differ within a rollout.

    GSPO-token (arXiv 2507.18071) section 4.3."""
    mean = x.spread(x.sequence_mean(x.log_ratio.detach()))
    return surrogate(x, (mean + x.logprobs - x.logprobs.detach()).exp(), clip_low, clip_high)


@idle_when(lambda use: use.one_turn and f"{use.one_turn} gspo")
@acts_through_ratio("clip_low", "clip_high")
@requires("turns")
def gspo_turn(x: LossInputs, clip_low: ClipRange = 3e-4, clip_high: ClipRange = 4e-4) -> tuple[torch.Tensor, Metrics]:
    """[N] PPO's clipped term with one ratio per action (turn) of an episode. The ratio is the geometric mean of the
    ratios of the action's trained tokens, and is clipped as a unit; the gradient goes through the mean.

    GSPO (arXiv 2507.18071) eq. 5 and 7 with turns as sequences; the ratio is that of StepPO. For completions of one
    turn it equals gspo."""
    assert x.turns is not None
    _, action = torch.unique(torch.stack([x.rollout_id, x.turns]), dim=1, return_inverse=True)
    count = int(action.max()) + 1 if len(action) else 0
    total, tokens = (v.new_zeros(count).index_add(0, action, v) for v in (x.log_ratio * x.mask, x.mask))
    return surrogate(x, (total / tokens.clamp(min=1))[action].exp(), clip_low, clip_high)


@acts_through_ratio("tokens", "clip_low", "clip_high")
@requires("turns")
def ppo_macro(x: LossInputs, tokens: Positive = 5, clip_low: ClipRange = 0.2,
              clip_high: ClipRange = 0.2) -> tuple[torch.Tensor, Metrics]:
    """[N] PPO's clipped term with one ratio per macro action. A macro action is `tokens` consecutive trained tokens of
    a turn, or fewer at the end of the turn. Its ratio is the product of the tokens' ratios, and is clipped once. The
    term of a macro action is divided equally among its tokens.

    MA-RLHF (arXiv 2410.02743) with fixed n-grams, for algo.advantage=macro_gae. The log of the product is clamped to
    +-20. With tokens=1 the term is ppo_clip, and at a ratio of 1 its gradient is that of ppo_clip."""
    assert x.turns is not None
    action = torch.stack([x.rollout_id, x.turns])
    here = torch.arange(action.shape[1], device=action.device)
    begins = torch.ones_like(here, dtype=torch.bool)
    begins[1:] = (action[:, 1:] != action[:, :-1]).any(0)
    before = (x.mask > 0).long().cumsum(0) - (x.mask > 0).long()
    place = before - before[torch.where(begins, here, 0).cummax(0).values]  # among the trained tokens of the turn
    _, macro = torch.unique(torch.cat([action, place[None] // tokens]), dim=1, return_inverse=True)
    count = int(macro.max()) + 1 if len(macro) else 0
    product, size = (v.new_zeros(count).index_add(0, macro, v) for v in (x.log_ratio * x.mask, x.mask))
    per_token, metrics = surrogate(x, product.clamp(-20, 20)[macro].exp(), clip_low, clip_high)
    return per_token / size.clamp(min=1)[macro], metrics


def _one_bound(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cap, high = given.get("cap"), given.get("clip_high")
    if cap and high is not None:
        yield ("clip_high", f"algo.loss.cap={cap:g} is the tighter bound") if 1 + high >= cap else (
            "cap", "algo.clip_high is the tighter bound")


@acts_through_ratio("cap", "clip_low", "clip_high", hidden=_one_bound)
def cispo(x: LossInputs, cap: Rate | None = None, clip_low: ClipRange | None = None,
          clip_high: ClipRange | None = None) -> tuple[torch.Tensor, Metrics]:
    """[N] -sg(w) A logp per token, where w is the ratio clipped to bounds. Unlike in PPO, a clipped token keeps its
    gradient.

    There are two conventions for the bounds. `cap` is the largest w itself (ScaleRL 2510.13786: 5). `clip_low` and
    `clip_high` are distances from 1, so that w is in [1 - clip_low, 1 + clip_high]. All bounds that are set apply. If
    none is set, the cap is 5, which equals clip_low=1 with clip_high=4. MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5."""
    high = min(math.inf if cap is None else cap, math.inf if clip_high is None else 1 + clip_high)
    high = 5.0 if high == math.inf else high
    low = 0.0 if clip_low is None else max(0.0, 1 - clip_low)
    ratio = x.log_ratio.detach().exp()
    return (-ratio.clamp(low, high) * x.advantages * x.logprobs,
            clip_metrics(ratio, (ratio > high) | (ratio < low)))


@acts_through_ratio("tau_positive", "tau_negative")
def sapo(x: LossInputs, tau_positive: Rate = 1.0,
         tau_negative: Rate = 1.05) -> tuple[torch.Tensor, Metrics]:
    """[N] -(4 / tau) sigmoid(tau (r - 1)) A per token: a soft gate instead of a clip. tau is tau_positive for A > 0,
    else tau_negative.

    Soft Adaptive Policy Optimization (arXiv 2511.20347). With algo.aggregation=sequence_mean."""
    tau = torch.where(x.advantages > 0, tau_positive, tau_negative).to(x.logprobs.dtype)
    return -4 / tau * torch.sigmoid(tau * (x.log_ratio.exp() - 1)) * x.advantages, {}


@acts_through_ratio("clip_low", "clip_high", farthest={"clip_low": LARGEST_LOG, "clip_high": LARGEST_LOG})
def gmpo(x: LossInputs, clip_low: ClipRange = 0.4, clip_high: ClipRange = 0.4) -> tuple[torch.Tensor, Metrics]:
    """[N] -A exp(mean_t clipped log-ratio): the geometric mean of a rollout's token ratios. Log-ratios are clipped on
    one side only, at clip_high for A > 0 and at -clip_low otherwise.

    Geometric-Mean Policy Optimization (arXiv 2507.20673). With algo.aggregation=sequence_mean."""
    free = x.log_ratio
    clamped = free.clamp(-clip_low, clip_high)
    clipped = torch.where(x.advantages > 0, torch.minimum(free, clamped), torch.maximum(free, clamped))
    return (-x.advantages * x.spread(x.sequence_mean(clipped)).exp(),
            clip_metrics(free.exp(), clipped != free))


@acts_through_ratio("k_positive", "lambda_positive", "k_negative", "lambda_negative")
def vespo(x: LossInputs, k_positive: Rate = 2.0, lambda_positive: Rate = 3.0,
          k_negative: Rate = 3.0, lambda_negative: Rate = 2.0,
          from_sampler: bool = False) -> tuple[torch.Tensor, Metrics]:
    """[N] -sg(phi(w)) A logp per token, where phi(w) = e^lambda w^k e^(-lambda w), so that phi(1) = 1.

    w = exp(sum_t log-ratio) of the rollout, with log w within [log 1e-8, 20]. k and lambda depend on the sign of A.
    `from_sampler`: the ratio is relative to the engine's log-probabilities, if they are known, so that w includes the
    correction; then set algo.correction=none. VESPO (arXiv 2602.10693). With algo.aggregation=token_mean."""
    with torch.no_grad():
        ratio = x.log_ratio + x.sampler_gap if from_sampler else x.log_ratio
        log_w = x.spread(x.per_sequence(ratio).clamp(math.log(1e-8), 20))
        good = x.advantages >= 0
        k, lam = torch.where(good, k_positive, k_negative), torch.where(good, lambda_positive, lambda_negative)
        phi = (lam + k * log_w - lam * log_w.exp()).exp().to(x.logprobs.dtype)
    return -phi * x.advantages * x.logprobs, {}


@acts_through_ratio("tau")
def kimi(x: LossInputs, tau: Rate = 0.1) -> tuple[torch.Tensor, Metrics]:
    """[N] -A logp + tau/2 (sum_t (logp - old logp))^2 / length per token: mirror descent that stays near the policy
    that sampled.

    Summed over a rollout the gradient is -A grad log p + tau/2 grad (log p/p_old)^2: Kimi k1.5 (arXiv 2501.12599)
    section 2.3.2, with A = r - mean r (algo.advantage=dr_grpo) and algo.aggregation=sequence_sum. The paper does not
    give a value for tau."""
    distance = x.per_sequence(x.log_ratio) ** 2 / x.lengths.clamp(min=1)
    return -x.logprobs * x.advantages + tau / 2 * x.spread(distance), {}


@acts_through_ratio("delta_low", "delta_high", "cap")
def dppo_tv(x: LossInputs, delta_low: ClipRange = 0.2, delta_high: ClipRange = 0.2,
            cap: Rate = 20.0) -> tuple[torch.Tensor, Metrics]:
    """[N] -sg(min(r, cap)) A logp per token. A token is excluded if its probability has moved too far in the direction
    of its advantage: p - p_old > delta_high for A > 0, or p - p_old < -delta_low otherwise.

    Divergence Proximal Policy Optimization, binary total variation (arXiv 2602.04879). The bounds are differences of
    probabilities, not of ratios."""
    with torch.no_grad():
        moved = x.logprobs.exp() - x.old_logprobs.exp()
        keep = torch.where(x.advantages > 0, moved <= delta_high, moved >= -delta_low)
        ratio = x.log_ratio.exp()
    return -ratio.clamp(max=cap) * keep * x.advantages * x.logprobs, clip_metrics(ratio, ~keep)


@acts_through_ratio(like="a multiple of that")
@requires("stat:mean_logprob", "old_stat:mean_logprob")
def rover(x: LossInputs, scale: Rate = 1.0) -> tuple[torch.Tensor, Metrics]:
    """[N] (Q - sg(A + V'))^2 per token. Q = scale (logp - old logp) is the value of the token under a uniformly random
    policy, and V' is the mean of Q over the vocabulary at the next token (0 after the last token).

    ROVER (arXiv 2509.24981), with A = r - mean r (algo.advantage=dr_grpo) on every token."""
    value = x.stats["mean_logprob"].detach()
    mean_q = scale * (value - x.old_stats.get("mean_logprob", value))
    here = torch.arange(len(value), device=value.device)
    follows = (x.rollout_id.roll(-1) == x.rollout_id) & (here < len(value) - 1)
    after = torch.where(follows, (mean_q * x.mask).roll(-1), 0)
    return (scale * (x.logprobs - x.old_logprobs) - x.advantages - after) ** 2, {}


@acts_through_ratio("decay", "floor")
def mdpo(x: LossInputs, decay: Positive = 100, floor: Rate = 0.01) -> tuple[torch.Tensor, Metrics]:
    """[N] -r A + (r log r - r + 1) / t per token, where t falls linearly from 1 to `floor` over `decay` training steps.

    There is no clip. Several optimizer steps on one batch maximise E[r A] - KL(policy, policy that sampled) / t. The
    second term, whose sample mean is this KL, has no gradient in the first of these optimizer steps. Mirror Descent
    Policy Optimization (arXiv 2005.09814), with 10 optimizer steps per batch; floor 0.01 is our choice."""
    t = max(1 - x.step / decay, floor)
    log_r = x.log_ratio
    ratio = log_r.exp()
    return -ratio * x.advantages + (ratio * log_r - ratio + 1) / t, {"mdpo/t": t * x.mask.sum()}


@reads("outcome")
@acts_through_ratio("clip_low", "clip_high", alone=False)
@requires("entropy", "stat:top:{k}")
def simko(x: LossInputs, share: Fraction = 0.01, quantile: Fraction = 0.8, penalty: float = 1.1,
          above: float | None = None, k: Positive = 3, clip_low: ClipRange = 0.2,
          clip_high: ClipRange = 0.2) -> tuple[torch.Tensor, Metrics]:
    """[N] PPO's clipped term, changed on tokens whose entropy is above the given `quantile` of the entropies in their
    rollout.

    In a correct rollout, the fraction `share` of the gradient of logp at such a token is split equally between the `k`
    most probable tokens. In a rollout with A < 0, the term is multiplied by `penalty` if the sampled token is the most
    probable one. The task decides what is correct; with `above`, correct means reward > `above`. SimKO (arXiv
    2510.14807), with the values of its released training script."""
    assert x.entropy is not None
    top = x.stats[f"top:{k}"]
    fork = x.entropy > x.spread(_sequence_quantile(x, x.entropy, quantile))
    smooth = (x.spread(x.correct(above)) & fork) * share
    push = (1 - smooth) * (x.logprobs - x.logprobs.detach()) + smooth * (top - top.detach()).mean(-1)
    per_token, metrics = surrogate(x, replace(x, logprobs=x.logprobs.detach() + push).log_ratio.exp(), clip_low,
                                   clip_high)
    first = x.logprobs.detach() >= top[:, 0].detach() - 1e-4  # the two are computed differently, up to rounding
    return per_token * torch.where(fork & first & (x.advantages < 0), penalty, 1.0), metrics


def _sequence_quantile(x: LossInputs, values: torch.Tensor, q: float) -> torch.Tensor:
    """[R] the q-quantile of values [N] over the trained tokens of each rollout; 0 for a rollout without trained tokens
    in this micro-batch."""
    out = torch.zeros_like(x.lengths, dtype=torch.float32)
    for r in x.rollout_id.unique().tolist():
        own = values[(x.rollout_id == r) & (x.mask > 0)]
        if len(own):
            out[r] = torch.quantile(own.float(), q)
    return out
