"""Advantages with a critic: its values before the update, and metrics of their accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlrl.algo.inputs import Scores
from vlrl.algo.method import Method, Objectives
from vlrl.algo.named import bind
from vlrl.algo.tables import ADVANTAGES
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.methods.critic.values import critic_metrics, with_values
from vlrl.models.policy import Policy
from vlrl.types import Group


class CriticValues(Method):
    """Computes the critic's values for the advantage; the head itself is critic.head.Critic."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        named = self.config.algo.advantage
        if "values" not in bind("algo.advantage", named, ADVANTAGES).requires:
            raise ConfigError(f"algo.critic is set, and algo.advantage={named.name!r} reads no values: set "
                              "algo.advantage=gae, turn_gae, bilevel_gae or macro_gae, or algo.critic=null")

    def read(self, policy: Policy, groups: Sequence[Group], step: int) -> Sequence[Group]:
        return with_values(policy, groups, self.algorithm)

    def scores(self, s: Scores) -> Scores:
        return replace(s, gamma=self.settings.gamma, lam=self.settings.lam)

    def credited(self, groups: Sequence[Group]) -> Mapping[str, float]:
        comm.together(lambda: self._check(groups))
        return critic_metrics(groups)

    def _check(self, groups: Sequence[Group]) -> None:
        if any("values" in r.per_token and "targets" not in r.per_token for g in groups for r in g.rollouts):
            raise ConfigError(f"algo.advantage={self.config.algo.advantage.name!r} gives the critic nothing to learn: "
                              "return inputs.Estimates, with a target for each token, or set algo.critic=null and do "
                              'not require "values"')
