"""The method behind rollout.branch: generates groups whose completions share text, because they branch from each other
or are leaves of a tree search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.algo.method import Done, Method, RolloutContext, Run
from vlrl.engine.base import Request
from vlrl.methods.tree import branching
from vlrl.methods.tree.branching import BranchingGenerator
from vlrl.methods.tree.search import SearchGenerator
from vlrl.task import Task
from vlrl.types import Completion, Sample


class TreeRollouts(Method):
    """Generates the groups of a step by branching (rollout.branch.roots) or by tree search (rollout.branch.search)."""

    collective = True
    state_at = "source.search"

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        branching.check(self.config, task, generates)

    def start(self, run: Run) -> None:
        self.writer = (SearchGenerator(self.config) if self.settings.search else
                       BranchingGenerator(self.config, run.policy.processor.tokenizer.decode))

    def generate(self, requests: Sequence[Request], ask: RolloutContext, done: Done | None) -> list[list[Completion]]:
        if isinstance(self.writer, SearchGenerator):
            return self.writer.generate(ask.engine, requests, ask.judged, ask.step, done)
        return self.writer.generate(ask.engine, requests, done)

    def metrics(self) -> Mapping[str, float]:
        return self.writer.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.writer.state_dict() if isinstance(self.writer, SearchGenerator) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.writer, SearchGenerator):
            self.writer.load_state_dict(state)
