"""On-policy distillation: a teacher scores each token of the policy's completions.

The loss is L = objective * L_RL + coef * sum_t weight KL_t / tokens, with `objective` and `coef` from
algo.distillation. A loss function maps a `TokenChunk` of n tokens to the KL_t [n] in nats, with gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlrl.algo.method import Method, Objectives, Run
from vlrl.algo.named import Bound, bind
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.methods.distillation import teacher
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
        """Returns the metric distillation/kl, the mean KL to the teacher over the step's optimizer steps, each measured
        in the last epoch over the batch. Returns {} if there was no optimizer step."""
        done = [one for one in passes if one and one.done]
        return {"distillation/kl": comm.total(sum(one.kl for one in done))[0] / len(done)} if done else {}


@dataclass(eq=False)
class DistillationPass:
    """Computes the distillation loss and its gradient for one optimizer step, on the tokens that the objective trains
    (see algo.method.Pass)."""

    policy: Policy
    teacher: Any
    """The teacher's frozen model, or the function of teacher.connect if the teacher is on a server."""
    algorithm: Objectives
    loss: Bound
    coef: float
    part: Minibatch
    """The objective's minibatch, whose micro-batches this pass shares."""
    known: Sequence[np.ndarray] | None = None
    """[T] log-probabilities of each row's tokens under a teacher on a server, 0 on tokens that are not trained; None if
    the teacher is loaded in the trainer."""
    kl: float = 0.0
    """This process's share of the KL in the last epoch over the batch, before it is multiplied by `coef`."""
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


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """A chunk of n completion tokens with the logits of policy and teacher. Logits are float32 and divided by the
    sampling temperature; they are -inf for tokens that cannot be sampled."""

    logits: torch.Tensor
    """[n, V] logits of the policy, with gradient."""
    teacher: torch.Tensor
    """[n, V] logits of the teacher."""
    tokens: torch.Tensor
    """[n] int64 ids of the sampled tokens."""


Loss = Callable[[TokenChunk], torch.Tensor]


def reverse_kl(x: TokenChunk) -> torch.Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) over all tokens v that can be sampled, with p the policy and q the
    teacher.

    On the policy's own completions this is on-policy distillation: GKD (arXiv 2306.13649) with on-policy data and the
    reverse KL, and the second phase of Qwen3's distillation (arXiv 2505.09388). The gradient with respect to the logits
    z is d KL / d z_v = p_v (log p_v - log q_v - KL), whichever model sampled the token; no gradient goes through the
    sampling.

    The loss is computed as sum_v p_v sg(log p_v - log q_v), where sg stops the gradient. The omitted gradient sum_v p_v
    d log p_v is 0, because it is the derivative of sum_v p_v = 1. So the gradient is exactly 0 if policy and teacher
    agree."""
    own = x.logits.log_softmax(-1)
    gap = (own.detach() - x.teacher.log_softmax(-1)).masked_fill(own.detach() == -torch.inf, 0)
    return (own.exp() * gap).sum(-1)


def sampled_kl(x: TokenChunk) -> torch.Tensor:
    """The loss log p(y) - log q(y) of the sampled token y, with the gradient (log p(y) - log q(y)) d log p(y). p is the
    policy and q the teacher.

    This is a policy gradient in which each token has the advantage -(log p(y) - log q(y)). For y sampled from p, value
    and gradient are unbiased estimates of KL(p || q) and its gradient. The loss needs a single number per token from
    the teacher, and has more variance than reverse_kl. It is biased for tokens sampled by older weights."""
    own, theirs = (z.log_softmax(-1).gather(-1, x.tokens[:, None])[:, 0] for z in (x.logits, x.teacher))
    return kl_of_sampled(own, theirs)


def kl_of_sampled(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Computes sampled_kl from the log-probabilities [n] of the sampled tokens under policy and teacher."""
    gap = (policy - teacher).detach()
    return gap * (1 + policy - policy.detach())


LOSSES: dict[str, Loss] = {"reverse_kl": reverse_kl, "sampled_kl": sampled_kl}
