"""Weights on tokens or rollouts: `(LossInputs, options) -> [N]`, without gradient.

In algo.weights they multiply the policy term, in algo.kl_weights the KL; the counts in the aggregation do not change.
For a term proportional to the advantage, as nearly all are, a positive weight scales the advantage."""

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
    """1 on the `share` of tokens with the highest entropy, 0 on the others. -> [N].

    At or above the quantile 1 - share of all trained tokens of the optimizer step, over all processes. Beyond the 80/20
    Rule (arXiv 2506.01939)."""

    share: Share = 0.2

    def prepare(self, x: LossInputs) -> dict[str, torch.Tensor]:
        """"keep": [N]."""
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
"""English phrases of planning, checking and turning back; a start for a list of one's own."""


@reads("sign")
@idle("alpha is 0", alpha=0)
@requires("texts")
@dataclass(frozen=True)
class Hicra:
    """1 + alpha on planning tokens with A > 0, 1 - alpha on those with A < 0, 1 elsewhere: A + alpha |A| on tokens that
    belong to one of `phrases`. -> [N].

    Phrases are matched in the text of a completion, case-insensitively and independent of its tokens: as whole words,
    or anywhere in scripts without spaces. The default ones are English. HICRA (Emergent Hierarchical Reasoning, arXiv
    2509.03646); there the strategic grams are mined from the model's own completions."""

    alpha: NonNegative = 0.2
    phrases: tuple[str, ...] = STRATEGIC_GRAMS

    def __post_init__(self) -> None:
        if not any(p.strip() for p in self.phrases):
            raise ValueError("phrases is empty: name at least one, e.g. phrases=['wait']")

    def __call__(self, x: LossInputs) -> torch.Tensor:
        planning = torch.tensor(planning_tokens(x.texts, x.rollout_id.tolist(), self.phrases),
                                dtype=torch.bool, device=x.mask.device)
        return torch.where(planning, 1 + self.alpha * x.advantages.sign(), 1.0)


def planning_tokens(texts: Any, rollout_id: list[int], phrases: tuple[str, ...]) -> list[bool]:
    """[N] whether each token is part of a phrase; a phrase does not cross the end of a rollout."""
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
    """The pattern of a phrase: whole words, except at ends in a wide script (Chinese, Japanese), which has no spaces.
    """
    before, after = ("" if east_asian_width(end) in "WF" else edge
                     for end, edge in ((text[0], r"(?<!\w)"), (text[-1], r"(?!\w)")))
    return before + "\\s+".join(map(re.escape, text.split())) + after


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Begin and end of each run of equal ids."""
    edges = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
    return list(pairwise([*edges, len(ids)]))


@idle("low and high are 1", low=1, high=1)
def difficulty(x: LossInputs, low: NonNegative = 0.5, high: NonNegative = 1.5) -> torch.Tensor:
    """low + (high - low) * difficulty of the row, in [0, 1], 1 = hardest; 1 for a row without one. -> [N].

    Harder samples weigh more, as in GUI-G1 (arXiv 2505.15810), whose own weight (by relative box size) is part of the
    data: the row's `weight`, which always applies."""
    assert x.difficulty is not None
    d = x.difficulty.to(x.mask.dtype)
    return x.spread(torch.where(d.isnan(), 1.0, low + (high - low) * d))


@reads("outcome", "sign")
def dads(x: LossInputs, above: float | None = None) -> torch.Tensor:
    """1 - exp(-e (1 - d)) where A > 0, d = the group's share of rollouts that are not correct; 1 elsewhere, and for d =
    0 or 1. -> [N].

    For algo.kl_weights: the harder the sample, the less the KL restrains its correct rollouts. Correct: as the task
    says, or reward > `above`. Difficulty-adaptive divergence shaping of APO (arXiv 2506.21655), as in its released
    code; e = 2.718..."""
    assert x.rewards is not None
    count, hits = (x.group_sum(v.to(x.mask.dtype)) for v in (~x.rewards.isnan(), x.correct(above)))
    d = x.spread(1 - hits / count.clamp(min=1))
    return torch.where((x.advantages > 0) & (d > 0) & (d < 1), 1 - torch.exp(-math.e * (1 - d)), 1.0)


@reads("outcome")
def stcr(x: LossInputs, base: Annotated[float, Field(gt=1)] = 1.00001, above: float | None = None) -> torch.Tensor:
    """2 - base^-(L - L_c) on rollouts that are not correct and longer than L_c, the mean length of the correct ones of
    their group; 1 elsewhere, and in groups without a correct one. -> [N].

    Rambling wrong completions count more. Correct: as the task says, or reward > `above`; unscorable rollouts have
    weight 1. Suboptimal trajectory complexity regularization of APO (arXiv 2506.21655), as in its released code."""
    assert x.rewards is not None
    good = x.correct(above)
    hits, total = x.group_sum(good.to(x.lengths.dtype)), x.group_sum(x.lengths * good)
    excess = x.lengths - total / hits.clamp(min=1)
    longer = ~good & ~x.rewards.isnan() & (hits > 0) & (excess > 0)
    return x.spread(torch.where(longer, 2 - torch.exp(-math.log(base) * excess), 1.0)).to(x.mask.dtype)


def _never_away(use: FunctionUse) -> str:
    if not use.config.rollout.one_update or not samples_as_it_trains(use.config):
        return ""
    return ("one optimizer step a batch, of answers that the same weights have sampled: no answer becomes unlikely; "
            "raise rollout.minibatches or rollout.updates")


@reads("sign")
@idle_when(_never_away)
def off_policy_sequence_mask(x: LossInputs, delta: float = 0.1) -> torch.Tensor:
    """0 on tokens with A < 0 of a rollout with mean_t (logp(sampled) - logp) > delta, 1 elsewhere. -> [N].

    logp(sampled) is the engine's where known, else the trainer's at the weights that sampled. DeepSeek-V3.2 (arXiv
    2512.02556) eq. 9; the paper names no value for delta."""
    sampled = x.old_logprobs if x.sampler_logprobs is None else x.sampler_logprobs
    away = x.sequence_mean((sampled - x.logprobs.detach()).nan_to_num(nan=0.0))
    return (~(x.spread(away > delta) & (x.advantages < 0))).to(x.mask.dtype)
