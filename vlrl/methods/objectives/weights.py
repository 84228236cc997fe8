"""Weights on tokens or rollouts: each function maps (LossInputs, options) to [N] weights without gradient.

Weights of algo.weights multiply the policy term, and weights of algo.kl_weights the KL. The counts that the aggregation
divides by do not change. Nearly all policy terms are proportional to the advantage, and for these a positive weight
scales the advantage."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any
from unicodedata import east_asian_width

import numpy as np
import torch
from pydantic import Field

from vlrl.algo.effect import FunctionUse, idle, idle_when, reads
from vlrl.algo.inputs import LossInputs, gather_values, requires
from vlrl.config.base import NonNegative, Share
from vlrl.monitoring.mismatch import samples_as_it_trains


@idle("a share of 1 keeps every token", share=1)
@requires("entropy", "step")
@dataclass(frozen=True)
class TopEntropy:
    """[N] 1 on the tokens with the highest entropy (the fraction `share` of all), 0 on all others.

    The threshold is the quantile 1 - share of the entropies of all trained tokens of the optimizer step, over all
    processes. Beyond the 80/20 Rule (arXiv 2506.01939)."""

    share: Share = 0.2

    def prepare(self, x: LossInputs) -> dict[str, torch.Tensor]:
        """Returns "keep", [N]: 1 on the tokens with the highest entropy, 0 on all others."""
        assert x.entropy is not None
        every = gather_values(x.entropy[x.mask > 0].double()).cpu().numpy()
        threshold = float(np.quantile(every, 1 - self.share)) if len(every) else math.inf
        return {"keep": ((x.entropy.double() >= threshold) & (x.mask > 0)).to(x.mask.dtype)}

    def __call__(self, x: LossInputs) -> torch.Tensor:
        return x.prepared["keep"]


STRATEGIC_GRAMS = (
    "let's try", "let me try", "let's think", "let me think", "let's check", "let me check", "let's verify",
    "let me verify", "let's consider", "let me consider", "we need to", "we can use", "first, i", "next, i", "wait",
    "alternatively", "on the other hand", "another approach", "another way", "to solve this", "this means that",
    "going back", "looking again", "hold on")
"""English phrases of planning, checking and turning back: the default phrases of `Hicra`, and a starting point for your
own list."""


@reads("sign")
@idle("alpha is 0", alpha=0)
@requires("texts")
@dataclass(frozen=True)
class Hicra:
    """[N] 1 + alpha on planning tokens with A > 0, 1 - alpha on planning tokens with A < 0, and 1 on all other tokens.
    So A becomes A + alpha |A| on planning tokens, which are the tokens that belong to one of `phrases`.

    Phrases are found in the text of a completion, case-insensitively and whatever its tokens are: as whole words, or at
    any position in scripts without spaces. The default phrases are English. HICRA (Emergent Hierarchical Reasoning,
    arXiv 2509.03646), which mines such phrases from the model's own completions."""

    alpha: NonNegative = 0.2
    phrases: tuple[str, ...] = STRATEGIC_GRAMS

    def __post_init__(self) -> None:
        if not any(p.strip() for p in self.phrases):
            raise ValueError("phrases is empty: give at least one phrase, e.g. phrases=['wait']")

    def __call__(self, x: LossInputs) -> torch.Tensor:
        planning = torch.tensor(planning_tokens(x.texts, x.rollout_id.tolist(), self.phrases),
                                dtype=torch.bool, device=x.mask.device)
        return torch.where(planning, 1 + self.alpha * x.advantages.sign(), 1.0)


def planning_tokens(texts: Any, rollout_id: list[int], phrases: tuple[str, ...]) -> list[bool]:
    """[N] whether each token is part of a phrase, from the text of each token. A phrase never spans two rollouts."""
    longest_first = sorted((p.lower().strip() for p in phrases if p.strip()), key=len, reverse=True)
    pattern = re.compile("|".join(map(_phrase, longest_first)))
    lower = [t.lower() for t in texts]
    marked = [False] * len(lower)
    for first, last in _runs(rollout_id):
        ends = list(accumulate(len(t) for t in lower[first:last]))
        place = 0
        for match in pattern.finditer("".join(lower[first:last])):
            while ends[place] <= match.start():
                place += 1
            for i in range(place, last - first):
                marked[first + i] = marked[first + i] or bool(lower[first + i])
                if ends[i] >= match.end():
                    break
    return marked


