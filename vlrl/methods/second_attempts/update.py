"""The losses of correct retries (algo.guided.loss), computed in micro-batches separate from the objective's. Each
function maps a `RetryBatch` to a micro-batch's share of the loss.

The losses apply with algo.guided.use=beside. The retries were sampled under the prompt with guidance, and are trained
under the prompt without guidance. No importance ratio corrects for this: p(y | x) / p(y | x, guidance) would undo what
the guidance achieved. In effect the retries are demonstrations that the policy wrote itself; the metric
`guided/logratio` measures how much the guidance changes their log-probability."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vlrl.algo.inputs import requires
from vlrl.algo.method import Objectives
from vlrl.algo.named import Bound
from vlrl.config.base import Positive, Rate
from vlrl.distributed import comm
from vlrl.errors import TrainingError
from vlrl.methods.second_attempts.members import second_attempts
from vlrl.models.packing import training_rows
from vlrl.models.policy import Policy
from vlrl.training.minibatch import MicroBatch, Minibatch, TrainingRow
from vlrl.types import Group, Rollout


@dataclass(eq=False)
class RetryPass:
    """Computes the loss of the retries and its gradient for one optimizer step, each retry under its prompt without
    guidance (see algo.method.Pass)."""

    policy: Policy
    algorithm: Objectives
    loss_of: Bound
    """The loss function that algo.guided.loss names."""
    coef: float
    step: int
    part: Minibatch
    """The micro-batches of the retries. If the loss compares each retry with a failed completion of the same group, the
    rows of these two completions have the same `unit`."""
    loss: float = 0.0
    """This process's share of the loss in the last epoch over the batch."""
    logratio: float = 0.0
    """Sum, over the sampled tokens in the first epoch, of log p(token | prompt) - log p(token | prompt, guidance)."""
    done: int = 0
    """Number of completed epochs over the batch."""
    active = True
    separate_gradient = False

    def begin(self) -> None:
        self.loss, self.logratio = 0.0, self.logratio if self.done else 0.0

    def work(self, b: int) -> None:
        policy, temperature, part = self.policy, self.algorithm.temperature, self.part
        micro = part.batches[b]
        batch, reads = micro.batch.to(policy.device), "reference" in self.loss_of.requires
        with policy.evaluating() if reads else torch.no_grad():
            reference = policy.reference_logprobs(batch, temperature) if reads else None
        stats = policy.logprobs(batch, temperature)
        attempts = retry_batch(part, micro, stats.logprobs, reference, "failures" in self.loss_of.requires)
        loss = self.loss_of(replace(attempts, step=self.step)) * self.coef
        policy.backward(loss)
        self.loss += float(loss.detach())
        if not self.done:
            self.logratio += _logratio(part, micro, attempts)

    def end(self, norm: float, others: float) -> None:
        self.done += 1


def make_pass(policy: Policy, part: Minibatch, algorithm: Objectives, loss: Bound,
              step: int) -> RetryPass | None:
    """Packs the retries in the groups of `part`, the objective's minibatch of one optimizer step. Returns None if no
    process has retries. Called on every process."""
    config = algorithm.config
    groups = [*{id(t.group): t.group for t in part.rollouts}.values()]
    compared = "failures" in loss.requires
    pairs = [(g, r, other) for g in groups for r, other in _pairs(g, config.algo.mask_truncated)]
    rows = [TrainingRow(unit, unit, place, g, r, row, own, row.loss_mask, ())
            for unit, (g, second, failure) in enumerate(pairs)
            for place, r in enumerate([second, failure] if compared else [second])
            for own, row in training_rows(r.completion)]
    tokens, attempts = comm.total(float(sum(t.mask.sum() for t in rows if t.group_index == 0)), float(len(pairs)))
    if not attempts:
        return None
    pack = partial(policy.pack, settings=config.train)
    planned = policy.plan([t.group.prompt for t in rows], [t.row.tokens for t in rows], config.train,
                          policy.most_tokens, [t.row.shown for t in rows], [t.unit for t in rows])
    packed = Minibatch(rows, [MicroBatch(pieces, pack(pieces)) for pieces in planned], pack, tokens, attempts)
    guided: Any = config.algo.guided
    return RetryPass(policy, algorithm, loss, guided.coef, step, packed)


def _pairs(group: Group, drop_truncated: bool) -> list[tuple[Rollout, Rollout]]:
    """Pairs each retry that may be trained on with a failed completion of its group, taking these in turn.
    `drop_truncated`: whether truncated retries are left out."""
    attempts = [r for r in second_attempts(group) if r.completion.loss_mask.any()
                and not (drop_truncated and r.completion.truncated)]
    failures = [r for r in group.rollouts if r.correct is False and r.train_prompt is None]
    return [*zip(attempts, itertools.cycle(failures), strict=False)]


