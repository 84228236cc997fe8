"""The rollouts of one optimizer step as micro-batches, the passes without gradient, and the inputs of the objective.

Nothing unused is computed. If each batch of rollouts has one optimizer step, the old log-probabilities equal the
current log-probabilities, so no pass computes them. Without a reference policy there is no reference pass. A pass
before the optimizer step is needed only by functions that use the whole step."""

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
from vlrl.models.packing import Batch, Piece, training_rows
from vlrl.models.policy import Policy
from vlrl.types import Completion, Group, Rollout


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One row of an optimizer step, with T tokens: a rollout, or one turn of an episode whose history is truncated."""

    number: int
    """Index of the row's rollout among all rollouts of the update."""
    unit: int
    """Index of the row's rollout in the optimizer step."""
    group_index: int
    """Index of the row's group in the optimizer step."""
    group: Group
    rollout: Rollout
    row: Completion
    """The completion of the rollout, or one of the completion's windows (packing.training_rows)."""
    span: slice
    """Range of the rollout's tokens that this row trains on. They are the last tokens of the row."""
    mask: np.ndarray
    """[T] bool, True for tokens that are trained on."""
    texts: Sequence[str]
    """[T] decoded tokens; empty unless a function of the objective uses them."""

    @property
    def name(self) -> str:
        """The name of the row's group and sample, for messages."""
        return f"group {self.group.id} (sample {self.group.sample.id!r})"

    @property
    def advantage(self) -> float | np.ndarray:
        """The advantage of the row's tokens: a scalar, or [T]."""
        value = self.rollout.advantage
        return value if np.ndim(value) == 0 else self.from_rollout(np.asarray(value))

    def from_rollout(self, values: np.ndarray | None) -> np.ndarray | float:
        """Returns the part of `values` that belongs to this row, where `values` has one entry per token of the rollout.
        Tokens of the row's history get 0. Returns NaN if `values` is None."""
        if values is None:
            return math.nan
        return np.pad(values[self.span], (len(self.mask) - (self.span.stop - self.span.start), 0))

    def per_token(self, name: str) -> np.ndarray | float:
        """The part of `Rollout.per_token[name]` that belongs to this row; NaN if the rollout has no such array."""
        return self.from_rollout(self.rollout.per_token.get(name))

    def into_rollout(self, whole: np.ndarray | None, values: np.ndarray) -> np.ndarray:
        """Copies `values` [T, ...], which belong to the tokens of this row, into `whole`, an array over the tokens of
        the rollout, and returns that array. If `whole` is None, makes an array of zeros."""
        if self.row is self.rollout.completion:
            return values
        if whole is None:
            whole = np.zeros((len(self.rollout.completion.tokens), *values.shape[1:]), values.dtype)
        whole[self.span] = values[len(values) - (self.span.stop - self.span.start):]
        return whole


@dataclass(eq=False)
class MicroBatch:
    """Rows that pass through the model together, with N completion tokens."""

    pieces: Sequence[Piece]
    batch: Batch
    old: torch.Tensor | None = None
    """[N] log-probabilities under the old policy; None if the old policy is the current policy."""
    old_stats: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N, ...] statistics at the old weights, by name; empty if the old weights are the current weights."""
    reference: torch.Tensor | None = None
    """[N] log-probabilities under the reference policy; None without a reference policy."""

    @property
    def order(self) -> list[int]:
        """Indices of the micro-batch's rows, in the order of their tokens."""
        return [r for piece in self.pieces for r in piece.rollouts]


