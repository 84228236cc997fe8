"""Turns rewards into advantages: reward shaping, KL in the reward, the advantage, and which rollouts are trained on.

The inputs are gathered over all ranks in the order of group numbers, so the number of ranks does not change the
advantages."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import ActionCredit, Estimates, Scores, plan_span
from vlrl.algo.named import Bound
from vlrl.config.registry import failure
from vlrl.config.schema import Config
from vlrl.config.sections import GIVEN
from vlrl.distributed import comm
from vlrl.errors import ConfigError, VlrlError, did_you_mean
from vlrl.models.policy import Policy
from vlrl.models.reference import Reference
from vlrl.models.token_text import TokenTexts
from vlrl.task import Task
from vlrl.task.variants import GREEDY
from vlrl.types import Completion, Group, Rollout, Turn

Plan = Callable[[np.ndarray], tuple[int, int]]
"""Function of the tokens of an action. It returns (start, end) of the tokens that state the plan."""


class Credit:
    """Computes the advantage of every rollout of a step. The stored reward remains the reward of the task; shaping and
    KL enter only the advantage. Raises ConfigError if an option names a reward part that the task does not have."""

    def __init__(self, algorithm: Algorithm, config: Config, policy: Policy | None = None,
                 task: Task | None = None):
        self.algorithm, self.config, self.policy = algorithm, config, policy
        in_reward = config.algo.kl_coef > 0 and config.algo.kl_in == "reward"
        self.reference = Reference(policy, config) if in_reward and policy else None
        self.task = task
        self._metrics: dict[str, float] = {}
        if task is not None:
            _check_parts(algorithm, task)

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Returns the groups of this rank with an advantage for every rollout. Called on all ranks at the same time."""
        functions = [*self.algorithm.shaping, self.algorithm.advantage, self.algorithm.batch]
        needs = frozenset[str]().union(*(f.requires for f in functions))
        kl = self._kl(groups) if self.reference else None
        if self.policy:
            for method in self.algorithm.methods:
                groups = method.read(self.policy, groups, step)
        read = self._plan if "plans" in needs else None
        cut = self._steps if "steps" in needs else None
        own = [_group_values(g, needs, kl[i] if kl else None, self.task, read, cut) for i, g in enumerate(groups)]
        gathered = [own] if all("local" in f.requires for f in functions) else comm.gather(own)
        all_groups = sorted((f for part in gathered for f in part), key=lambda f: f.id)
        credits = comm.together(lambda: self._credits(all_groups, step))
        mine = {g.id for g in groups}
        self._measure(own, [shaped for (id, _), (*_, shaped) in credits.items() if id in mine])
        out = [replace(g, rollouts=tuple(_credited(r, *credits[g.id, i][:3]) for i, r in enumerate(g.rollouts)))
               for g in groups]
        for method in self.algorithm.methods:
            self._metrics |= method.credited(out)
        return out

    def has_signal(self, group: Group) -> bool | None:
        """Whether the shaped rewards of a group give any of its rollouts a nonzero advantage. None if this is unknown
        before the step is complete, because a method processes the groups first or a shaping covers the whole step.

        If the advantage is computed over all groups of the step, returns whether the rewards (or reward parts) that the
        advantage uses differ within the group."""
        shaping, advantage = self.algorithm.shaping, self.algorithm.advantage
        needs = frozenset[str]().union(*(f.requires for f in (*shaping, advantage)))
        if any(m.overrides("read") for m in self.algorithm.methods) or not all("local" in f.requires for f in shaping):
            return None
        s = self._shaped(_scores([_group_values(group, needs, None, self.task, self._plan if "plans" in needs else None,
                                         self._steps if "steps" in needs else None)],
                                 self.config.rollout.max_new_tokens, 0.0, 0, self.config.seed))
        if "local" in advantage.requires:
            return any(np.nan_to_num(np.asarray(a)).any() for a in _applied("algo.advantage", advantage, s))
        read = [s.rewards] if "parts" not in advantage.requires else [
            torch.where(s.rewards.isnan(), torch.nan, s.parts[name]) for name in s.part_weights]
        return any(len({*values[~values.isnan()].tolist()}) > 1 for values in read)

    def _credits(self, all_groups: Sequence[_GroupValues], step: int
                 ) -> dict[tuple[str, int], tuple[Any, Any, bool, float]]:
        """Computes advantages for the groups of all ranks. Returns {(group id, index of the rollout): (advantage,
        targets for the value head, whether the rollout is trained on, shaped reward)}."""
        if not all_groups:
            return {}
        most = self.config.rollout.max_new_tokens
        s = _scores(all_groups, most, self.algorithm.kl.value, step, self.config.seed)
        for method in self.algorithm.methods:
            s = method.scores(s)
        s = self._shaped(s)
        trained = _applied("algo.batch", self.algorithm.batch, s).tolist()
        values = zip(*self._advantages(s, all_groups), trained, s.rewards.tolist(), strict=True)
        return dict(zip([(f.id, i) for f in all_groups for i in range(len(f.rewards))], values, strict=True))

    def metrics(self) -> dict[str, float]:
        """Metrics of the last call over all ranks: reward/shaped if there is a shaping, kl if the KL is in the reward,
        and the metrics of methods."""
        return self._metrics

    def _shaped(self, s: Scores) -> Scores:
        for i, shape in enumerate(self.algorithm.shaping):
            s = replace(s, rewards=_applied(f"algo.shaping.{i}", shape, s))
        return s

    def _advantages(self, s: Scores, all_groups: Sequence[_GroupValues]
                    ) -> tuple[Sequence[float | np.ndarray], Sequence[np.ndarray | None]]:
        if self.reference and not s.kl:
            penalty = torch.tensor([k for f in all_groups for k in f.kl_sums], dtype=torch.float64)
            s = replace(s, rewards=s.rewards - s.kl_coef * penalty)
        advantages = _applied("algo.advantage", self.algorithm.advantage, s)
        if isinstance(advantages, Estimates):
            return ([np.asarray(a) for a in advantages.advantages],
                    [np.asarray(t, np.float32) for t in advantages.targets])
        values = advantages.tolist() if isinstance(advantages, torch.Tensor) else [np.asarray(a) for a in advantages]
        return values, [None] * len(values)

    def _plan(self, tokens: np.ndarray) -> tuple[int, int]:
        assert self.policy, "plans are read by the tokenizer of a policy"
        return plan_span(self.policy.processor.tokenizer.batch_decode([[t] for t in tokens.tolist()]))

    def _steps(self, rollout: Rollout) -> list[tuple[int, int, float]]:
        if not rollout.steps:
            return []
        assert self.policy, "steps are found by the tokenizer of a policy"
        tokens, decode = rollout.completion.tokens, TokenTexts(self.policy).decode
        places = range(len(tokens) + 1)
        ends = [bisect_left(places, end, key=lambda k: len(decode(tokens[:k]))) for end, _ in rollout.steps]
        return [*zip([0, *ends], ends, (value for _, value in rollout.steps), strict=False)]

    def _kl(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """For each group, a list with one array per rollout: [T] log p(sampler) - log p(reference) at the sampling
        temperature. Tokens without a log-probability from the engine (NaN) get 0. For a rollout that is trained
        under another prompt than it was sampled with, both log-probabilities are computed under the training prompt."""
        assert self.reference
        at, rollouts = self.algorithm.temperature, [(g, r) for g in groups for r in g.rollouts]
        prompts = [r.train_prompt or g.prompt for g, r in rollouts]
        answers = [r.completion for _, r in rollouts]
        reference = self.reference.logprobs(prompts, answers, at)
        sampled = [r.completion.logprobs for _, r in rollouts]
        moved = [i for i, (_, r) in enumerate(rollouts) if r.train_prompt is not None]
        if any(comm.gather(bool(moved))):
            read = self.reference.logprobs([prompts[i] for i in moved], [answers[i] for i in moved], at, own=True)
            for i, values in zip(moved, read, strict=True):
                sampled[i] = values
        log_ratios = iter([np.where(np.isnan(a), 0.0, a.astype(np.float64) - b)
                           for a, b in zip(sampled, reference, strict=True)])
        return [[next(log_ratios) for _ in g.rollouts] for g in groups]

    def _measure(self, own: Sequence[_GroupValues], shaped: Sequence[float]) -> None:
        self._metrics = {}
        if self.algorithm.shaping:
            known = [r for r in shaped if not math.isnan(r)]
            total, count = comm.total(sum(known), float(len(known)))
            self._metrics["reward/shaped"] = total / max(count, 1.0)
        if self.reference:
            total, count = comm.total(sum(k for f in own for k in f.kl_sums), sum(n for f in own for n in f.lengths))
            self._metrics["kl"] = total / max(count, 1.0)


def credit(groups: Sequence[Group], advantage: Any, task: Task | None = None) -> list[Group]:
    """Returns the groups of this rank with advantages computed by the function `advantage`, without shaping and KL."""
    needs = frozenset({"tokens", "texts", "turns", *GIVEN})
    s = _scores([_group_values(g, needs, None, task) for g in groups], 0, 0.0, 0)
    advantages = iter(np.asarray(a) for a in advantage(s))
    return [replace(g, rollouts=tuple(_credited(r, next(advantages), None, True) for r in g.rollouts)) for g in groups]


def credit_alone(group: Group, advantage: Bound, batch: Bound, step: int, seed: int, section: str) -> Group:
    """Returns the group with advantages that are computed from this group alone. Rollouts that the function `batch`
    excludes are marked as not trained. Raises ConfigError if a function fails or returns per-token advantages; the
    message names the settings of `section`."""
    s = _scores([_group_values(group, advantage.requires | batch.requires, None, None)], 0, 0.0, step, seed)
    credited = _applied(f"{section}.advantage", advantage, s)
    if not isinstance(credited, torch.Tensor):
        raise ConfigError(f"{section}.advantage={advantage.name!r} computes an advantage per token, but here every "
                          f"answer needs a single advantage: choose another function, such as "
                          f"{section}.advantage=grpo")
    trained = _applied(f"{section}.batch", batch, s).tolist()
    return replace(group, rollouts=tuple(_credited(r, a, None, t) for r, a, t in zip(
        group.rollouts, credited.tolist(), trained, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _GroupValues:
    """The inputs of the advantage functions for one group; sequences have one entry per rollout."""

    id: str
    task: str
    weights: Mapping[str, float]
    greedy: float
    rewards: Sequence[float]
    lengths: Sequence[float]
    truncated: Sequence[bool]
    parts: Sequence[Mapping[str, float | None]]
    outcome: Sequence[bool]
    kl_sums: Sequence[float] = ()
    tokens: Sequence[np.ndarray] = ()
    masks: Sequence[np.ndarray] = ()
    per_token: Sequence[Mapping[str, np.ndarray]] = ()
    turns: Sequence[Sequence[ActionCredit]] = ()
    extra: Sequence[Mapping[str, Any]] = ()
    steps: Sequence[Sequence[tuple[int, int, float]]] = ()
    kl: Sequence[np.ndarray] = ()
    texts: Sequence[str] = ()


def _group_values(group: Group, needs: frozenset[str], kl: Sequence[np.ndarray] | None, task: Task | None,
                  plan: Plan | None = None, cut: Callable[[Rollout], list[tuple[int, int, float]]] | None = None,
                  ) -> _GroupValues:
    """The inputs of the advantage functions for a group. needs: inputs that functions require; fields that are not
    needed stay empty. kl, plan: see `Credit._kl` and `Plan`. `cut` returns the steps of a rollout."""
    rollouts, masks = group.rollouts, [r.completion.loss_mask for r in group.rollouts]
    greedy = next((r.reward for r in group.aside if r.variant == GREEDY), None)
    return _GroupValues(
        id=group.id, task=group.task, weights=dict(group.weights), greedy=_number(greedy),
        rewards=[_number(r.reward) for r in rollouts], lengths=[float(_written(r.completion)) for r in rollouts],
        truncated=[r.completion.truncated for r in rollouts], parts=[dict(r.parts) for r in rollouts],
        outcome=[bool(r.correct) for r in rollouts],
        kl_sums=[float(k[m].sum()) for k, m in zip(kl, masks, strict=True)] if kl is not None else (),
        tokens=[r.completion.tokens for r in rollouts] if "tokens" in needs else (),
        masks=masks if {"tokens", "turns", "steps", *GIVEN} & needs else (),
        steps=[cut(r) for r in rollouts] if cut else (),
        per_token=[dict(r.per_token) for r in rollouts] if needs & GIVEN.keys() else (),
        turns=[_actions(r, _turn_weights(r, group, task), plan) for r in rollouts] if "turns" in needs else (),
        extra=[dict(r.completion.extra) for r in rollouts] if needs & GIVEN.keys() else (),
        kl=kl if kl is not None and "token_kl" in needs else (),
        texts=[r.completion.text for r in rollouts] if "texts" in needs else ())


def _turn_weights(rollout: Rollout, group: Group, task: Task | None) -> Mapping[str, float]:
    if task is None or task.of(group.sample).turns_count({k: v for k, v in rollout.parts.items() if v is not None}):
        return group.weights
    return {}


def _actions(rollout: Rollout, weights: Mapping[str, float], plan: Plan | None) -> list[ActionCredit]:
    completion = rollout.completion
    acted = completion.actions or (Turn(start=0, end=len(completion.tokens)),)
    parts = [t.parts or {} for t in acted]
    paid = [sum(weights.get(name, 0.0) * value for name, value in own.items()) for own in parts]
    anchors = ["", *(None if t.state is None else f"={t.state}" for t in acted[:-1])]
    plans = [(0, 0)] * len(acted) if plan is None else [
        (t.start + begin, t.start + end) for t in acted for begin, end in [plan(completion.tokens[t.start:t.end])]]
    return [ActionCredit(t.start, t.end, r, a, own, p)
            for t, r, a, own, p in zip(acted, paid, anchors, parts, plans, strict=True)]


def _written(completion: Completion) -> int:
    if completion.episode_id:
        return int(completion.loss_mask.sum())
    start = completion.turns[-1].start if completion.turns else 0
    earlier = sum(t.end - t.start for t in completion.turns[:-1] if t.role == "assistant")
    return earlier + int(completion.loss_mask[start:].sum())


def _scores(groups: Sequence[_GroupValues], max_length: int, kl_coef: float, step: int, seed: int = 0) -> Scores:
    names = sorted({g.task for g in groups})
    parts = sorted({name for g in groups for p in g.parts for name in p})
    sizes = torch.tensor([len(g.rewards) for g in groups])

    def numbers(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float64)

    return Scores(
        rewards=numbers(r for g in groups for r in g.rewards), group=torch.arange(len(groups)).repeat_interleave(sizes),
        lengths=numbers(n for g in groups for n in g.lengths),
        task=torch.tensor([names.index(g.task) for g in groups], dtype=torch.int64).repeat_interleave(sizes),
        task_names=names, parts={k: numbers(_number(p.get(k)) for g in groups for p in g.parts) for k in parts},
        part_weights={k: numbers(g.weights.get(k, 0.0) for g in groups for _ in g.parts) for k in parts},
        outcome=torch.tensor([c for g in groups for c in g.outcome], dtype=torch.bool),
        greedy=numbers(g.greedy for g in groups for _ in g.rewards),
        truncated=torch.tensor([t for g in groups for t in g.truncated], dtype=torch.bool),
        tokens=[t for g in groups for t in g.tokens], masks=[m for g in groups for m in g.masks],
        per_token=[p for g in groups for p in g.per_token],
        turns=[t for g in groups for t in g.turns], extra=[e for g in groups for e in g.extra],
        steps=[s for g in groups for s in g.steps],
        kl=[k for g in groups for k in g.kl],
        texts=[t for g in groups for t in g.texts], kl_coef=kl_coef,
        max_length=max_length, step=step, seed=seed)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _credited(rollout: Rollout, advantage: float | np.ndarray, targets: np.ndarray | None, trained: bool) -> Rollout:
    own = float(advantage) if np.ndim(advantage) == 0 else np.asarray(advantage)
    kept = rollout.per_token if targets is None else {**rollout.per_token, "targets": targets}
    return replace(rollout, advantage=own, per_token=kept, trained=trained)


def _applied(setting: str, function: Bound, s: Scores) -> Any:
    """Calls an advantage or batch function on the scores `s`, and returns its values, one per rollout. Raises
    ConfigError if the function fails or returns another number of values; the message names `setting`."""
    try:
        values = function(s)
        count = len(values)
    except VlrlError:
        raise
    except Exception as error:  # code of a user may raise anything
        raise ConfigError(f"{setting}={function.name!r}: {failure(error)}") from error
    if count != len(s.rewards):
        raise ConfigError(f"{setting}={function.name!r} returned {count} values for {len(s.rewards)} rollouts")
    return values


def _check_parts(algorithm: Algorithm, task: Task) -> None:
    """Raises ConfigError if an option names a reward part that some task of the run does not have."""
    named = {"algo.advantage": algorithm.advantage, "algo.batch": algorithm.batch,
             **{f"algo.shaping.{i}": shape for i, shape in enumerate(algorithm.shaping)}}
    for setting, function in named.items():
        part: Any = function.options.get("part")
        for one in task.members if part else ():
            if part not in (known := one.weights_at(0)):
                raise ConfigError(f"{setting}.part={part!r}: task '{one.name}' has no such reward part."
                                  f"{did_you_mean(part, known)} Its parts: {', '.join(known)}")
