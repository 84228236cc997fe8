"""Stored rollouts beside RL (algo.stored): which are drawn in a step, and their own micro-batches in the update."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlrl.algo.algorithm import Algorithm, StoredParts
from vlrl.algo.stored import Stored, whole_step
from vlrl.config.algo import StoredSettings
from vlrl.config.schema import Config
from vlrl.data import readable
from vlrl.distributed import comm
from vlrl.errors import ConfigError, DataError
from vlrl.models import fsdp
from vlrl.models.oom import each_batch
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.models.token_text import Texts, tokenizer_file
from vlrl.rollout.generate import Answering, make_group
from vlrl.store.run_folder import utf8
from vlrl.store.stored_rollouts import Source, StoredGroup, StoredRollouts
from vlrl.store.stored_rows import Limits
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.training.advantages import chosen
from vlrl.training.apart import learn_apart
from vlrl.training.inert import OF_OUTCOME
from vlrl.training.minibatch import Minibatch, Numbered, make_minibatch, split
from vlrl.types import Completion, Group, Prompt, Rollout, Sample, Turn

_STREAM = 22
"""Names the random numbers of the draws among those of a run's seed."""


def check(config: Config, task: Task) -> None:
    """Raises ConfigError where algo.stored could learn nothing, or gradients cannot be told apart."""
    if config.algo.stored is None:
        return
    if fsdp.wanted(config):
        raise ConfigError(f"algo.stored measures its gradient beside that of the answers, and train.sharding="
                          f"{config.train.sharding} has them summed by shards: set train.sharding=none, or "
                          "algo.stored=null")
    if all(map(has_environment, task.members)):
        raise ConfigError(f"algo.stored learns from plain answers, and task {config.task_name!r} has episodes alone: "
                          "set algo.stored=null")


