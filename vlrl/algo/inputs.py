"""Inputs of the objective's functions: `Scores` for advantages, `LossInputs` for the loss.

Both are flat, with R rollouts or N completion tokens, never [B, L]. Packed and padded batches give equal values."""

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
"""Sums over the trained tokens of this micro-batch, by metric name; later divided by the token count."""


@dataclass(frozen=True, slots=True)
class ActionCredit:
    """One action of an episode, with the data from which advantages assign credit."""

    start: int
    end: int
    """Position after the last token of the action, which consists of the tokens start .. end - 1."""
    reward: float = 0.0
    """The weighted sum of the action's reward parts; 0 if task.combine does not reward single turns."""
    anchor: str | None = ""
    """The state in which the action was taken, as a string that is equal for equal states; None if unknown."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The action's raw reward parts by name."""
    plan: tuple[int, int] = (0, 0)
    """Token span of the action's <plan>, including tags, for functions that require "plans"; (0, 0) without a plan."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The R rollouts of one step over all processes, ordered by group. The input of advantages."""

    rewards: torch.Tensor
    """[R] float64; NaN = unscorable."""
    group: torch.Tensor
    """[R] int64: group number 0, 1, ... of each rollout; the rollouts of a group are adjacent."""
    lengths: torch.Tensor
    """[R] float64: number of generated tokens of each completion, including those generated in earlier steps
    (rollout.step_tokens)."""
    task: torch.Tensor
    """[R] int64: index in task_names of the rollout's task."""
    task_names: Sequence[str] = ()
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[R] raw values of each reward part, by name; NaN = unscorable, or the rollout's task has no such part."""
    part_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[R] weight of each part in the rollout's reward, by name."""
    outcome: torch.Tensor | None = None
    """[R] bool: whether the task calls the rollout correct (Task.correct); None if only rewards are known."""
    greedy: torch.Tensor | None = None
    """[R] reward of the greedy completion of the rollout's prompt, for functions that require "greedy"."""
    truncated: torch.Tensor | None = None
    """[R] bool: whether the completion hit the token limit."""
    tokens: Sequence[np.ndarray] = ()
    """[R, T] token ids, for functions that require "tokens"."""
    masks: Sequence[np.ndarray] = ()
    """[R, T] bool: the trained tokens, for functions that require "tokens", "turns" or data of a method."""
    turns: Sequence[Sequence[ActionCredit]] = ()
    """The actions of each rollout in order, for functions that require "turns"; one for a single-turn completion."""
    steps: Sequence[Sequence[tuple[int, int, float]]] = ()
    """The reasoning steps of each completion as (start token, end token, value) (types.StepValues), for functions that
    require "steps"."""
    extra: Sequence[Mapping[str, Any]] = ()
    """The data that a method attached to each completion (Completion.extra), for functions that require this data by a
    name in config.sections.GIVEN."""
    texts: Sequence[str] = ()
    """The text of each completion, for functions that require "texts"."""
    kl: Sequence[np.ndarray] = ()
    """[R, T] log p(sampler) - log p(reference) of each token, for functions that require "token_kl" with
    algo.kl_in=reward; else empty. For all other functions, the sum over a completion's trained tokens is already
    subtracted from the reward."""
    kl_coef: float = 0.0
    """Coefficient of the KL in the reward."""
    per_token: Sequence[Mapping[str, np.ndarray]] = ()
    """For each completion, arrays [T] that a method stored, by name (Rollout.per_token)."""
    gamma: float = 1.0
    """Discount factor, set by a method (Method.scores)."""
    lam: float = 1.0
    """Lambda of generalised advantage estimation, set by a method."""
    max_length: int = 0
    """Token limit of a completion: rollout.max_new_tokens."""
    step: int = 0
    seed: int = 0
    """The seed of the run. `seed` and `step` select random numbers, so that a resumed run draws the same numbers."""


