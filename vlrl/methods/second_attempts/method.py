"""The method behind algo.guided: retries groups that have wrong completions, with guidance in the prompt, and trains on
the retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlrl.algo.method import Method, Objectives, RolloutContext, Run
from vlrl.algo.named import Bound, bind
from vlrl.engine.base import Request
from vlrl.methods.second_attempts import update
from vlrl.methods.second_attempts.attempts import RetryGenerator, check
from vlrl.methods.second_attempts.keep import as_completion
from vlrl.methods.second_attempts.loss import LOSSES
from vlrl.models.policy import Policy
from vlrl.models.reference import Reference
from vlrl.rollout.generate import answer_of
from vlrl.task import Task
from vlrl.training.minibatch import Minibatch
from vlrl.types import Completion, Group, Prompt, Sample


class SecondAttempts(Method):
    """Retries groups after they are scored, and trains on the kept retries as algo.guided.use says."""

    collective = True

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        loss = bind("algo.guided.loss", settings.loss, LOSSES)
        self.loss: Bound | None = loss if settings.beside else None
        """The loss algo.guided.loss; None if retries become members of their groups."""
        self.requires = loss.requires if settings.beside else frozenset()

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        if generates:
            check(self.config, task, samples)

    def start(self, run: Run) -> None:
        own = Reference(run.policy, self.config)

        def read(prompts: Sequence[Prompt], tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
            return own.logprobs(prompts, [*map(as_completion, tokens)], self.algorithm.temperature, own=True)

        self.guiding = RetryGenerator(self.config, run.encode, read)

    def scored(self, requests: Sequence[Request], groups: Sequence[Group], ask: RolloutContext) -> Sequence[Group]:
        """Adds retries to the groups' `aside`. The retries are scored as a separate group, as completions of the
        unchanged sample."""
        stays = self.guiding.trains_guided
        answers = [[answer_of(r.completion, g.prompt, ask.step, r.variant) for r in g.rollouts] for g in groups]

        def score(group: Group, sampled: Prompt, completions: Sequence[Completion]) -> Group:
            moved = [c.behind(sampled, group.prompt) if c.episode_id and not stays else c for c in completions]
            return ask.rescored(group, moved)

        return self.guiding(ask.engine, ask.task, requests, groups, answers, score)

    def chosen(self, groups: Sequence[Group]) -> Sequence[Group]:
        return [*map(self.guiding.trained_form, groups)]

    def passes(self, policy: Policy, parts: Sequence[Minibatch], drawn: Sequence[Group],
               step: int) -> Sequence[update.RetryPass | None]:
        if self.loss is None:
            return [None] * len(parts)
        return [update.make_pass(policy, part, self.algorithm, self.loss, step) for part in parts]

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        return update.metrics([one for one in passes if one])

    def metrics(self) -> Mapping[str, float]:
        return self.guiding.metrics()
