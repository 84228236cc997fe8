"""The method behind algo.critic: computes the critic's values before the update, and metrics of their accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vlrl.algo.inputs import Scores
from vlrl.algo.method import Method, Objectives
from vlrl.algo.named import bind
from vlrl.algo.tables import ADVANTAGES
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models.packing import Batch
from vlrl.models.policy import Policy
from vlrl.models.reference import read_tokens
from vlrl.monitoring.metrics import phase
from vlrl.types import Group


class CriticValues(Method):
    """The method of algo.critic: computes the critic's values, which the advantage needs. The value head is
    critic.gae.Critic."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        named = self.config.algo.advantage
        if "values" not in bind("algo.advantage", named, ADVANTAGES).requires:
            raise ConfigError(f"algo.critic is set, but algo.advantage={named.name!r} does not use the critic's "
                              "values: set algo.advantage=gae, turn_gae, bilevel_gae or macro_gae, or algo.critic=null")

    def read(self, policy: Policy, groups: Sequence[Group], step: int) -> Sequence[Group]:
        return with_values(policy, groups, self.algorithm)

    def scores(self, s: Scores) -> Scores:
        return replace(s, gamma=self.settings.gamma, lam=self.settings.lam)

    def credited(self, groups: Sequence[Group]) -> Mapping[str, float]:
        comm.together(lambda: self._check(groups))
        return critic_metrics(groups)

    def _check(self, groups: Sequence[Group]) -> None:
        if any("values" in r.per_token and "targets" not in r.per_token for g in groups for r in g.rollouts):
            raise ConfigError(f"algo.advantage={self.config.algo.advantage.name!r} returns no targets for the critic: "
                              "return inputs.Estimates, with a target for each token, or set algo.critic=null and "
                              'remove "values" from what the advantage requires')


def with_values(policy: Policy, groups: Sequence[Group], algorithm: Any) -> list[Group]:
    """Returns the groups with `per_token["values"]` set on their rollouts: the critic's value of each token, at the
    current weights. Called on every process."""
    critic, config = policy.head, algorithm.config
    assert critic is not None
    several = not config.rollout.one_update
    # statistics of the old logits come from the pass of the update, which finds the log-probabilities too
    with_logprobs = several and not (algorithm.old_statistics or config.store.alternatives)

    def read(batch: Batch) -> torch.Tensor:
        if not with_logprobs:
            return critic(policy.states(batch))[:, None]
        stats = policy.logprobs(batch, algorithm.temperature, states=True)
        return torch.stack([critic(stats.states), stats.logprobs], -1)

    prompts = [r.train_prompt or g.prompt for g in groups for r in g.rollouts]
    answers = [r.completion for g in groups for r in g.rollouts]
    with phase("values"):
        token_values = iter(read_tokens(policy, prompts, answers, config.train, read, 1 + with_logprobs))
    return [replace(g, rollouts=tuple(
        replace(r, per_token={**r.per_token, "values": own[:, 0]}, old_logprobs=own[:, 1] if with_logprobs else None)
        for r, own in zip(g.rollouts, token_values, strict=False))) for g in groups]


def critic_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the critic over all processes: the mean value, the mean target, and the explained variance 1 -
    Var(target - value) / Var(target), which is NaN if all targets are equal. The values are those before the update,
    on tokens that have a target."""
    pairs = [(r.per_token["values"], r.per_token["targets"]) for g in groups for r in g.rollouts
             if {"values", "targets"} <= r.per_token.keys() and r.trained]
    values, targets = (np.concatenate([np.zeros(0), *arrays]) for arrays in (zip(*pairs, strict=True) if pairs
                                                                              else ((), ())))
    known = ~np.isnan(targets)
    values, targets = values[known], targets[known]
    errors = targets - values
    count, value, target, square, error, missed = comm.total(*map(float, (
        len(values), values.sum(), targets.sum(), (targets ** 2).sum(), errors.sum(), (errors ** 2).sum())))
    count = max(count, 1.0)
    variance, left = square / count - (target / count) ** 2, missed / count - (error / count) ** 2
    return {"critic/value_mean": value / count, "critic/target_mean": target / count,
            "critic/explained_variance": 1 - left / variance if variance > 1e-12 else math.nan}
