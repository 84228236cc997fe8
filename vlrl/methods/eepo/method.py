"""Sample, then forget: after the first half of each group is sampled, the policy is made less likely to repeat this
half, and then samples the second half.

EEPO: Exploration-Enhanced Policy Optimization via Sample-Then-Forget (arXiv 2510.05837), as described in the paper.
Between the two halves of a group the policy takes one small step that suppresses the completions it has just sampled,
so that the second half explores elsewhere. If the entropy is high, this step is skipped. The weights are restored, bit
for bit, before the update. The second half is then off-policy: its sampler log-probabilities are those of the modified
weights, and algo.correction weights its tokens by p(trainer) / p(sampler). The correction, its bound and the entropy
limit in the preset are this project's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vlrl.algo.method import Done, Method, RolloutContext, Run
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Request
from vlrl.models.packing import training_rows
from vlrl.models.policy import Policy
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt

_NEVER_SURE = 1e-3
"""Added inside the logarithm, so that log(1 - p) is finite at p = 1."""


class SampleThenForget(Method):
    """Samples the first half of each group, suppresses its completions, samples the second half, and restores the
    weights."""

    collective = True

    def start(self, run: Run) -> None:
        self.forgetting = Forgetting(run.policy, self.config)

    def generate(self, requests: Sequence[Request], ask: RolloutContext, done: Done | None) -> list[list[Completion]]:
        engine, policy = ask.engine, self.forgetting.policy
        firsts = engine.generate([replace(r, n=(r.n + 1) // 2) for r in requests])
        rests = [replace(r, n=r.n - len(first), key=(6, *r.key[1:])) for r, first in zip(requests, firsts, strict=True)]
        sampled = [(r.prompt, first) for r, first in zip(requests, firsts, strict=True)]
        with self.forgetting(sampled, ask.step, ask.temperature):
            engine.sync(policy, ask.step)
            rest = engine.generate(rests, (lambda i, completions: done(i, [*firsts[i], *completions]))
                                   if done else None)
        engine.sync(policy, ask.step)
        return [[*a, *b] for a, b in zip(firsts, rest, strict=True)]


class Forgetting:
    """Makes the policy less likely to produce given completions, inside a block `with forgetting(answers, step,
    temperature):`."""

    def __init__(self, policy: Policy, config: Config):
        self.policy, self.config = policy, config
        self.settings: Any = config.rollout.forget

    @contextlib.contextmanager
    def __call__(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]], step: int,
                 temperature: float) -> Iterator[None]:
        """Context manager that suppresses the completions of all processes and restores the weights on exit. `answers`
        holds each prompt with its completions. Called on every process."""
        if not self._due(answers):
            yield
            return
        self.policy.scatter()
        parameters = [p for _, p in self.policy.trainable()]
        weights = [p.detach().clone() for p in parameters]
        self.policy.swapped = True
        try:
            with phase("forget"):
                self._gradients(answers, step, temperature)
                self._step(parameters)
            yield
        finally:
            with torch.no_grad():
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.grad = None
                    parameter.copy_(weight)
            self.policy.swapped = False

    def _due(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]]) -> bool:
        """Whether the completions are to be suppressed: only if the entropy, estimated as the mean -log p of the
        sampled tokens, is at most rollout.forget.entropy."""
        sampled = [c.logprobs[c.loss_mask & ~np.isnan(c.logprobs)] for _, completions in answers for c in completions]
        surprise, count = comm.total(-float(sum(float(s.sum(dtype=np.float64)) for s in sampled)),
                                     float(sum(len(s) for s in sampled)))
        limit = self.settings.entropy
        return count > 0 and (limit is None or surprise / count <= limit)

    def _gradients(self, answers: Sequence[tuple[Prompt, Sequence[Completion]]], step: int,
                   temperature: float) -> None:
        """Computes the gradient of the mean of -log(1 - p) over all sampled tokens; more probable tokens are suppressed
        more."""
        policy, train = self.policy, self.config.train
        rollouts = [(prompt, row) for prompt, completions in answers for done in completions
                    for _, row in training_rows(done)]
        (total,) = comm.total(float(sum(c.loss_mask.sum() for _, c in rollouts)))
        # dropout is seeded by the step, so that a resumed run repeats it
        torch.manual_seed(np.random.SeedSequence([self.config.seed, 7, step, comm.rank()]).generate_state(1)[0])
        for pieces in policy.plan([p for p, _ in rollouts], [c.tokens for _, c in rollouts], train,
                                  shown=[c.shown for _, c in rollouts]):
            batch = policy.pack(pieces, train)
            logprobs = policy.logprobs(batch, temperature).logprobs.float()
            masks = [rollouts[i][1].loss_mask for i in torch.unique_consecutive(batch.rollout_id).tolist()]
            mask = torch.from_numpy(np.concatenate(masks) if masks else np.zeros(0, bool)).to(logprobs.device)
            loss = -(torch.log(1 + _NEVER_SURE - logprobs.exp()) * mask).sum() / total
            policy.scaler.scale(loss).backward()

    def _step(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Moves the weights against the gradient, by rollout.forget.lr per weight in root mean square. Does nothing if
        the gradient is not finite or is 0."""
        comm.sum_gradients(parameters)
        used = [p for p in parameters if p.grad is not None]
        norm = float(comm.full_tensor(torch.nn.utils.get_total_norm([p.grad for p in used if p.grad is not None])))
        if not used or norm == 0 or not math.isfinite(norm):
            return
        size = self.settings.lr * math.sqrt(sum(p.numel() for p in used)) / norm
        with torch.no_grad():
            for parameter in used:
                parameter.add_(parameter.grad, alpha=-size)  # type: ignore[arg-type]