@dataclass(frozen=True, eq=False)
class LossInputs:
    """N completion tokens of one micro-batch or, without gradient, of a whole optimizer step on this process. They
    belong to the R rollouts of the optimizer step on this process."""

    logprobs: torch.Tensor
    """[N] log-probabilities under the current policy, with gradient."""
    old_logprobs: torch.Tensor
    """[N] log-probabilities that the trainer computed with the weights that sampled the rollouts."""
    advantages: torch.Tensor
    """[N] advantage of each token."""
    mask: torch.Tensor
    """[N] 1.0 for trained tokens, else 0.0."""
    weights: torch.Tensor
    """[N] weight of each token's sample."""
    rollout_id: torch.Tensor
    """[N] index of each token's rollout, 0..R-1; the tokens of a rollout are adjacent."""
    lengths: torch.Tensor
    """[R] number of trained tokens of each rollout."""
    total_tokens: float
    """Number of trained tokens of the optimizer step over all processes."""
    total_sequences: float
    """Number of rollouts with at least one trained token in the optimizer step, over all processes."""
    max_length: int
    """Token limit of a completion: rollout.max_new_tokens."""
    sampler_logprobs: torch.Tensor | None = None
    """[N] log-probabilities of the engine that sampled, NaN if unknown. If a token is trained under a different prompt
    from the one it was sampled under, this is the trainer's log-probability."""
    reference_logprobs: torch.Tensor | None = None
    """[N] log-probabilities under the reference policy, for functions that require "reference"."""
    entropy: torch.Tensor | None = None
    """[N] entropy in nats of the full distribution at the sampling temperature, without gradient."""
    tokens: torch.Tensor | None = None
    """[N] token ids."""
    turns: torch.Tensor | None = None
    """[N] index of each token's action in its episode, -1 between actions, for functions that require "turns"."""
    texts: Sequence[str] = ()
    """[N] text of each token, for functions that require "texts"."""
    rewards: torch.Tensor | None = None
    """[R] rewards; NaN = unscorable."""
    outcome: torch.Tensor | None = None
    """[R] bool: whether the task calls the rollout correct (Task.correct); None if only rewards are known."""
    group: torch.Tensor | None = None
    """[R] index of each rollout's group on this process. A group never spans optimizer steps or processes."""
    difficulty: torch.Tensor | None = None
    """[R] difficulty of the row in [0, 1], 1 = hardest; NaN = unknown."""
    variants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[R] bool by name of the variant: whether the completion was sampled under this variant of the prompt and is
    trained under the unmodified prompt. For functions that require "variant:<name>"."""
    identity: torch.Tensor | None = None
    """[R] int64: a number that identifies each rollout independently of process and order."""
    stats: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N, ...] each statistic of the logits that a function requires ("stat:<name>"), with gradient."""
    old_stats: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Each statistic that a function requires ("old_stat:<name>"), by name, computed with the weights that sampled the
    rollouts. {} if these are the current weights."""
    per_token: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """For each name that a head's loss reads (heads.Head.reads), the [N] values of Rollout.per_token; NaN = none."""
    known: Mapping[str, float] = field(default_factory=dict)
    """For each name in per_token, the number of all trained tokens of the optimizer step that have a value."""
    prepared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The result of the function's own `prepare` for the whole optimizer step: numbers, or [N]. Values per rollout are
    repeated for each of its tokens."""
    step: int = 0
    """The number of the training step. `seed` and `step` select random numbers, so that a resumed run draws the same
    numbers."""
    seed: int = 0

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sums values [N] over the trained tokens of each rollout -> [R], with gradient."""
        values = values * self.mask
        return torch.zeros_like(self.lengths, dtype=values.dtype).index_add(0, self.rollout_id, values)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Averages values [N] over the trained tokens of each rollout -> [R]; 0 for rollouts without trained tokens."""
        return self.per_sequence(values) / self.lengths.clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats each rollout's entry of values [R] for all tokens of the rollout -> [N]."""
        return values[self.rollout_id]

    def group_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums values [R] over the group of each rollout -> [R]."""
        assert self.group is not None
        _, group = torch.unique(self.group, return_inverse=True)
        return torch.zeros_like(values).index_add(0, group, values)[group]

    @property
    def log_ratio(self) -> torch.Tensor:
        """[N] log p - log p(old), clamped to +-20, with gradient."""
        return (self.logprobs - self.old_logprobs).clamp(-20, 20)

    @property
    def sampler_gap(self) -> torch.Tensor:
        """[N] log p(old) - log p(engine that sampled), clamped to +-20, without gradient. 0 for tokens that are not
        trained, and for tokens whose engine log-probability is unknown (NaN)."""
        assert self.sampler_logprobs is not None
        gap = (self.old_logprobs - self.sampler_logprobs).detach().clamp(-20, 20)
        return torch.where((self.mask > 0) & ~gap.isnan(), gap, 0)

    def correct(self, above: float | None = None) -> torch.Tensor:
        """[R] bool: whether each rollout is correct; False for unscorable rollouts. The task decides or, with `above`,
        the reward must exceed `above`."""
        assert self.rewards is not None
        if above is None and self.outcome is not None:
            return self.outcome & ~self.rewards.isnan()
        return self.rewards > (0.5 if above is None else above)  # NaN is above nothing

    def wrong(self, above: float | None = None) -> torch.Tensor:
        """[R] bool: whether each rollout is scorable and not correct. `above`: see `correct`."""
        assert self.rewards is not None
        return ~self.correct(above) & ~self.rewards.isnan()


def gather_values(values: torch.Tensor) -> torch.Tensor:
    """Concatenates the values [n] of all processes in rank order. A collective call."""
    return torch.cat([torch.as_tensor(part) for part in comm.gather(values.detach().cpu())]).to(values.device)


def requires(*what: str) -> Callable[[Any], Any]:
    """Decorator that declares which inputs a function needs besides rewards or log-probabilities.

    The name of an option in braces, as in "stat:top:{k}", is replaced by the option's value. For the loss: "reference",
    "entropy", "stat:<name>", "old_stat:<name>", "variant:<name>". For advantages, shapings and batches: "greedy",
    "tokens", "texts", "token_kl", "turns", "plans" (the <plan> of each turn), "steps" (values of reasoning steps), a
    name in config.sections.GIVEN (data of a method), "parts" (the reward parts, read instead of the reward), "local"
    (only the groups of this process are needed).

    "step": its `prepare` reads the current log-probabilities (and entropy, statistics) of the whole optimizer step,
    which costs a forward pass without gradient. A `prepare` without "step" gets zeros instead, at no cost."""
    def mark(function: Any) -> Any:
        function.requires = frozenset(what)
        return function
    return mark


@dataclass(frozen=True, eq=False)
class Estimates:
    """Advantages per token of R rollouts, with training targets for a value head (models/heads.py)."""

    advantages: Sequence[torch.Tensor]
    """[R, T]; 0 for tokens that are not trained."""
    targets: Sequence[torch.Tensor]
    """[R, T] training targets of the value head; NaN for tokens that are not trained."""

    def __len__(self) -> int:
        return len(self.advantages)


def turn_rewards(turns: Sequence[ActionCredit], reward: float) -> list[float]:
    """The reward of each turn of an episode. The last turn's reward is adjusted so that the sum equals `reward`, the
    reward of the episode."""
    paid = [turn.reward for turn in turns]
    if paid:
        paid[-1] += reward - sum(paid)
    return paid


def plan_span(texts: Sequence[str]) -> tuple[int, int]:
    """The token span (start, end) of the first <plan>...</plan>, including tags; (0, 0) if there is none. texts: the
    text of each token of an action."""
    whole = "".join(texts)
    begin = whole.find("<plan>")
    end = whole.find("</plan>", begin)
    if min(begin, end) < 0:
        return 0, 0
    ends = [*accumulate(map(len, texts))]
    return bisect_right(ends, begin), bisect_left(ends, end + len("</plan>")) + 1
