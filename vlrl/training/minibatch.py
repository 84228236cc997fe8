"""The rollouts of one optimizer step as micro-batches, the passes without gradient over them, and what the objective
sees of them.

What is not needed is not computed: with one optimizer step per batch of rollouts the old log-probabilities are the
current ones, so there is no old-logprob pass; without a reference there is no reference pass; and only functions that
look at a whole optimizer step cost a pass before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import LossInputs
from vlrl.algo.objective import Prepared
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.models.cost import optimizer_steps
from vlrl.models.logprobs import Statistic, TokenStats, zero_stats
from vlrl.models.oom import each_batch, halves
from vlrl.models.packing import Batch, Piece
from vlrl.models.policy import Policy
from vlrl.types import Group, Rollout


@dataclass(frozen=True, eq=False)
class Minibatch:
    """The rollouts of one optimizer step on this process, packed. R rollouts."""

    rollouts: Sequence[Rollout]
    numbers: Sequence[int]
    """[R] place of each among all rollouts of the update."""
    groups: Sequence[int]
    """[R] number of each rollout's group."""
    names: Sequence[str]
    """[R] of each rollout's group and sample, for messages."""
    members: list[list[Piece]]
    """[batch] the pieces of each micro-batch."""
    pack: Callable[[Sequence[Piece]], Batch]
    batches: list[Batch]
    masks: Sequence[np.ndarray]
    """[R][T] bool, trained tokens."""
    weights: Sequence[float]
    """[R] of the samples."""
    difficulty: Sequence[float]
    """[R] of the samples; NaN where a row does not say."""
    texts: Sequence[Sequence[str]]
    """[R][T] of each token; empty where no function reads them."""
    total_tokens: float
    total_sequences: float
    old: list[torch.Tensor] = field(default_factory=list)
    """[batch][N] old log-probabilities; empty when they are the current ones."""
    old_stats: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    """[batch] statistics at the old weights; empty when those are the current ones."""
    reference: list[torch.Tensor] = field(default_factory=list)
    """[batch][N]; empty without one."""
    prepared: list[Prepared] = field(default_factory=list)
    """[batch] what the objective made of the whole step; empty when no function does."""
    made: list[Prepared] = field(default_factory=list)
    """The same of all micro-batches together, as one item."""

    def halve(self, b: int) -> int:
        """Cuts micro-batch `b` in two, with what is known of its tokens; returns the tokens of the larger half."""
        self.members[b:b + 1] = parts = halves(self.members[b])
        fresh = [self.pack(part) for part in parts]
        counts = [len(batch.rollout_id) for batch in fresh]
        self.batches[b:b + 1] = fresh
        for known in (self.old, self.reference):
            known[b:b + 1] = [part for values in known[b:b + 1] for part in values.split(counts)]
        self.old_stats[b:b + 1] = [{name: values.split(counts)[i] for name, values in found.items()}
                                   for found in self.old_stats[b:b + 1] for i in range(2)]
        if self.made:
            self.prepared[:] = _cut(self.made[0], self)
        return max(batch.tokens for batch in fresh)


Numbered = tuple[int, Group, Rollout]
"""A rollout with its group and its place among all rollouts of the update."""


def split(groups: Sequence[Group], count: int) -> list[list[Numbered]]:
    """The rollouts of each optimizer step; it may have none on a process with few groups."""
    steps = optimizer_steps([g.id for g in groups], count)
    rollouts = [(step, g, r) for step, g in zip(steps, groups, strict=True) for r in g.rollouts]
    return [[(i, g, r) for i, (step, g, r) in enumerate(rollouts) if step == n] for n in range(count)]


