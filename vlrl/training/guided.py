"""The update on correct second attempts (algo.guided): their own micro-batches beside those of the objective."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.guided import Attempts
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.errors import TrainingError
from vlrl.models.oom import each_batch
from vlrl.models.policy import Policy
from vlrl.task.variants import second_attempts
from vlrl.training.minibatch import MicroBatch, Minibatch, Numbered, Trained
from vlrl.types import Group, Rollout


@dataclass(eq=False)
class Second:
    """The second attempts of one optimizer step, packed under the prompts without guidance."""

    part: Minibatch
    """Rows with the same `unit` are an attempt, and where the loss compares it, a failure of its group."""
    loss: float = 0.0
    """This process's share of the last pass."""
    logratio: float = 0.0
    """Sum over the sampled tokens of the first pass of log p(prompt) - log p(prompt and guidance)."""
    passes: int = 0


def make_second(policy: Policy, part: Sequence[Numbered], config: Config, algorithm: Algorithm) -> Second | None:
    """Packs the second attempts of one optimizer step; None where no process has any. Called on every process."""
    if algorithm.guided is None:
        return None
    groups = [*{id(g): g for _, g, _ in part}.values()]
    compared = "failures" in algorithm.guided.requires
    pairs = [(g, r, other) for g in groups for r, other in _pairs(g, config.algo.mask_truncated)]
    rows = [Trained(unit, unit, place, g, r, row, own, row.loss_mask, ())
            for unit, (g, second, failure) in enumerate(pairs)
            for place, r in enumerate([second, failure] if compared else [second])
            for own, row in r.completion.rows()]
    tokens, attempts = comm.total(float(sum(t.mask.sum() for t in rows if t.place == 0)), float(len(pairs)))
    if not attempts:
        return None
    pack = partial(policy.pack, settings=config.train)
    planned = policy.plan([t.group.prompt for t in rows], [t.row.tokens for t in rows], config.train,
                          policy.most_tokens, [t.row.shown for t in rows], [t.unit for t in rows])
    return Second(Minibatch(rows, [MicroBatch(pieces, pack(pieces)) for pieces in planned], pack, tokens, attempts))


def _pairs(group: Group, drop_truncated: bool) -> list[tuple[Rollout, Rollout]]:
    """Returns each correct second attempt with a failure of its group, which take turns."""
    attempts = [r for r in second_attempts(group) if r.completion.loss_mask.any()
                and not (drop_truncated and r.completion.truncated)]
    failures = [r for r in group.rollouts if r.correct is False and r.train_prompt is None]
    return [*zip(attempts, itertools.cycle(failures), strict=False)]


def learn(policy: Policy, second: Second, algorithm: Algorithm, coef: float, step: int,
          again: Callable[[], None]) -> int:
    """Forward and backward of every micro-batch; gradients add up to those that are there. Returns how many were halved
    for lack of memory: then `again` has to make anew what was there.
    """
    guided, part = algorithm.guided, second.part
    assert guided is not None

    def work(b: int) -> None:
        micro = part.batches[b]
        batch = micro.batch.to(policy.device)
        with policy.evaluating() if "reference" in guided.requires else torch.no_grad():
            reference = (policy.reference_logprobs(batch, algorithm.temperature)
                         if "reference" in guided.requires else None)
        stats = policy.logprobs(batch, algorithm.temperature)
        attempts = attempts_of(part, micro, stats.logprobs, reference, "failures" in guided.requires)
        loss = guided(replace(attempts, step=step)) * coef
        policy.backward(loss)
        second.loss += float(loss.detach())
        if not second.passes:
            second.logratio += _logratio(part, micro, attempts)

    def begin() -> None:
        second.loss, second.logratio = 0.0, second.logratio if second.passes else 0.0

    def anew() -> None:
        begin()
        again()

    begin()
    cuts = each_batch(policy, part.batches, work, part.halve, anew)
    second.passes += 1
    return cuts


def attempts_of(part: Minibatch, micro: MicroBatch, logprobs: torch.Tensor, reference: torch.Tensor | None,
                compared: bool) -> Attempts:
    """Returns what a loss sees of one micro-batch. Raises TrainingError where an attempt and the failure that it is
    compared with went apart when memory did not suffice."""
    rows, device = [part.rollouts[r] for r in micro.order], logprobs.device
    units = [*dict.fromkeys(t.unit for t in rows)]
    if compared and any({t.place for t in rows if t.unit == unit} != {0, 1} for unit in units):
        raise TrainingError("out of memory in the update of a second attempt and the failure that algo.guided.loss "
                            "compares it with: lower train.tokens_per_batch, or set algo.guided.loss=sft.")

    def flat(values: Sequence[np.ndarray], kind: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *values]).astype(kind)).to(device)

    return Attempts(
        logprobs=logprobs, reference=reference, mask=flat([t.mask for t in rows], np.float32),
        second=flat([np.full(len(t.mask), t.place == 0) for t in rows], np.bool_),
        pair=flat([np.full(len(t.mask), units.index(t.unit)) for t in rows], np.int64),
        weights=torch.tensor([next(t.group.sample.weight for t in rows if t.unit == unit) for unit in units],
                             dtype=torch.float32, device=device),
        total_tokens=part.total_tokens, total_attempts=part.total_sequences)


def _logratio(part: Minibatch, micro: MicroBatch, attempts: Attempts) -> float:
    """An engine may not know a token's log-probability (NaN)."""
    flat = np.concatenate([np.zeros(0, np.float32), *(part.rollouts[r].row.logprobs for r in micro.order)])
    sampled = torch.from_numpy(flat).to(attempts.mask.device)
    own = (attempts.mask > 0) & attempts.second & sampled.isfinite()
    return float((attempts.logprobs.detach() - sampled)[own].sum())


def metrics(seconds: Sequence[Second]) -> dict[str, float]:
    """Returns means over the optimizer steps that had second attempts, over all processes; {} where none had any."""
    if not seconds:
        return {}
    loss, logratio = comm.total(sum(s.loss for s in seconds), sum(s.logratio for s in seconds))
    return {"guided/loss": loss / len(seconds), "guided/attempts": sum(s.part.total_sequences for s in seconds),
            "guided/logratio": logratio / max(sum(s.part.total_tokens for s in seconds), 1.0)}
