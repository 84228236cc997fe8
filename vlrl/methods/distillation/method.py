"""On-policy distillation: a teacher scores each token of the policy's completions.

The loss is L = objective * L_RL + coef * sum_t weight KL_t / tokens, with `objective` and `coef` from
algo.distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlrl.algo.method import Method, Objectives, Run
from vlrl.algo.named import Bound, bind
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.methods.distillation import teacher
from vlrl.methods.distillation.loss import LOSSES, TokenChunk, kl_of_sampled
from vlrl.models.policy import Policy
from vlrl.monitoring.metrics import phase
from vlrl.task import Task
from vlrl.training.minibatch import MicroBatch, Minibatch
from vlrl.types import Group, Sample


class Distillation(Method):
    """Trains the policy towards a teacher on the completions of each step, in addition to the objective or instead of
    it."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        self.loss = bind("algo.distillation.loss", settings.loss, LOSSES)

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        if not generates:
            raise ConfigError("algo.distillation trains on the policy's own answers, but this run generates none: "
                              "use vlrl train, or set algo.distillation=null")
        teacher.check(self.config)

    def start(self, run: Run) -> None:
        find = teacher.connect if self.settings.server else teacher.load
        self.teacher = find(self.config, run.policy)

    def share(self, step: int) -> float:
        return self.settings.objective

    def passes(self, policy: Policy, parts: Sequence[Minibatch], drawn: Sequence[Group],
               step: int) -> Sequence[DistillationPass | None]:
        known = self._asked(parts) if self.settings.server else [None] * len(parts)
        return [DistillationPass(policy, self.teacher, self.algorithm, self.loss, self.settings.coef, part, scores)
                if part.total_tokens else None for part, scores in zip(parts, known, strict=True)]

    def _asked(self, parts: Sequence[Minibatch]) -> list[list[np.ndarray]]:
        """Asks the teacher's server, in one call for the whole step, for the log-probabilities of the completions'
        tokens. Returns, for each optimizer step, an array [T] per row."""
        with phase("teacher"):
            scores = iter(self.teacher([t for part in parts for t in part.rollouts], self.algorithm.temperature))
        return [[next(scores) for _ in part.rollouts] for part in parts]

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        """The mean KL to the teacher over the step's optimizer steps, each measured in its last epoch over the batch;
        {} if there was no optimizer step."""
        done = [one for one in passes if one and one.done]
        return {"distillation/kl": comm.total(sum(one.kl for one in done))[0] / len(done)} if done else {}


@dataclass(eq=False)
class DistillationPass:
    """Computes the distillation loss of one optimizer step, on the tokens that the objective trains, and its gradient;
    a Pass of the training loop."""

    policy: Policy
    teacher: Any
    """The teacher's frozen model."""
    algorithm: Objectives
    loss: Bound
    coef: float
    part: Minibatch
    """The objective's minibatch, whose micro-batches this pass shares."""
    known: Sequence[np.ndarray] | None = None
    """[T] log-probabilities of each row's tokens under a teacher on a server, 0 on tokens that are not trained; None if
    the teacher is loaded in the trainer."""
    kl: float = 0.0
    """This process's share of the KL in the last epoch, before it is multiplied by `coef`."""
    done: bool = False
    active = True
    separate_gradient = False

    def begin(self) -> None:
        self.kl = 0.0

    def work(self, b: int) -> None:
        micro, policy = self.part.batches[b], self.policy
        rows = [self.part.rollouts[r] for r in micro.order]
        weights = np.concatenate([np.zeros(0), *(t.mask * t.group.sample.weight for t in rows)]).astype(np.float32)
        kl = (self._of(micro) * torch.from_numpy(weights).to(policy.device)).sum() / self.part.total_tokens
        policy.backward(kl * self.coef)
        self.kl += float(kl.detach())

    def _of(self, micro: MicroBatch) -> torch.Tensor:
        """[N] distillation loss of each token of a micro-batch."""
        temperature = self.algorithm.temperature
        if self.known is None:
            def kl(logits: torch.Tensor, tokens: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
                return self.loss(TokenChunk(logits, teacher, tokens))

            return self.policy.logprobs(micro.batch, temperature, more={"kl": kl}, second=self.teacher).more["kl"]
        theirs = np.concatenate([np.zeros(0, np.float32), *(self.known[r] for r in micro.order)])
        own = self.policy.logprobs(micro.batch, temperature).logprobs
        return kl_of_sampled(own, torch.from_numpy(theirs).to(own.device))

    def end(self, norm: float, others: float) -> None:
        self.done = True
