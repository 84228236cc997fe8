"""The functions that the settings `algo.*` name, bound to their options, with their state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vlrl.algo.method import Method, methods_by_state_key, methods_of
from vlrl.algo.named import Bound, bind
from vlrl.algo.objective import Objective
from vlrl.algo.reference import REFERENCES
from vlrl.algo.statistics import statistics
from vlrl.algo.tables import ADVANTAGES, BATCHES, SHAPINGS
from vlrl.config.schema import AlgoSettings, Config
from vlrl.config.sections import GIVEN
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models.policy import Policy


class KLCoefficient:
    """The coefficient of the KL term: `algo.kl_coef`, adapted towards `algo.kl_target` if that is set. After each step:
    coef <- coef * (1 + clip(KL / target - 1, -0.2, 0.2) * completions of the step / `horizon`). Fine-Tuning Language
    Models from Human Preferences (arXiv 1909.08593) section 2.2, with the KL per token instead of per completion."""

    def __init__(self, start: float, target: float | None = None, horizon: int = 10_000):
        self.value, self.target, self.horizon = start, target, horizon

    def observe(self, kl: float, answers: float) -> None:
        """Updates the coefficient after a step. kl: mean KL per token of the step. answers: number of the step's
        completions."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * answers / self.horizon

    def metrics(self) -> dict[str, float]:
        return {"kl_coef": self.value} if self.target is not None else {}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value} if self.target is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state.get("value", self.value)


