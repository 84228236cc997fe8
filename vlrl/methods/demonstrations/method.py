"""Given answers, drawn from the training rows, are trained on beside the policy's own completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlrl.algo.method import Method, Objectives, Run
from vlrl.algo.named import bind
from vlrl.methods.demonstrations import update
from vlrl.methods.demonstrations.draw import DemonstrationSampler, check
from vlrl.methods.demonstrations.mixes import MIXES, interleaves
from vlrl.models.policy import Policy
from vlrl.task import Task
from vlrl.types import Group, Sample


class Demonstrations(Method):
    """L = rl * L_RL + share * L_demonstrations, by algo.demonstrations.mix."""

    state_at = "algorithm.demonstrations"

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        self.bound = bind("algo.demonstrations.mix", settings.mix, MIXES)
        self.mix = self.bound.function

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        check(self.config, task, samples)

    def start(self, run: Run) -> None:
        self.demonstrator = DemonstrationSampler(self.config, run.task, run.encode, run.engine, run.samples, self.mix)

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        return self.demonstrator(step, outcomes)

    def share(self, step: int) -> float:
        return self.mix.shares(step, self.config.seed)[0]

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group],
               step: int) -> Sequence[update.DemonstrationPass | None]:
        shown = () if interleaves(self.mix) else drawn
        return update.make_passes(policy, shown, self.algorithm, self.mix, step)

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        if interleaves(self.mix):
            return update.interleave(policy, drawn, self.algorithm, self.mix, stats["grad_norm"])
        return update.step_metrics(passes, self.mix, self.config.seed, step)

    def state_dict(self) -> dict[str, Any]:
        return self.bound.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bound.load_state_dict(state)