def make_minibatch(policy: Policy, part: Sequence[Numbered], config: Config, texts: bool = False) -> Minibatch:
    """Packs the rollouts of one optimizer step. Called on every process."""
    rollouts = [r for _, _, r in part]
    drop = config.algo.mask_truncated
    masks = [r.completion.loss_mask & (r.trained and not (drop and r.completion.truncated)) for r in rollouts]
    planned = policy.plan([r.train_prompt or g.prompt for _, g, r in part], [r.completion.tokens for r in rollouts],
                          config.train, policy.most_tokens)
    pack = partial(policy.pack, settings=config.train)
    tokens, sequences = comm.total(float(sum(m.sum() for m in masks)), float(sum(m.any() for m in masks)))
    places = {name: i for i, name in enumerate(dict.fromkeys(g.id for _, g, _ in part))}
    read = policy.processor.tokenizer.batch_decode
    return Minibatch(
        rollouts=rollouts, numbers=[i for i, _, _ in part], groups=[places[g.id] for _, g, _ in part],
        names=[f"group {g.id} (sample {g.sample.id!r})" for _, g, _ in part], members=planned, pack=pack,
        batches=[*map(pack, planned)], masks=masks,
        weights=[g.sample.weight for _, g, _ in part],
        difficulty=[_number(g.sample.difficulty) for _, g, _ in part],
        texts=[read([[t] for t in r.completion.tokens.tolist()]) for r in rollouts] if texts else (),
        total_tokens=tokens, total_sequences=sequences)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def no_grad_passes(policy: Policy, part: Minibatch, algorithm: Algorithm, several: bool,
                   more: Mapping[str, Statistic] | None = None) -> int:
    """Fills in old and reference log-probabilities where the objective needs them: one loop over the batches, which
    go to the device once and, where the vision tower is the same in both passes, through it once.

    `several`: the batch of rollouts has several optimizer steps, so the old weights are not the current ones. `more`:
    statistics at the old weights besides those of the objective. Returns how many micro-batches were halved.
    """
    old, reference, temperature = several, "reference" in algorithm.objective.requires, algorithm.temperature
    if not (old or reference):
        return 0
    sharing = policy.sharing_features if old and reference else contextlib.nullcontext
    old_statistics = {**algorithm.old_statistics, **(more or {})}

    def work(b: int) -> None:
        with sharing():
            batch = part.batches[b].to(policy.device)
            stats = policy.logprobs(batch, temperature, more=old_statistics) if old else None
            read = [policy.reference_logprobs(batch, temperature)] if reference else []
        if stats:
            part.old.append(stats.logprobs)
            part.old_stats.append(stats.more)
        part.reference.extend(read)

    with torch.no_grad(), policy.evaluating():
        return each_batch(policy, part.batches, work, part.halve)


def prepare(policy: Policy, part: Minibatch, config: Config, algorithm: Algorithm, step: int) -> int:
    """What functions make of the whole optimizer step at the current weights, cut into its micro-batches.

    Called on every process; costs nothing where no function looks at more than its micro-batch, and no pass where none
    of them looks at the current weights. Returns how many micro-batches were halved.
    """
    if not algorithm.objective.prepares:
        return 0
    part.made.clear()
    stats: list[TokenStats] = []
    cuts = 0
    if "step" in algorithm.objective.requires:
        def work(b: int) -> None:
            stats.append(policy.logprobs(part.batches[b], algorithm.temperature, more=algorithm.statistics))

        with torch.no_grad(), policy.evaluating():
            cuts = each_batch(policy, part.batches, work, part.halve)
    ids, order = _order(part, policy.device)
    stats = stats or [zero_stats(len(ids), policy.vocabulary, policy.device, algorithm.statistics)]

    def whole(values: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values))[order]

    def each(found: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: whole(values[name] for values in found) for name in (found[0] if found else ())}

    joined = TokenStats(whole(s.logprobs for s in stats), whole(s.entropy for s in stats),
                        each([s.more for s in stats]))
    flat = {name: whole(v) for name, v in (("old", part.old), ("reference", part.reference)) if v}
    x = _inputs(part, [r for r, m in enumerate(part.masks) if len(m)], ids[order], joined, flat, policy.device, config,
                algorithm, step)
    part.made[:] = [algorithm.objective.prepare(_told_apart(replace(x, old_stats=each(part.old_stats))))]
    part.prepared[:] = _cut(part.made[0], part)
    return cuts


