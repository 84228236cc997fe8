"""The loss of replayed rollouts, computed in micro-batches separate from the objective's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vlrl.algo.method import Objectives
from vlrl.algo.named import Bound
from vlrl.distributed import comm
from vlrl.methods.replay.rules import ReplayBatch, apply_keep
from vlrl.models.oom import each_batch
from vlrl.models.policy import Policy
from vlrl.training.minibatch import Minibatch, NumberedRollout, make_minibatch, split
from vlrl.types import Group


@dataclass(eq=False)
class ReplayPass:
    """Computes the loss of the replayed completions and its gradient for one optimizer step (see algo.method.Pass)."""

    policy: Policy
    algorithm: Objectives
    rule: Any
    """The instance of the class that algo.stored.rule names."""
    part: Minibatch
    """The micro-batches of the replayed completions. Their `old` log-probabilities are those of the policy before the
    update."""
    whole: ReplayBatch
    """All replayed completions of this process in the optimizer step, with log-probabilities before the update."""
    ages: np.ndarray
    """[R] age of each completion in steps."""
    learned: float
    """Number of completions that are trained on, over all processes."""
    stale: float
    """Number of completions excluded by algo.stored.max_drift, over all processes."""
    answers: float
    """Number of all replayed completions, over all processes."""
    loss: float = 0.0
    """This process's share of the loss in the last epoch over the batch, not yet multiplied by algo.stored.coef."""
    clipped: float = 0.0
    """Number of this process's tokens that the rule clips, in the last epoch over the batch."""
    norm: float = 0.0
    norm_rl: float = 0.0
    """Gradient norm of the objective in the last epoch over the batch, over all processes. The attribute `norm` is the
    norm of the gradient of this loss (times algo.stored.coef)."""
    separate_gradient = True

    @property
    def active(self) -> bool:
        return self.learned > 0

    def begin(self) -> None:
        self.loss = self.clipped = 0.0

    def work(self, b: int) -> None:
        micro, whole = self.part.batches[b], self.whole
        settings: Any = self.algorithm.config.algo.stored
        logprobs = self.policy.logprobs(micro.batch, self.algorithm.temperature).logprobs
        own = replay_batch(self.part, micro.order, logprobs, micro.reference)
        x = replace(whole, logprobs=logprobs, sampler=micro.old if settings.logprobs == "own" else own.sampler,
                    reference=own.reference, answer=own.answer, mask=own.mask * whole.kept[own.answer])
        loss = self.rule.loss(x)
        self.policy.backward(loss * settings.coef)
        self.loss += float(loss.detach())
        if hasattr(self.rule, "clipped"):
            self.clipped += float((self.rule.clipped(x) * x.mask).sum())

    def end(self, norm: float, others: float) -> None:
        self.norm, self.norm_rl = norm, others


def make_passes(policy: Policy, groups: Sequence[Group], algorithm: Objectives, rule: Bound,
                step: int) -> list[ReplayPass | None]:
    """Packs the replayed completions of each optimizer step, and computes their log-probabilities before the update.
    Returns one ReplayPass per optimizer step, or None for a step in which no process has completions. Called on
    every process."""
    count = algorithm.config.rollout.minibatches
    if not any(comm.gather(len(groups))):
        return [None] * count
    return [_pass(policy, part, algorithm, rule, step) for part in split(groups, count)]


def _pass(policy: Policy, numbered: Sequence[NumberedRollout], algorithm: Objectives, rule: Bound,
          step: int) -> ReplayPass | None:
    settings: Any = algorithm.config.algo.stored
    part = make_minibatch(policy, numbered, algorithm.config)
    _read(policy, part, algorithm.temperature, "reference" in rule.requires)
    stored = replay_batch(part, range(len(part.rollouts)), *_joined(part))
    drift = stored.means(stored.logprobs - stored.sampler)
    stored = replace(stored, sampler=stored.logprobs) if settings.logprobs == "own" else stored
    usable = (drift.abs() <= settings.max_drift) & stored.kept
    gain = stored.above_reference if stored.reference is not None else stored.gain
    whole = apply_keep(replace(stored, gain=gain, kept=usable, mask=stored.mask * usable[stored.answer]),
                       rule.function)
    counts = torch.bincount(whole.group[whole.kept]).double()
    tokens, learned, pairs, stale, answers = comm.total(
        float(whole.mask.sum()), float(whole.kept.sum()), float((counts * (counts - 1) / 2).sum()),
        float((stored.kept & ~usable).sum()), float(stored.kept.sum()))
    whole = replace(whole, total_tokens=tokens, total_answers=learned, total_pairs=pairs)
    ages = np.array([max(step - r.policy_step, 0) for _, _, r in numbered])
    return (ReplayPass(policy, algorithm, rule.function, part, whole, ages, learned, stale, answers) if answers
            else None)