@dataclass(eq=False)
class Minibatch:
    """The R rollouts of one optimizer step on this rank, packed into micro-batches."""

    rollouts: Sequence[TrainingRow]
    """The training rows. All rows of a rollout are adjacent and in the same micro-batch."""
    batches: list[MicroBatch]
    pack: Callable[[Sequence[Piece]], Batch]
    total_tokens: float
    total_sequences: float
    known: Mapping[str, float] = field(default_factory=dict)
    """For each per-token array that the head reads, the number of trained tokens, over all ranks, that have a value."""
    prepared: Prepared = field(default_factory=dict)
    """Values that the objective prepared for the whole step: scalars, or arrays over all tokens in rollout order."""

    @property
    def firsts(self) -> list[TrainingRow]:
        """[R] the first row of each rollout."""
        return [*{t.unit: t for t in reversed(self.rollouts)}.values()][::-1]

    def halve(self, b: int) -> int:
        """Replaces micro-batch `b` and its token values by two halves. Returns the larger half's number of tokens."""
        whole, fresh, end = self.batches[b], [], 0
        for pieces in halves(whole.pieces):
            batch = self.pack(pieces)
            start, end = end, end + len(batch.rollout_id)
            old, reference = (None if v is None else v[start:end] for v in (whole.old, whole.reference))
            old_stats = {name: v[start:end] for name, v in whole.old_stats.items()}
            fresh.append(MicroBatch(pieces, batch, old, old_stats, reference))
        self.batches[b:b + 1] = fresh
        return max(micro.batch.tokens for micro in fresh)

    def prepared_of(self, micro: MicroBatch) -> Prepared:
        """The prepared values for one micro-batch: scalars unchanged, arrays reduced to the micro-batch's tokens."""
        if not self.prepared:
            return {}
        ends = np.cumsum([len(t.mask) for t in self.rollouts])
        places = torch.from_numpy(np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(ends[r] - len(self.rollouts[r].mask), ends[r]) for r in micro.order)]))
        return {function: {name: v[places.to(v.device)] if v.dim() else v for name, v in values.items()}
                for function, values in self.prepared.items()}


NumberedRollout = tuple[int, Group, Rollout]
"""(index among all rollouts of the update, group, rollout)"""


def split(groups: Sequence[Group], count: int) -> list[list[NumberedRollout]]:
    """Divides the rollouts of an update into `count` optimizer steps and returns one list per step. If a rank has fewer
    groups than steps, some of its lists are empty."""
    steps = optimizer_steps([g.id for g in groups], count)
    rollouts = [(step, g, r) for step, g in zip(steps, groups, strict=True) for r in g.rollouts]
    return [[(i, g, r) for i, (step, g, r) in enumerate(rollouts) if step == n] for n in range(count)]


def make_minibatch(policy: Policy, part: Sequence[NumberedRollout], config: Config, texts: bool = False,
                   together: bool = False) -> Minibatch:
    """Packs the rollouts `part` of one optimizer step into a Minibatch. Called on every rank. `texts`: whether rows
    need their decoded tokens. `together`: whether all rollouts of a group must be in one micro-batch."""
    drop, read = config.algo.mask_truncated, policy.processor.tokenizer.batch_decode
    places = {name: i for i, name in enumerate(dict.fromkeys(g.id for _, g, _ in part))}
    rollouts = [TrainingRow(i, unit, places[g.id], g, r, row, own,
                        row.loss_mask & (r.trained and not (drop and r.completion.truncated)),
                        read([[t] for t in row.tokens.tolist()]) if texts else ())
                for unit, (i, g, r) in enumerate(part) for own, row in training_rows(r.completion)]
    planned = policy.plan([t.rollout.train_prompt or t.group.prompt for t in rollouts],
                          [t.row.tokens for t in rollouts], config.train, policy.most_tokens,
                          [t.row.shown for t in rollouts], [t.group_index if together else t.unit for t in rollouts])
    pack = partial(policy.pack, settings=config.train)
    batches = [MicroBatch(pieces, pack(pieces)) for pieces in planned]
    names = policy.head.reads if policy.head else ()
    tokens, sequences, *known = comm.total(
        float(sum(t.mask.sum() for t in rollouts)), float(len({t.unit for t in rollouts if t.mask.any()})),
        *(float(sum((t.mask & ~np.isnan(t.per_token(name))).sum() for t in rollouts)) for name in names))
    return Minibatch(rollouts, batches, pack, tokens, sequences, dict(zip(names, known, strict=True)))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def no_grad_passes(policy: Policy, part: Minibatch, algorithm: Algorithm, several: bool,
                   more: Mapping[str, Statistic] | None = None) -> int:
    """Computes old and reference log-probabilities if the objective needs them, in one loop over the micro-batches.
    Media are encoded only once if both passes have the same vision tower. `several`: whether the update has several
    optimizer steps, so that the old weights differ from the current weights. `more`: further statistics to compute
    with the old weights. Returns how many micro-batches were halved for lack of memory."""
    old = several and not _take_old(part)
    reference, temperature = "reference" in algorithm.objective.requires, algorithm.temperature
    if not (old or reference):
        return 0
    sharing = policy.sharing_features if old and reference else contextlib.nullcontext
    old_statistics = {**algorithm.old_statistics, **(more or {})}

    def work(b: int) -> None:
        micro = part.batches[b]
        with sharing():
            batch = micro.batch.to(policy.device)
            stats = policy.logprobs(batch, temperature, more=old_statistics) if old else None
            micro.reference = policy.reference_logprobs(batch, temperature) if reference else None
        if stats:
            micro.old, micro.old_stats = stats.logprobs, stats.more

    with torch.no_grad(), policy.evaluating():
        return each_batch(policy, part.batches, work, part.halve)