def _order(part: Minibatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] rollouts of the tokens of all micro-batches, and the places of these, rollout after rollout."""
    ids = torch.cat([torch.zeros(0, dtype=torch.long, device=device), *(b.rollout_id.to(device) for b in part.batches)])
    return ids, torch.argsort(ids, stable=True)


def loss_inputs(part: Minibatch, b: int, stats: TokenStats, device: torch.device, config: Config,
                algorithm: Algorithm, step: int) -> LossInputs:
    """What the objective sees of one micro-batch."""
    ids = part.batches[b].rollout_id
    flat = {name: values[b] for name, values in (("old", part.old), ("reference", part.reference)) if values}
    x = _inputs(part, order_of(part, b), ids.to(device), stats, flat, device, config, algorithm, step)
    return replace(x, prepared=part.prepared[b] if part.prepared else {},
                   old_stats=part.old_stats[b] if part.old_stats else {})


def order_of(part: Minibatch, b: int) -> list[int]:
    """The rollouts of a micro-batch, in the order of their tokens."""
    return torch.unique_consecutive(part.batches[b].rollout_id).tolist()


def _inputs(part: Minibatch, order: Sequence[int], ids: torch.Tensor, stats: TokenStats, flat: dict[str, torch.Tensor],
            device: torch.device, config: Config, algorithm: Algorithm, step: int) -> LossInputs:
    def joined(arrays: Sequence[Any], kind: Any = np.float32) -> torch.Tensor:
        whole = np.concatenate(arrays) if arrays else np.zeros(0, kind)  # an idle micro-batch has none
        with np.errstate(over="ignore"):  # a huge reward becomes infinite, and is caught before the optimizer step
            return torch.from_numpy(whole.astype(kind)).to(device)

    wanted = algorithm.objective.requires
    rollouts = [part.rollouts[r] for r in order]
    lengths = [len(r.completion.tokens) for r in rollouts]
    old = flat.get("old", stats.logprobs.detach())
    same = joined([np.full(n, r.train_prompt is None) for r, n in zip(rollouts, lengths, strict=True)], np.bool_)
    sampled = joined([r.completion.logprobs for r in rollouts])
    return LossInputs(
        logprobs=stats.logprobs, old_logprobs=old,
        advantages=joined([np.broadcast_to(r.advantage, n) for r, n in zip(rollouts, lengths, strict=True)]),
        mask=joined([part.masks[r] for r in order]),
        weights=joined([np.full(n, part.weights[r]) for r, n in zip(order, lengths, strict=True)]),
        rollout_id=ids, lengths=joined([[m.sum() for m in part.masks]]),
        total_tokens=part.total_tokens, total_sequences=part.total_sequences, max_length=config.rollout.max_new_tokens,
        sampler_logprobs=torch.where(same, sampled, old), reference_logprobs=flat.get("reference"),
        entropy=stats.entropy, stats=stats.more, step=step, seed=config.seed,
        tokens=joined([r.completion.tokens for r in rollouts], np.int64) if "tokens" in wanted else None,
        texts=[text for r in order for text in part.texts[r]] if part.texts else (),
        rewards=joined([[np.nan if r.reward is None else r.reward for r in part.rollouts]]),
        outcome=joined([[bool(r.correct) for r in part.rollouts]], np.bool_),
        group=joined([part.groups], np.int64), difficulty=joined([part.difficulty]),
        identity=joined([[_identity(r) for r in part.rollouts]], np.int64))


def _identity(rollout: Rollout) -> int:
    """A number of 63 bits that is the same wherever the rollout is trained."""
    name = f"{rollout.group_id}/{rollout.index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


def _told_apart(x: LossInputs) -> LossInputs:
    """With one masked token more where there are as many tokens as rollouts, so that what a function prepares says by
    its length whether it is of tokens or of rollouts."""
    if not len(x.mask) or len(x.mask) != len(x.lengths):
        return x

    def longer(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else torch.cat([values, values[-1:]])

    per_token = ("logprobs", "old_logprobs", "advantages", "weights", "rollout_id", "sampler_logprobs",
                 "reference_logprobs", "entropy", "tokens")
    more: dict[str, Any] = {name: longer(getattr(x, name)) for name in per_token}
    return replace(x, **more, mask=torch.cat([x.mask, x.mask.new_zeros(1)]),
                   stats={k: longer(v) for k, v in x.stats.items()},
                   old_stats={k: longer(v) for k, v in x.old_stats.items()}, texts=[*x.texts, *x.texts[-1:]])


def _cut(made: Prepared, part: Minibatch) -> list[Prepared]:
    """Of each micro-batch: values of tokens are its own, those of rollouts and single numbers go to all."""
    ids, order = _order(part, torch.device("cpu"))
    rollouts, tokens = len(part.rollouts), len(ids) + (0 < len(ids) == len(part.rollouts))  # see _told_apart
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    places = back.split([len(b.rollout_id) for b in part.batches])

    def own(value: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        if value.dim() and len(value) == tokens != rollouts:
            return value[mine.to(value.device)]
        if value.dim() and len(value) != rollouts:
            raise ValueError(f"prepared values must be [{tokens}] of tokens, [{rollouts}] of rollouts or a number, "
                             f"not {list(value.shape)}")
        return value

    return [{place: {name: own(value, mine) for name, value in values.items()} for place, values in made.items()}
            for mine in places]