def _read(policy: Policy, part: Minibatch, temperature: float, reference: bool) -> None:
    def work(b: int) -> None:
        micro = part.batches[b]
        batch = micro.batch.to(policy.device)
        micro.old = policy.logprobs(batch, temperature).logprobs
        micro.reference = policy.reference_logprobs(batch, temperature) if reference else None

    with torch.no_grad(), policy.evaluating():
        each_batch(policy, part.batches, work, part.halve)


def _joined(part: Minibatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    known: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for micro in part.batches:
        assert micro.old is not None
        sizes = [len(part.rollouts[r].mask) for r in micro.order]
        references = micro.reference.split(sizes) if micro.reference is not None else [None] * len(sizes)
        known |= dict(zip(micro.order, zip(micro.old.split(sizes), references, strict=True), strict=True))
    rows = [known[r] for r in range(len(part.rollouts))]
    empty = torch.zeros(0)
    old = torch.cat([empty.to(rows[0][0].device) if rows else empty, *(a for a, _ in rows)])
    given = [b for _, b in rows if b is not None]
    return old, torch.cat(given) if given else None


def replay_batch(part: Minibatch, order: Sequence[int], logprobs: torch.Tensor,
                 reference: torch.Tensor | None) -> ReplayBatch:
    """Makes the ReplayBatch of the rows `order` of the minibatch `part`. `logprobs` and `reference` [N] are the
    log-probabilities under the current weights and under the reference; the stored log-probabilities become
    `sampler`."""
    rows, firsts, device = [part.rollouts[r] for r in order], part.firsts, logprobs.device

    def flat(arrays: Sequence[np.ndarray], kind: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *arrays]).astype(kind)).to(device)

    def each(of: Callable[[Any], Any], kind: Any = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.array([of(t) for t in firsts], kind)).to(device)

    mask = flat([t.mask for t in rows], np.float32)
    stored_logprobs = flat([t.row.logprobs for t in rows], np.float32)
    return ReplayBatch(
        logprobs=logprobs, sampler=torch.where(mask > 0, stored_logprobs, logprobs.detach()), reference=reference,
        mask=mask,
        answer=flat([np.full(len(t.mask), t.unit) for t in rows], np.int64),
        advantages=each(lambda t: t.rollout.advantage), rewards=each(lambda t: np.nan if t.rollout.reward is None
                                                                     else t.rollout.reward),
        correct=each(lambda t: bool(t.rollout.correct), np.bool_), group=each(lambda t: t.group_index, np.int64),
        weights=each(lambda t: t.group.sample.weight), gain=each(lambda t: 0.0),
        kept=each(lambda t: t.mask.any() and t.rollout.reward is not None, np.bool_))


def step_metrics(stored: Sequence[ReplayPass | None]) -> dict[str, float]:
    """Metrics of the replayed completions of a step, as means over the passes in `stored`, one per optimizer step.
    Called on every process."""
    known = [a for a in stored if a is not None]
    if not known:
        return {"stored/applied": 0.0}
    loss, clipped = comm.total(sum(a.loss for a in known), sum(a.clipped for a in known))
    tokens = sum(a.whole.total_tokens for a in known)
    answers, learned, stale = (sum(v) for v in zip(*((a.answers, a.learned, a.stale) for a in known), strict=True))
    norm, rl = (float(np.mean(v)) for v in zip(*((a.norm, a.norm_rl) for a in known), strict=True))
    kept = [a.whole.kept.cpu().numpy() for a in known]
    drifts = [a.whole.means(a.whole.logprobs - a.whole.sampler).double().cpu().numpy() for a in known]
    per_answer = [np.concatenate([v[k] for v, k in zip(values, kept, strict=True)])
                  for values in (drifts, [a.ages for a in known])]
    drift, ages = (np.concatenate(v) for v in zip(*comm.gather(per_answer), strict=True))
    out = {"stored/applied": float(learned > 0), "stored/loss": loss / len(known), "stored/grad_norm": norm,
           "stored/grad_share": norm / max(norm + rl, 1e-30), "stored/tokens": tokens, "stored/answers": learned,
           "stored/kept_frac": learned / max(answers, 1.0), "stored/stale_frac": stale / max(answers, 1.0),
           "stored/clip_frac": clipped / max(tokens, 1.0)}
    if len(drift):
        out |= {"stored/drift": float(drift.mean()), "stored/age_mean": float(ages.mean())}
        out |= {f"stored/ratio_q{q:02d}": float(np.quantile(np.exp(drift), q / 100)) for q in (10, 50, 90)}
    return out