def retry_batch(part: Minibatch, micro: MicroBatch, logprobs: torch.Tensor, reference: torch.Tensor | None,
                compared: bool) -> RetryBatch:
    """Creates the RetryBatch of the micro-batch `micro` of `part`. `compared`: whether each retry must come with its
    failed completion. In that case, raises TrainingError if a retry and its failed completion were put into
    different micro-batches because memory ran out."""
    rows, device = [part.rollouts[r] for r in micro.order], logprobs.device
    units = [*dict.fromkeys(t.unit for t in rows)]
    if compared and any({t.group_index for t in rows if t.unit == unit} != {0, 1} for unit in units):
        raise TrainingError("out of memory: a second attempt and the failed answer that algo.guided.loss compares it "
                            "with do not fit into one micro-batch: lower train.tokens_per_batch, or set "
                            "algo.guided.loss=sft.")

    def flat(values: Sequence[np.ndarray], kind: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *values]).astype(kind)).to(device)

    return RetryBatch(
        logprobs=logprobs, reference=reference, mask=flat([t.mask for t in rows], np.float32),
        is_retry=flat([np.full(len(t.mask), t.group_index == 0) for t in rows], np.bool_),
        pair=flat([np.full(len(t.mask), units.index(t.unit)) for t in rows], np.int64),
        weights=torch.tensor([next(t.group.sample.weight for t in rows if t.unit == unit) for unit in units],
                             dtype=torch.float32, device=device),
        total_tokens=part.total_tokens, total_attempts=part.total_sequences)


def _logratio(part: Minibatch, micro: MicroBatch, attempts: RetryBatch) -> float:
    """Sum of log p(token | prompt) - log p(token | prompt, guidance) over the tokens of the retries. Leaves out tokens
    whose engine log-probability is unknown (NaN)."""
    flat = np.concatenate([np.zeros(0, np.float32), *(part.rollouts[r].row.logprobs for r in micro.order)])
    sampled = torch.from_numpy(flat).to(attempts.mask.device)
    own = (attempts.mask > 0) & attempts.is_retry & sampled.isfinite()
    return float((attempts.logprobs.detach() - sampled)[own].sum())


def metrics(passes: Sequence[RetryPass]) -> dict[str, float]:
    """Metrics of the retries, as means over the optimizer steps with retries, over all processes; {} if no step had
    retries."""
    if not passes:
        return {}
    loss, logratio = comm.total(sum(p.loss for p in passes), sum(p.logratio for p in passes))
    return {"guided/loss": loss / len(passes), "guided/attempts": sum(p.part.total_sequences for p in passes),
            "guided/logratio": logratio / max(sum(p.part.total_tokens for p in passes), 1.0)}


@dataclass(frozen=True, eq=False, kw_only=True)
class RetryBatch:
    """P correct retries of one micro-batch. For a loss that requires "failures", each retry is paired with a failed
    completion of its group. All rows together have N tokens."""

    logprobs: torch.Tensor
    """[N] log-probabilities under the prompt without guidance, with gradient."""
    reference: torch.Tensor | None
    """[N] log-probabilities under the reference model and the same prompt, for losses that require "reference"."""
    mask: torch.Tensor
    """[N] 1.0 on sampled tokens, 0.0 on all others."""
    is_retry: torch.Tensor
    """[N] bool: True on tokens of a retry, False on tokens of the failed completion that it is paired with."""
    pair: torch.Tensor
    """[N] int64 index, 0..P-1, of the retry that each token belongs to; for tokens of a failed completion, of the retry
    that it is paired with."""
    weights: torch.Tensor
    """[P] weight of each retry's sample."""
    total_tokens: float
    """Number of sampled tokens of all retries of the optimizer step, over all processes."""
    total_attempts: float
    """Number of retries of the optimizer step, over all processes."""
    step: int = 0


Loss = Callable[[RetryBatch], torch.Tensor]


def sft(a: RetryBatch) -> torch.Tensor:
    """Cross-entropy of the retries: loss = -sum log p(token | prompt) / tokens. Agent-RLVR (2506.11425)."""
    return -(a.logprobs * a.mask * a.is_retry * a.weights[a.pair]).sum() / max(a.total_tokens, 1.0)


def expo(a: RetryBatch, beta: Rate = 0.1, decay: Positive = 200) -> torch.Tensor:
    """loss = -beta (1 - step / decay) * (mean over the retries of their mean log p(token | prompt)). The loss is 0 from
    step `decay` on.

    The self-explanation term of ExPO (arXiv 2507.02834). The linear decay is our choice."""
    own = a.mask * a.is_retry
    lengths, sums = (torch.zeros_like(a.weights).index_add(0, a.pair, v) for v in (own, a.logprobs * own))
    fading = beta * max(0.0, 1 - a.step / decay)
    return -fading * (sums / lengths.clamp(min=1) * a.weights).sum() / max(a.total_attempts, 1.0)


@requires("reference", "failures")
def dpo(a: RetryBatch, beta: Rate = 0.1) -> torch.Tensor:
    """loss = -mean log sigmoid(beta (D(retry) - D(failure))), where D = log p - log p(reference) of a whole completion.

    Direct Preference Optimization (2305.18290) on pairs of a correct retry with guidance and a failed completion
    without it, as Agent-RLVR (2506.11425) trains."""
    assert a.reference is not None
    gained = (a.logprobs - a.reference) * a.mask * torch.where(a.is_retry, 1.0, -1.0)
    margin = torch.zeros_like(a.weights).index_add(0, a.pair, gained)
    return -(torch.nn.functional.logsigmoid(beta * margin) * a.weights).sum() / max(a.total_attempts, 1.0)


LOSSES: dict[str, Loss] = {"sft": sft, "expo": expo, "dpo": dpo}