def _phrase(text: str) -> str:
    """A regular expression that finds the phrase as whole words. If the phrase begins or ends in a script without
    spaces (Chinese, Japanese), any text may precede or follow there."""
    before, after = ("" if east_asian_width(end) in "WF" else edge
                     for end, edge in ((text[0], r"(?<!\w)"), (text[-1], r"(?!\w)")))
    return before + "\\s+".join(map(re.escape, text.split())) + after


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    edges = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
    return list(pairwise([*edges, len(ids)]))


@idle("low and high are 1", low=1, high=1)
def difficulty(x: LossInputs, low: NonNegative = 0.5, high: NonNegative = 1.5) -> torch.Tensor:
    """[N] low + (high - low) * d, where d in [0, 1] is the difficulty of the data row, 1 = hardest. The weight is 1 for
    a row without a difficulty.

    Harder samples weigh more, as in GUI-G1 (arXiv 2505.15810). The paper's weight depends on the relative box size; put
    such a weight into the row's `weight`, which always applies."""
    assert x.difficulty is not None
    d = x.difficulty.to(x.mask.dtype)
    return x.spread(torch.where(d.isnan(), 1.0, low + (high - low) * d))


@reads("outcome", "sign")
def dads(x: LossInputs, above: float | None = None) -> torch.Tensor:
    """[N] 1 - exp(-e (1 - d)) on tokens with A > 0, where d is the group's share of rollouts that are not correct and e
    = 2.718... The weight is 1 on all other tokens, and if d is 0 or 1.

    For algo.kl_weights: the harder the sample, the less the KL restrains its correct rollouts. The task decides what is
    correct; with `above`, correct means reward > `above`. Difficulty-adaptive divergence shaping of APO (arXiv
    2506.21655), as in its released code."""
    assert x.rewards is not None
    count, hits = (x.group_sum(v.to(x.mask.dtype)) for v in (~x.rewards.isnan(), x.correct(above)))
    d = x.spread(1 - hits / count.clamp(min=1))
    return torch.where((x.advantages > 0) & (d > 0) & (d < 1), 1 - torch.exp(-math.e * (1 - d)), 1.0)


@reads("outcome")
def stcr(x: LossInputs, base: Annotated[float, Field(gt=1)] = 1.00001, above: float | None = None) -> torch.Tensor:
    """[N] 2 - base^-(L - L_c) on rollouts that are not correct and longer than L_c, the mean length of the group's
    correct rollouts. The weight is 1 on all other rollouts, and in groups without a correct rollout.

    So rambling wrong completions count more. The task decides what is correct; with `above`, correct means reward >
    `above`. Unscorable rollouts have weight 1. Suboptimal trajectory complexity regularization of APO (arXiv
    2506.21655), as in its released code."""
    assert x.rewards is not None
    good = x.correct(above)
    hits, total = x.group_sum(good.to(x.lengths.dtype)), x.group_sum(x.lengths * good)
    excess = x.lengths - total / hits.clamp(min=1)
    longer = ~good & ~x.rewards.isnan() & (hits > 0) & (excess > 0)
    return x.spread(torch.where(longer, 2 - torch.exp(-math.log(base) * excess), 1.0)).to(x.mask.dtype)


def _never_away(use: FunctionUse) -> str:
    if not use.config.rollout.one_update or not samples_as_it_trains(use.config):
        return ""
    return ("with one optimizer step per batch, the trained weights are those that sampled, so no answer has become "
            "unlikely; raise rollout.minibatches or rollout.updates")


@reads("sign")
@idle_when(_never_away)
def off_policy_sequence_mask(x: LossInputs, delta: float = 0.1) -> torch.Tensor:
    """[N] 0 on tokens with A < 0 in a rollout with mean_t (logp(sampled) - logp) > delta, 1 on all others.

    logp(sampled) is the engine's log-probability if it is known, else the log-probability that the trainer computed
    with the weights that sampled the rollout. DeepSeek-V3.2 (arXiv 2512.02556) eq. 9; the paper does not give a value
    for delta."""
    sampled = x.old_logprobs if x.sampler_logprobs is None else x.sampler_logprobs
    away = x.sequence_mean((sampled - x.logprobs.detach()).nan_to_num(nan=0.0))
    return (~(x.spread(away > delta) & (x.advantages < 0))).to(x.mask.dtype)