@dataclass(eq=False)
class StoredAnswers:
    """Draws the stored groups of a step; the same ones on a resumed run."""

    config: Config
    task: Task
    encode: Encoder
    samples: Sequence[Sample]
    answering: Answering
    algorithm: Algorithm
    policy: Policy
    unused: Counter[str] = field(default_factory=Counter)
    """Of the last draw, this process's groups that could not be used, by reason."""
    drawn: int = 0
    """Groups of the last draw, over all processes."""

    def __call__(self, step: int, flush: Callable[[], None]) -> list[Group]:
        """Returns this process's share of a step's stored groups, credited; `flush` waits for this run's own files.
        Called on every process.
        """
        settings, parts = self.config.algo.stored, self.algorithm.stored
        self.unused, self.drawn = Counter(), 0
        if settings is None or parts is None or not settings.coef:
            return []
        if settings.own:
            flush()
        stored_groups: list[StoredGroup] = comm.on_main(partial(self._taken, step, settings, parts))
        self.drawn = len(stored_groups)
        mine = stored_groups[comm.rank()::comm.world()]
        groups = comm.together(lambda: [self._group(stored, step) for stored in mine])
        credited = [self._credited(g, step, parts) for g in groups if g is not None]
        return [g for g in credited if g is not None]

    def _taken(self, step: int, settings: StoredSettings, parts: StoredParts) -> list[StoredGroup]:
        self.buffer.take(step)
        if not parts.every(step):
            return []
        rng = np.random.default_rng([self.config.seed, _STREAM, step])
        by_outcome = parts.advantage.name in OF_OUTCOME  # which groups of equal rewards have, too
        return self.buffer.draw(settings.groups, step, rng, parts.draw, settings.max_age, by_outcome)

    @cached_property
    def buffer(self) -> StoredRollouts:
        """On the main process."""
        settings, policy, run = self.config.algo.stored, self.policy, Path(self.config.run.dir)
        assert settings
        texts, end = Texts(policy), policy.eos
        limits = Limits(vocabulary=policy.base.config.get_text_config().vocab_size,
                        banned=frozenset(policy.banned.tolist()), most_tokens=self.config.rollout.max_new_tokens,
                        decode=lambda ids: texts.decode(ids[:-1] if ids[-1] in end else ids), most_gap=settings.max_gap)
        sources = [Source(Path(name)) for name in settings.runs]
        return StoredRollouts(run, [*sources, *([Source(run, own=True)] if settings.own else [])], limits,
                              settings.capacity, tokenizer_file(policy.processor.tokenizer) or "")

    @cached_property
    def _places(self) -> dict[str, int]:
        """Place of each training row by the id that rollout files have of it."""
        rows = ((i, readable(self.samples, i)) for i in range(len(self.samples)))
        return {utf8(sample.id): i for i, sample in rows if sample is not None}

    # --- stored rows -> groups ------------------------------------------------------------------------------------

    def _group(self, stored: StoredGroup, step: int) -> Group | None:
        """Returns a stored group under the prompt of this run's own row, scored by this run where another one wrote it;
        None where it cannot be used.
        """
        match = self._matching(stored)
        if match is None:
            return None
        sample, prompt = match
        answers = [_completion(row) for row in stored.rows]
        if stored.own:
            task = self.task.of(sample)
            rollouts = tuple(_rollout(stored, i, row, c) for i, (row, c) in enumerate(zip(stored.rows, answers,
                                                                                          strict=True)))
            group = Group(id=stored.name, task=task.name, split="train", sample=sample, prompt=prompt,
                          rollouts=rollouts, weights=dict(stored.rows[0]["weights"] or ()))
        else:
            group = make_group(self.task, sample, prompt, answers, group_id=stored.name, split="train", step=step,
                               policy_step=max(step - stored.age, 0), score=self.answering.score,
                               served=self.answering.services)
        return group

    def _matching(self, stored: StoredGroup) -> tuple[Sample, Prompt] | None:
        """Returns the row of a group and its prompt, which are what the group was drawn with: words and media."""
        first = stored.rows[0]
        place = self._places.get(first["sample_id"])
        sample = readable(self.samples, place) if place is not None else None
        if sample is None or has_environment(self.task.of(sample)):
            self.unused["unknown row"] += 1
            return None
        for template in self.task.of(sample).templates:
            candidate = replace(sample, prompt=template)
            try:
                prompt = self.encode(self.task, candidate)
            except DataError:
                continue  # as one that is drawn to be answered
            if utf8(prompt.text) == first["prompt"] and [m.sha256 for m in prompt.media] == first["hashes"]:
                return candidate, prompt
        self.unused["another prompt"] += 1
        return None

    def _credited(self, group: Group, step: int, parts: StoredParts) -> Group | None:
        """Returns the group with its advantages; None where its rewards are equal and give it none."""
        seed = zlib.crc32(f"{self.config.seed}/{group.id}".encode())
        credited = chosen(group, parts.advantage, parts.batch, step, seed)
        if group.zero_variance and not any(r.advantage for r in credited.rollouts):
            self.unused["settled"] += 1
            return None
        return replace(credited, rollouts=tuple(r for r in credited.rollouts if r.trained))

    def metrics(self) -> dict[str, float]:
        """Returns what is known of the buffer and of the last draw, over all processes; {} without algo.stored. Called
        on every process.
        """
        if self.config.algo.stored is None or not self.config.algo.stored.coef:
            return {}
        unused = sum((Counter(c) for c in comm.gather(dict(self.unused))), Counter[str]())
        buffer = (float(self.buffer.rollouts), float(self.buffer.refused.total())) if comm.is_main() else (0.0, 0.0)
        buffered, refused = comm.total(*buffer)
        return {"stored/held": buffered, "stored/refused": refused, "stored/groups": float(self.drawn),
                "stored/unused_frac": unused.total() / max(self.drawn, 1)}


def _completion(row: dict[str, Any]) -> Completion:
    tokens = np.asarray(row["token_ids"], np.int64)
    return Completion(tokens=tokens, logprobs=np.asarray(row["logprobs"], np.float32),
                      loss_mask=np.asarray(row["loss_mask"], bool), text=row["completion"],
                      finish_reason=row["finish_reason"], turns=(Turn(start=0, end=len(tokens)),))


def _rollout(stored: StoredGroup, index: int, row: dict[str, Any], completion: Completion) -> Rollout:
    return Rollout(group_id=stored.name, index=index, completion=completion, policy_step=row["policy_step"],
                   parts=dict(row["parts"] or ()), reward=row["reward"], correct=row["correct"])


