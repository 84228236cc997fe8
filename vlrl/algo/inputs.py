"""Inputs of the objective's functions: `Scores` for advantages, `LossInputs` for the loss.

Both are flat: R rollouts, N completion tokens, never [B, L], so packed and padded batches give the same value."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from vlrl.distributed import comm

Metrics = dict[str, torch.Tensor]
"""Sums over the trained tokens of this micro-batch; divided by the token count later."""


@dataclass(frozen=True, slots=True)
class ActionCredit:
    """One action of an episode, as advantages see it."""

    start: int
    end: int
    """Its tokens are start..end."""
    reward: float = 0.0
    """The weighted sum of its reward parts; 0 where task.combine pays nothing for turns."""
    anchor: str | None = ""
    """The state in which it was taken, equal texts for equal states; None = unknown."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Its raw reward parts."""
    plan: tuple[int, int] = (0, 0)
    """Its tokens inside <plan>, tags included, for functions that require "plans"; an empty span = none."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The rollouts of one step over all processes, in the order of their groups. R rollouts."""

    rewards: torch.Tensor
    """[R] float64; NaN = unscorable."""
    group: torch.Tensor
    """[R] int64 group number 0, 1, ...; the rollouts of a group are adjacent."""
    lengths: torch.Tensor
    """[R] float64, generated tokens of each completion, also of one generated over several steps."""
    task: torch.Tensor
    """[R] int64, index in task_names."""
    task_names: Sequence[str] = ()
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[R] raw reward parts by name; NaN = unscorable, or a part that the rollout's task does not have."""
    part_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[R] weight of each part in the reward of the rollout."""
    outcome: torch.Tensor | None = None
    """[R] bool: correct, as the task says (Task.correct); None = only rewards are known."""
    greedy: torch.Tensor | None = None
    """[R] reward of the greedy answer to the rollout's prompt, for functions that require "greedy"."""
    truncated: torch.Tensor | None = None
    """[R] bool."""
    tokens: Sequence[np.ndarray] = ()
    """[R, T] token ids, for functions that require "tokens"."""
    masks: Sequence[np.ndarray] = ()
    """[R, T] bool, the trained tokens, for functions that require "tokens", "turns" or data of a method."""
    turns: Sequence[Sequence[ActionCredit]] = ()
    """[R] the actions of each episode in order, for functions that require "turns"; one for a plain answer."""
    steps: Sequence[Sequence[tuple[int, int, float]]] = ()
    """[R] the steps of each completion as (start token, end token, value) (types.StepValues), for functions that
    require "steps"; empty where a completion has none."""
    extra: Sequence[Mapping[str, Any]] = ()
    """[R] a method's data of each completion (Completion.extra), for functions that require a name of
    config.sections.GIVEN."""
    texts: Sequence[str] = ()
    """[R] the completions, for functions that require "texts"."""
    kl: Sequence[np.ndarray] = ()
    """[R, T] log p(sampler) - log p(reference) for functions that require "token_kl", where algo.kl_in=reward; else
    empty. For all other functions its sum over a completion's trained tokens is already subtracted from the reward."""
    kl_coef: float = 0.0
    """Weight of the KL in the reward."""
    per_token: Sequence[Mapping[str, np.ndarray]] = ()
    """[R] a method's arrays [T] of each completion by name (Rollout.per_token)."""
    gamma: float = 1.0
    """Discount, set by a method (Method.scores) ..."""
    lam: float = 1.0
    """... and lambda."""
    max_length: int = 0
    """rollout.max_new_tokens."""
    step: int = 0
    seed: int = 0
    """Key of random draws, with `step`: the same on a resumed run."""


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Flat tokens of one micro-batch, or (without gradient) of a whole optimizer step on this process.

    N answer tokens, R rollouts of the optimizer step on this process."""

    logprobs: torch.Tensor
    """[N] current policy, with gradient."""
    old_logprobs: torch.Tensor
    """[N] of the trainer, at the weights that sampled."""
    advantages: torch.Tensor
    """[N] each token's advantage."""
    mask: torch.Tensor
    """[N] 1.0 on trained tokens, 0.0 on the rest."""
    weights: torch.Tensor
    """[N] the sample's weight."""
    rollout_id: torch.Tensor
    """[N] number of the rollout, 0..R-1; the tokens of a rollout are adjacent."""
    lengths: torch.Tensor
    """[R] trained tokens of each rollout."""
    total_tokens: float
    """Trained tokens of the optimizer step over all processes."""
    total_sequences: float
    """Rollouts with at least one trained token, likewise."""
    max_length: int
    """rollout.max_new_tokens."""
    sampler_logprobs: torch.Tensor | None = None
    """[N] of the engine that sampled, NaN where unknown; those of the trainer where a token is trained under another
    prompt."""
    reference_logprobs: torch.Tensor | None = None
    """[N], for functions that require "reference"."""
    entropy: torch.Tensor | None = None
    """[N] nats of the whole distribution at the sampled temperature, without gradient."""
    tokens: torch.Tensor | None = None
    """[N] token ids."""
    turns: torch.Tensor | None = None
    """[N] index of each token's action in its episode, -1 between actions, for functions that require "turns"."""
    texts: Sequence[str] = ()
    """[N] text of each token, for functions that require "texts"."""
    rewards: torch.Tensor | None = None
    """[R]; NaN = unscorable."""
    outcome: torch.Tensor | None = None
    """[R] bool: correct, as the task says (Task.correct); None = only rewards are known."""
    group: torch.Tensor | None = None
    """[R] number of each rollout's group on this process. A group never spans optimizer steps or processes."""
    difficulty: torch.Tensor | None = None
    """[R] difficulty of the row in [0, 1], 1 = hardest; NaN = unknown."""
    variants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[R] bool: completions of a variant, trained under another prompt than the sampled one, for functions that require
    "variant:<name>"."""
    identity: torch.Tensor | None = None
    """[R] int64, a number that identifies the rollout on any process and in any order."""
    stats: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N, ...] statistics of the logits that a function requires ("stat:<name>"), with gradient."""
    old_stats: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The same at the weights that sampled ("old_stat:<name>"); {} where those are the current ones."""
    per_token: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N] values of Rollout.per_token by the names that a head's loss reads (heads.Head.reads); NaN = none."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Trained tokens of the optimizer step with such a value, by the same names, over all processes."""
    prepared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N] or numbers: the result of the function's own `prepare` for the whole optimizer step; values of rollouts are
    spread over their tokens."""
    step: int = 0
    """Key of random draws, with `seed`: the same on a resumed run."""
    seed: int = 0

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[R] sums of [N] values over the trained tokens of each rollout; with gradient."""
        values = values * self.mask
        return torch.zeros_like(self.lengths, dtype=values.dtype).index_add(0, self.rollout_id, values)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[R] means of [N] values over the trained tokens of each rollout; 0 where there is none."""
        return self.per_sequence(values) / self.lengths.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[N]: the value [R] of each token's rollout."""
        return values[self.rollout_id]

    def group_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[R]: the sum of values [R] over each rollout's group."""
        assert self.group is not None
        _, group = torch.unique(self.group, return_inverse=True)
        return torch.zeros_like(values).index_add(0, group, values)[group]

    @property
    def log_ratio(self) -> torch.Tensor:
        """[N] log p - log p(old), within +-20; with gradient."""
        return (self.logprobs - self.old_logprobs).clamp(-20, 20)

    @property
    def sampler_gap(self) -> torch.Tensor:
        """[N] log p(old) - log p(sampler), within +-20, without gradient; 0, which is no evidence of a difference, on
        tokens that are not trained or whose log-probability the engine does not know (NaN)."""
        assert self.sampler_logprobs is not None
        gap = (self.old_logprobs - self.sampler_logprobs).detach().clamp(-20, 20)
        return torch.where((self.mask > 0) & ~gap.isnan(), gap, 0)

    def correct(self, above: float | None = None) -> torch.Tensor:
        """[R] bool: whether each rollout is correct: as the task says, or with `above` where the reward exceeds it.
        False for unscorable ones."""
        assert self.rewards is not None
        if above is None and self.outcome is not None:
            return self.outcome & ~self.rewards.isnan()
        return self.rewards > (0.5 if above is None else above)  # NaN is above nothing

    def wrong(self, above: float | None = None) -> torch.Tensor:
        """[R] bool: the scorable rollouts that are not correct."""
        assert self.rewards is not None
        return ~self.correct(above) & ~self.rewards.isnan()