def _take_old(part: Minibatch) -> bool:
    """Sets the old log-probabilities of the micro-batches to those that a method has computed before the update.
    Returns False, and sets nothing, if a rollout lacks them; all ranks return the same."""
    if any(t.rollout.old_logprobs is None for t in part.rollouts):
        return False
    for micro in part.batches:
        old_logprobs = [np.zeros(0, np.float32), *(part.rollouts[r].from_rollout(part.rollouts[r].rollout.old_logprobs)
                                                   for r in micro.order)]
        micro.old = torch.from_numpy(np.concatenate(old_logprobs))
    return True


def prepare(policy: Policy, part: Minibatch, config: Config, algorithm: Algorithm, step: int) -> int:
    """Runs the functions of the objective that need all rollouts of the optimizer step, at the current weights. Called
    on every rank. Does nothing if every function needs only its micro-batch, and runs no pass if no function needs the
    current weights. Returns how many micro-batches were halved for lack of memory."""
    if not algorithm.objective.prepares:
        return 0
    stats: list[TokenStats] = []
    cuts = 0
    if "step" in algorithm.objective.requires:
        def work(b: int) -> None:
            stats.append(policy.logprobs(part.batches[b].batch, algorithm.temperature, more=algorithm.statistics))

        with torch.no_grad(), policy.evaluating():
            cuts = each_batch(policy, part.batches, work, part.halve)
    ids = torch.cat([torch.zeros(0, dtype=torch.long), *(m.batch.rollout_id for m in part.batches)]).to(policy.device)
    order = torch.argsort(ids, stable=True)  # rollout after rollout
    stats = stats or [zero_stats(len(ids), policy.vocabulary, policy.device, algorithm.statistics)]

    def whole(values: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
        known = [v for v in values if v is not None]
        return torch.cat(known)[order] if known else None

    def each(per_batch: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        return {name: whole(values[name] for values in per_batch) for name in (per_batch[0] if per_batch else ())}

    logprobs, entropy = whole(s.logprobs for s in stats), whole(s.entropy for s in stats)
    assert logprobs is not None and entropy is not None
    x = _inputs(part, [r for r, t in enumerate(part.rollouts) if len(t.mask)], ids[order],
                TokenStats(logprobs, entropy, each([s.more for s in stats])), whole(m.old for m in part.batches),
                whole(m.reference for m in part.batches), config, algorithm, step)
    part.prepared = algorithm.objective.prepare(replace(x, old_stats=each([m.old_stats for m in part.batches])))
    for value in (v for values in part.prepared.values() for v in values.values()):
        if value.dim() and len(value) != len(ids):
            raise ValueError(f"prepared values must be a number or [{len(ids)}], one value per token, not "
                             f"{list(value.shape)}; for values per rollout use LossInputs.spread")
    return cuts


def loss_inputs(part: Minibatch, micro: MicroBatch, stats: TokenStats, config: Config, algorithm: Algorithm,
                step: int) -> LossInputs:
    """Returns the inputs of the objective for the micro-batch `micro` of `part`. stats: log-probabilities and
    statistics of the tokens of `micro`."""
    ids = micro.batch.rollout_id.to(stats.logprobs.device)
    x = _inputs(part, micro.order, ids, stats, micro.old, micro.reference, config, algorithm, step)
    return replace(x, prepared=part.prepared_of(micro), old_stats=micro.old_stats)


def _inputs(part: Minibatch, order: Sequence[int], ids: torch.Tensor, stats: TokenStats, old: torch.Tensor | None,
            reference: torch.Tensor | None, config: Config, algorithm: Algorithm, step: int) -> LossInputs:
    def tensor(arrays: Sequence[Any], kind: Any) -> torch.Tensor:
        flat = np.concatenate(arrays) if arrays else np.zeros(0, kind)  # an idle micro-batch has none
        with np.errstate(over="ignore"):  # a huge reward becomes infinite, and is caught before the optimizer step
            return torch.from_numpy(flat.astype(kind)).to(ids.device)

    def per_token(value: Callable[[TrainingRow], Any], kind: Any = np.float32) -> torch.Tensor:  # [N]
        return tensor([np.broadcast_to(value(t), len(t.mask)) for t in (part.rollouts[r] for r in order)], kind)

    firsts, units = part.firsts, np.array([t.unit for t in part.rollouts], np.int64)

    def per_rollout(value: Callable[[TrainingRow], Any], kind: Any = np.float32) -> torch.Tensor:  # [R]
        return tensor([[value(t) for t in firsts]], kind)

    old = stats.logprobs.detach() if old is None else old.to(ids.device)
    same = per_token(lambda t: t.rollout.train_prompt is None, np.bool_)
    sampled = per_token(lambda t: t.row.logprobs)
    tokens = "tokens" in algorithm.objective.requires
    return LossInputs(
        logprobs=stats.logprobs, old_logprobs=old, advantages=per_token(lambda t: t.advantage),
        mask=per_token(lambda t: t.mask), weights=per_token(lambda t: t.group.sample.weight),
        rollout_id=torch.from_numpy(units).to(ids.device)[ids],
        lengths=tensor([np.bincount(units, [t.mask.sum() for t in part.rollouts], len(firsts))], np.float32),
        total_tokens=part.total_tokens, total_sequences=part.total_sequences, max_length=config.rollout.max_new_tokens,
        sampler_logprobs=torch.where(same, sampled, old), reference_logprobs=reference,
        entropy=stats.entropy, stats=stats.more, step=step, seed=config.seed,
        tokens=per_token(lambda t: t.row.tokens, np.int64) if tokens else None,
        turns=per_token(_places, np.int64) if "turns" in algorithm.objective.requires else None,
        texts=[text for r in order for text in part.rollouts[r].texts], known=part.known,
        per_token={name: per_token(partial(TrainingRow.per_token, name=name)) for name in part.known},
        rewards=per_rollout(lambda t: np.nan if t.rollout.reward is None else t.rollout.reward),
        outcome=per_rollout(lambda t: bool(t.rollout.correct), np.bool_),
        group=per_rollout(lambda t: t.group_index, np.int64),
        difficulty=per_rollout(lambda t: _number(t.group.sample.difficulty)),
        variants={name: per_rollout(partial(_is_variant, name), np.bool_) for name in (
            what.removeprefix("variant:") for what in algorithm.objective.requires if what.startswith("variant:"))},
        identity=per_rollout(lambda t: _identity(t.rollout), np.int64))


def _is_variant(name: str, row: TrainingRow) -> bool:
    return row.rollout.variant == name and row.rollout.train_prompt is not None


def _places(row: TrainingRow) -> np.ndarray:
    """[T] index of the action of each token in its episode, -1 between actions; all 0 for a plain completion."""
    actions = row.rollout.completion.actions
    places = np.full(len(row.rollout.completion.tokens), -1 if actions else 0)
    for place, action in enumerate(actions):
        places[action.start:action.end] = place
    return np.pad(places[row.span], (len(row.mask) - (row.span.stop - row.span.start), 0), constant_values=-1)


def _identity(rollout: Rollout) -> int:
    """A 63-bit number that identifies the rollout on every rank, computed from its group id and index."""
    name = f"{rollout.group_id}/{rollout.index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1