class Algorithm:
    """The functions that turn a run's rewards into a loss, with their state (advantage, KL coefficient, entropy,
    reference). Raises ConfigError, which names the setting, for an unknown name or option and for an invalid value."""

    def __init__(self, config: Config):
        algo = config.algo
        self.config = config
        self.advantage = bind("algo.advantage", algo.advantage, ADVANTAGES)
        self.shaping = [bind(f"algo.shaping.{i}", s, SHAPINGS) for i, s in enumerate(algo.shaping)]
        self.batch = bind("algo.batch", algo.batch, BATCHES)
        _refuse_idle(self.advantage, self.shaping, algo)
        for what in sorted(self.advantage.requires & GIVEN.keys()):
            if problem := GIVEN[what](config, self.advantage.name):
                raise ConfigError(problem)
        self.objective = Objective.of(algo)
        self._entropy: Any = self.objective.entropy and self.objective.entropy.function
        self.reference = bind("algo.reference", algo.reference, REFERENCES)
        self.kl = KLCoefficient(algo.kl_coef, algo.kl_target, algo.kl_horizon)
        self.statistics = statistics(self.objective.requires)
        """Statistics of the logits that the objective requires, by name; see logprobs.token_stats."""
        self.old_statistics = statistics(self.objective.requires, "old_stat:")
        """Statistics that the objective requires under the weights that sampled the rollouts, by name."""
        self.nonfinite = 0
        """Number of consecutive steps in which an optimizer step was skipped because of NaN or infinity."""
        self.methods: tuple[Method, ...] = methods_of(self)  # the active methods, in the order of config/sections.py

    @property
    def requires(self) -> frozenset[str]:
        """Names of inputs that functions and methods require (inputs.requires), plus "kl" with algo.kl_in=reward."""
        before = frozenset[str]().union(*(b.requires for b in (self.advantage, *self.shaping, self.batch)))
        in_reward = {"kl"} if self.config.algo.kl_coef and self.config.algo.kl_in == "reward" else set()
        beside = frozenset[str]().union(*(method.requires for method in self.methods))
        return self.objective.requires | before | in_reward | beside

    @property
    def scores_pairs(self) -> bool:
        """Whether the loss (algo.loss) trains a reward head on pairs of answers instead of a policy."""
        return "pairs" in self.objective.requires

    @property
    def needs_reference(self) -> bool:
        return bool({"reference", "kl"} & self.requires)

    @property
    def moves_reference(self) -> bool:
        """Whether the reference policy can differ from the run's initial model."""
        return self.reference.function.moves

    def share(self, step: int) -> float:
        """The weight of the objective in a step: the product of the factors that the methods return (Method.share)."""
        return math.prod(method.share(step) for method in self.methods)

    @property
    def temperature(self) -> float:
        """Sampling temperature of this step, at which training also computes log-probabilities."""
        base = self.config.rollout.temperature
        return self._entropy.temperature(base) if hasattr(self._entropy, "temperature") else base

    def after_optimizer_step(self, entropy: float) -> None:
        """Passes the policy entropy of an optimizer step to the function algo.entropy. Called only if
        `watches_entropy`. entropy: mean over the tokens of the optimizer step, on all processes."""
        self._entropy.observe(entropy)

    @property
    def watches_entropy(self) -> bool:
        return hasattr(self._entropy, "observe")

    def after_step(self, policy: Policy, optimizer: torch.optim.Optimizer, stats: dict[str, float],
                   done: int) -> dict[str, float]:
        """Updates coefficients and reference after a step. Returns further metrics of the step. stats: the metrics of
        the step. done: number of completed steps."""
        tells = {**self.kl.metrics(), **(self._entropy.metrics() if hasattr(self._entropy, "metrics") else {})}
        if hasattr(self._entropy, "observe_step"):
            tells["temperature"] = self.temperature
            if math.isfinite(stats["entropy"]):
                self._entropy.observe_step(stats["entropy"], self.config.rollout.temperature, policy.choices)
        if math.isfinite(stats["kl"]):  # nothing is known of a step that was left out
            self.kl.observe(stats["kl"], self.config.rollout.prompts_per_step * self.config.rollout.group_size)
        if self.moves_reference:  # without a reference too: a reset starts the optimizer afresh
            weights = dict(policy.trainable())
            policy.updating = True
            with torch.no_grad():
                reset = self.reference.function.after_step(
                    policy.moving_reference, weights, optimizer, stats["kl"], done)
            tells["reference_reset"] = float(reset)
        return tells

    @property
    def _functions(self) -> dict[str, Bound]:
        return {"advantage": self.advantage, "batch": self.batch,
                **{f"shaping.{i}": s for i, s in enumerate(self.shaping)}, **self.objective.functions}

    def state_dict(self, policy: Policy) -> dict[str, Any]:
        """The state for a checkpoint, including the weights of a moving reference."""
        states = {**{place: f.state_dict() for place, f in self._functions.items()},
                  **{key: m.state_dict() for key, m in methods_by_state_key(self.methods, "algorithm").items()},
                  "kl_coef": self.kl.state_dict(),
                  "reference": dict(policy.moving_reference) if self.moves_reference else {},
                  **({policy.head.key: dict(policy.head.state_dict())} if policy.head else {}),
                  "nonfinite": {"steps": self.nonfinite} if self.nonfinite else {}}
        return {k: v for k, v in states.items() if v}

    def load_state_dict(self, state: dict[str, Any], policy: Policy) -> None:
        for place, bound in self._functions.items():
            bound.load_state_dict(state.get(place, {}))
        for key, method in methods_by_state_key(self.methods, "algorithm").items():
            if key in state:
                method.load_state_dict(state[key])
        self.kl.load_state_dict(state.get("kl_coef", {}))
        if policy.head:
            policy.head.load_state_dict(state[policy.head.key])
        self.nonfinite = int(state.get("nonfinite", {}).get("steps", 0))
        for name, weight in state.get("reference", {}).items():
            comm.copy_into_shard(policy.moving_reference[name], weight)


def _refuse_idle(advantage: Bound, shaping: Sequence[Bound], algo: AlgoSettings) -> None:
    if "parts" not in advantage.requires:
        return
    if shaping:
        raise ConfigError(f"algo.advantage={advantage.name!r} reads the reward parts, so "
                          f"algo.shaping={shaping[0].name!r}, which changes the reward, would have no effect. Remove "
                          "algo.shaping, or choose an advantage that reads the reward")
    if algo.kl_coef and algo.kl_in == "reward":
        raise ConfigError(f"algo.advantage={advantage.name!r} reads the reward parts, so algo.kl_in=reward would have "
                          "no effect: set algo.kl_in=loss")