def gather_values(values: torch.Tensor) -> torch.Tensor:
    """Concatenates [n] values of all processes in rank order. A collective: called on all of them, equally often."""
    return torch.cat([torch.as_tensor(part) for part in comm.gather(values.detach().cpu())]).to(values.device)


def requires(*what: str) -> Callable[[Any], Any]:
    """Declares what a function needs beyond rewards or log-probabilities; braces are filled with its options.

    "reference", "entropy", "stat:<name>", "old_stat:<name>", "variant:<name>"; before the loss "greedy", "tokens",
    "texts", "token_kl", "turns", "plans" = the plan of each turn, "steps" = step values, a name of
    config.sections.GIVEN = data of a method, "parts" = it reads the reward parts instead of the reward, "local" = the
    groups of its own process suffice; "step" = its `prepare` needs the current log-probabilities (and entropy,
    statistics) of the whole optimizer step, which costs a pass without gradient. A `prepare` without "step" gets zeros
    for them and costs nothing."""
    def mark(function: Any) -> Any:
        function.requires = frozenset(what)
        return function
    return mark


@dataclass(frozen=True, eq=False)
class Estimates:
    """Per-token advantages with targets for a value head (models/heads.py), for R rollouts."""

    advantages: Sequence[torch.Tensor]
    """[R, T]; 0 on tokens that are not trained."""
    targets: Sequence[torch.Tensor]
    """[R, T] training targets of the head; NaN = not trained."""

    def __len__(self) -> int:
        return len(self.advantages)


def turn_rewards(turns: Sequence[ActionCredit], reward: float) -> list[float]:
    """The rewards of turns; they add up to the reward of the episode."""
    paid = [turn.reward for turn in turns]
    if paid:
        paid[-1] += reward - sum(paid)
    return paid


def plan_span(texts: Sequence[str]) -> tuple[int, int]:
    """Start and end of the tokens of the first <plan>...</plan>, tags included, given the text of each token of an
    action; (0, 0) where none is closed."""
    whole = "".join(texts)
    begin = whole.find("<plan>")
    end = whole.find("</plan>", begin)
    if min(begin, end) < 0:
        return 0, 0
    ends = [*accumulate(map(len, texts))]
    return bisect_right(ends, begin), bisect_left(ends, end + len("</plan>")) + 1
