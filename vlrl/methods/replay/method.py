"""Replay: stored rollouts, of earlier steps and of other runs, are trained on beside the policy's new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlrl.algo.method import Method, Objectives, Run
from vlrl.methods.replay import update
from vlrl.methods.replay.draw import ReplayFunctions, ReplaySampler, check
from vlrl.models.policy import Policy
from vlrl.task import Task
from vlrl.types import Group, Sample


class Replay(Method):
    """Draws stored groups in each step, and trains on them by algo.stored.rule."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        self.parts = ReplayFunctions.of(settings)
        self.requires = self.parts.rule.requires

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        check(self.config, task)

    def start(self, run: Run) -> None:
        self.stored = ReplaySampler(self.config, run.task, run.encode, run.samples, run.score, run.services,
                                    run.policy, self.parts)

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        return self.stored(step, flush)

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group],
               step: int) -> Sequence[update.ReplayPass | None]:
        return update.make_passes(policy, drawn, self.algorithm, self.parts.rule, step)

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        return update.step_metrics(passes)

    def metrics(self) -> Mapping[str, float]:
        return self.stored.metrics()