# --- the update -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Again:
    """The stored answers of one optimizer step."""

    part: Minibatch
    """Their `old` is the policy before the update."""
    whole: Stored
    """Of this process, as the rule sees them before the first gradient."""
    ages: np.ndarray
    """[R] steps."""
    learned: float
    """Answers that are learned from, over all processes."""
    stale: float
    """Answers left out by algo.stored.max_drift, over all processes."""
    answers: float
    """All of them."""
    loss: float = 0.0
    """This process's share of the last pass, without the weight."""
    clipped: float = 0.0
    """This process's tokens of the last pass that the rule's bounds hold back."""
    norm: float = 0.0
    norm_rl: float = 0.0
    """Of the gradients of the last pass, over all processes; the first with its weight."""


def make_again(policy: Policy, groups: Sequence[Group], config: Config, algorithm: Algorithm,
               step: int) -> list[Again | None]:
    """Packs the stored answers of each optimizer step of a pass, and reads them once; None where nothing is learned
    from on any process. Called on every process.
    """
    count = config.rollout.minibatches
    if algorithm.stored is None or not any(comm.gather(len(groups))):
        return [None] * count
    return [_again(policy, part, config, algorithm, step) for part in split(groups, count)]


def _again(policy: Policy, numbered: Sequence[Numbered], config: Config, algorithm: Algorithm,
           step: int) -> Again | None:
    parts, settings = algorithm.stored, config.algo.stored
    assert parts and settings
    part = make_minibatch(policy, numbered, config)
    _read(policy, part, algorithm, "reference" in parts.rule.requires)
    stored = stored_of(part, range(len(part.rollouts)), _joined(part), settings.logprobs == "own")
    drift = stored.means(stored.logprobs - _stored_logprobs(part, stored))
    usable = (drift.abs() <= settings.max_drift) & stored.kept
    gain = stored.above_reference if stored.reference is not None else stored.gain
    whole = whole_step(replace(stored, gain=gain, kept=usable, mask=stored.mask * usable[stored.answer]),
                       parts.rule.function)
    pairs = _pairs(whole)
    tokens, learned, pairs, stale, answers = comm.total(
        float(whole.mask.sum()), float(whole.kept.sum()), pairs, float((stored.kept & ~usable).sum()),
        float(stored.kept.sum()))
    whole = replace(whole, total_tokens=tokens, total_answers=learned, total_pairs=pairs)
    ages = np.array([max(step - r.policy_step, 0) for _, _, r in numbered])
    return Again(part, whole, ages, learned, stale, answers) if answers else None


def _read(policy: Policy, part: Minibatch, algorithm: Algorithm, reference: bool) -> None:
    """Fills in log-probabilities of the policy before the update, and of the reference."""
    def work(b: int) -> None:
        micro = part.batches[b]
        batch = micro.batch.to(policy.device)
        micro.old = policy.logprobs(batch, algorithm.temperature).logprobs
        micro.reference = policy.reference_logprobs(batch, algorithm.temperature) if reference else None

    with torch.no_grad(), policy.evaluating():
        each_batch(policy, part.batches, work, part.halve)


def _joined(part: Minibatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns log-probabilities [N] of the policy before the update, those that ratios may be to, and those of the
    reference, of all tokens, answer after answer.
    """
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
    return old, old, torch.cat(given) if given else None


def _stored_logprobs(part: Minibatch, x: Stored) -> torch.Tensor:
    """Returns [N] the stored log-probabilities."""
    flat = np.concatenate([np.zeros(0, np.float32), *(t.row.logprobs for t in part.rollouts)])
    return torch.where(x.mask > 0, torch.from_numpy(flat).to(x.logprobs), x.logprobs.detach())


def stored_of(part: Minibatch, order: Sequence[int],
              values: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], own: bool) -> Stored:
    """Returns what a rule sees of the rows `order`: `values` are their log-probabilities [N] of now, of the policy
    before the update, and of the reference. `own`: ratios are to the policy before the update.
    """
    logprobs, old, reference = values
    rows, firsts, device = [part.rollouts[r] for r in order], part.firsts, logprobs.device

    def flat(arrays: Sequence[np.ndarray], kind: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *arrays]).astype(kind)).to(device)

    def each(of: Callable[[Any], Any], kind: Any = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.array([of(t) for t in firsts], kind)).to(device)

    mask = flat([t.mask for t in rows], np.float32)
    stored_logprobs = flat([t.row.logprobs for t in rows], np.float32)
    sampler = old if own else torch.where(mask > 0, stored_logprobs, logprobs.detach())
    return Stored(
        logprobs=logprobs, sampler=sampler, reference=reference, mask=mask,
        answer=flat([np.full(len(t.mask), t.unit) for t in rows], np.int64),
        advantages=each(lambda t: t.rollout.advantage), rewards=each(lambda t: np.nan if t.rollout.reward is None
                                                                     else t.rollout.reward),
        correct=each(lambda t: bool(t.rollout.correct), np.bool_), group=each(lambda t: t.place, np.int64),
        weights=each(lambda t: t.group.sample.weight), gain=each(lambda t: 0.0),
        kept=each(lambda t: t.mask.any() and t.rollout.reward is not None, np.bool_))


def _pairs(x: Stored) -> float:
    """Pairs of kept answers of this process's groups."""
    counts = torch.bincount(x.group[x.kept]).double()
    return float((counts * (counts - 1) / 2).sum())


def learn(policy: Policy, again: Again, algorithm: Algorithm, weights: Sequence[torch.nn.Parameter]) -> int:
    """Forward and backward of every micro-batch, apart from the gradients that are there, which it is added to. Returns
    how many micro-batches were halved for lack of memory.
    """
    parts, settings, whole = algorithm.stored, algorithm.config.algo.stored, again.whole
    assert parts and settings
    rule = parts.rule.function

    def work(b: int) -> None:
        micro = again.part.batches[b]
        logprobs = policy.logprobs(micro.batch, algorithm.temperature).logprobs
        assert micro.old is not None
        own = stored_of(again.part, micro.order, (logprobs, micro.old, micro.reference), settings.logprobs == "own")
        x = replace(whole, logprobs=logprobs, sampler=own.sampler, reference=own.reference, answer=own.answer,
                    mask=own.mask * whole.kept[own.answer])
        loss = rule.loss(x)
        policy.backward(loss * settings.coef)
        again.loss += float(loss.detach())
        if hasattr(rule, "clipped"):
            again.clipped += float((rule.clipped(x) * x.mask).sum())

    def begin() -> None:
        again.loss = again.clipped = 0.0

    cuts, again.norm, again.norm_rl = learn_apart(policy, again.part, weights, work, begin)
    return cuts


def step_metrics(stored: Sequence[Again | None], algorithm: Algorithm) -> dict[str, float]:
    """Returns the metrics of a step's stored answers, means over its optimizer steps; {} without algo.stored. Called on
    every process.
    """
    if algorithm.stored is None:
        return {}
    known = [a for a in stored if a is not None]
    if not known:
        return {"stored/applied": 0.0}
    loss, clipped = comm.total(sum(a.loss for a in known), sum(a.clipped for a in known))
    tokens = sum(a.whole.total_tokens for a in known)
    answers, learned, stale = (sum(v) for v in zip(*((a.answers, a.learned, a.stale) for a in known), strict=True))
    norm, rl = (float(np.mean(v)) for v in zip(*((a.norm, a.norm_rl) for a in known), strict=True))
    per_answer = [np.concatenate(v) for v in zip(*(_ratios(a) for a in known), strict=True)]
    drift, ages = (np.concatenate(v) for v in zip(*comm.gather(per_answer), strict=True))
    out = {"stored/applied": float(learned > 0), "stored/loss": loss / len(known), "stored/grad_norm": norm,
           "stored/grad_share": norm / max(norm + rl, 1e-30), "stored/tokens": tokens, "stored/answers": learned,
           "stored/kept_frac": learned / max(answers, 1.0), "stored/stale_frac": stale / max(answers, 1.0),
           "stored/clip_frac": clipped / max(tokens, 1.0)}
    if len(drift):
        out |= {"stored/drift": float(drift.mean()), "stored/age_mean": float(ages.mean())}
        out |= {f"stored/ratio_q{q:02d}": float(np.quantile(np.exp(drift), q / 100)) for q in (10, 50, 90)}
    return out


def _ratios(again: Again) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean_t(l - o) before the update, and the ages, of this process's learned answers."""
    x, retained = again.whole, again.whole.kept.cpu().numpy()
    return x.means(x.logprobs - x.sampler).double().cpu().numpy()[retained], again.ages[retained]
