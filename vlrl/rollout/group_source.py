"""From prompts to the scored groups of a step: draw, encode, generate, score, filter, refill and select."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from vlrl.algo.method import methods_by_state_key
from vlrl.config.episodes import EpisodeSettings
from vlrl.curriculum import (
    Draw,
    Filters,
    ForeseeingSampler,
    Intake,
    MeasuringSampler,
    Outcome,
    ProbingSampler,
    Prompts,
    Sampler,
)
from vlrl.curriculum.filters import Tally
from vlrl.curriculum.horizon import Horizon
from vlrl.distributed import comm
from vlrl.engine.base import EpisodePlayer
from vlrl.errors import TrainingError
from vlrl.models.processing import Encoder
from vlrl.progress import Progress, no_progress
from vlrl.rollout import fingerprint
from vlrl.rollout.draws import DrawBatch, DrawEncoder, RejectionCount, variant_metrics
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.partial import PartialGroup
from vlrl.rollout.prefetch import Prefetcher
from vlrl.types import Group, Sample

Measure = Callable[[Sequence[Sample], np.ndarray, Progress], np.ndarray]
"""Function that measures samples for a sampler of prompts: (all samples, indices [n] of the samples to measure,
progress) -> values [n]. The value of an unusable sample is NaN."""


class GroupSource:
    """Draws samples and returns their scored groups. All processes call its methods together, and each process
    generates its share.

    `next_groups(P)` returns this process's share of P groups. Before it returns, the sampler of prompts, on the main
    process, has observed all P groups. measures: the measurements that samplers can request (MeasuringSampler), by
    name. progress: reports work before a step. teaches: returns whether any completion of a group has a nonzero
    advantage, or None if the advantages depend on other groups."""

    generates: ClassVar[bool] = True
    """Whether the policy samples the completions. Only then are variants and training-time services used."""
    overlaps_update: ClassVar[bool] = False
    """Whether completions are sampled during the update, so that the engine needs its own copy of the weights."""

    def __init__(self, generator: RolloutGenerator, encode: Encoder, sampler: Sampler, samples: Sequence[Sample],
                 prefetch: Prefetcher | None = None, prompts: Prompts | None = None,
                 measures: Mapping[str, Measure] | None = None, progress: Progress = no_progress,
                 teaches: Callable[[Group], bool | None] = lambda group: None):
        self.generator, self.encode, self.sampler, self.samples = generator, encode, sampler, samples
        self.config, self.task, self.engine, self.clock = (
            generator.config, generator.task, generator.engine, generator.clock)
        self.prefetch = prefetch or Prefetcher(encode, self.task, 0)
        self.prompts = prompts or Prompts.of(samples, self.config.seed, self.config.data.difficulty)
        self.measures, self.progress, self.teaches = measures or {}, progress, teaches
        self.fingerprint = fingerprint.fingerprint_of(samples)
        self.filters, self.tally = Filters(self.config.curriculum), Tally()
        self.horizon = Horizon(self.config.episode if self.generates else EpisodeSettings())
        self.encoder = DrawEncoder(generator, samples, self.prefetch, self.generates)
        self.drawn = 0  # number of groups drawn since the run began, which numbers the groups and their random streams
        self.step = 0
        self.rejected = RejectionCount()
        self.outcomes: list[Outcome] = []  # outcomes of all draws of the last call, over all processes
        self.dropped: list[Group] = []
        """Groups of this process in the last call that were generated but are not trained on. Also has the episodes
        whose environment could not be reset."""
        self.wasted = 0  # number of groups of this process that were generated but are not trained on
        self._may_lack = True
        self._of_variants: dict[str, list[float | None]] = {}
        """Rewards in the last call by name of the variant, over all processes; "" = unmodified samples."""
        self.carried_over: dict[int, PartialGroup] = {}
        """Unfinished groups of all processes by number. They continue in the next step (rollout.step_tokens)."""
        self._segments: list[int] = []
        """For each completion of the last call, over all processes, the number of steps in which it was generated."""

    def next_groups(self, count: int, step: int) -> list[Group]:
        """Returns this process's share of `count` scored groups. Rejected prompts and filtered groups are replaced.

        Raises TrainingError if too many prompts are rejected. Fewer than `count` groups are returned if not enough pass
        the filters after curriculum.max_refills further rounds. Groups carried over from the previous step are
        continued, and reduce the number of new draws. Groups carried over again are returned in a later step."""
        self.step, self._of_variants, self._segments = step, {}, []
        self._measure()
        intake, groups = Intake(self.filters, count), {}
        probed, probes = self._round(self._numbered(comm.on_main(
            lambda: self.sampler.probes(step) if isinstance(self.sampler, ProbingSampler) else [])))
        carried_over, self.carried_over = self.carried_over, {}
        while wanted := intake.wanted:
            mine, outcomes = self._round(self._draw(wanted, carried_over), self.config.rollout.step_tokens)
            intake.take(outcomes, len(self.carried_over))
            groups, carried_over = groups | mine, {}
        chosen = intake.chosen()
        wasted = [*probed.values(), *(g for number, g in groups.items() if number not in {*chosen})]
        self.outcomes = [*intake.outcomes.values()]
        self.filters.observe(self.outcomes)
        self.horizon.observe(self.outcomes)
        self.tally.note(intake, chosen, [*probes.values()])
        chosen_groups, lost = _by_reset([groups[number] for number in chosen if number in groups])
        self.wasted, self.dropped = len(wasted), [*wasted, *lost]
        for method in self.generator.methods:
            chosen_groups = method.chosen(chosen_groups)
        return [*chosen_groups]

    def sync(self, policy: Any, step: int, now: bool = True) -> None:
        """Copies the policy's weights to the engine, if the engine samples for training or (`now`) for an evaluation.
        step: number of completed steps of these weights."""
        if self.generates or now:
            self.engine.sync(policy, step)

    def close(self) -> None:
        """Stops background work. The caller closes the engine and the prefetcher."""

    def _measure(self) -> None:
        if not self._may_lack:
            return
        self._may_lack, sampler = False, cast(Any, self.sampler)
        indices = comm.on_main(lambda: sampler.missing() if isinstance(sampler, MeasuringSampler) else ())
        if len(indices):
            values = self.measures[comm.on_main(lambda: sampler.measures)](self.samples, indices, self.progress)
            comm.on_main(lambda: sampler.measured(indices, values))

    def _next(self, count: int) -> list[Draw]:
        draws, size = list(self.sampler.next(count, self.step)), len(self.samples)
        usable = [d for d in draws if isinstance(d, Draw) and 0 <= d.index < size]
        if len(usable) != count or len(draws) != count:
            raise TrainingError(f"step {self.step}: the sampler curriculum.name={self.config.curriculum.name!r} "
                                f"returned {len(draws)} draws, of which {len(usable)} are valid draws of the {size} "
                                f"samples, but {count} were requested")
        return draws

    def _round(self, drawn: DrawBatch, tokens: int | None = None) -> tuple[dict[int, Group], dict[int, Outcome]]:
        """Generates and scores the batch `drawn`. Returns ({group number: group} of this process, {group number:
        outcome} of all processes). Both lack the groups that have an unfinished completion. tokens: maximum number
        of new tokens per completion."""
        if not drawn.draws:
            return {}, {}
        self._encode(drawn)
        answered = comm.together(lambda: self._answer(drawn, tokens))
        groups = {number: group for number, group in answered.items() if isinstance(group, Group)}
        if self.config.rollout.step_tokens is not None:  # all processes know all continued groups
            unfinished = comm.gather([h for h in answered.values() if isinstance(h, PartialGroup)])
            everyone = {**self.carried_over, **{h.number: h for part in unfinished for h in part}}
            self.carried_over = dict(sorted(everyone.items()))
        outcomes = self._share_outcomes(drawn, groups)
        comm.on_main(lambda: self._observe([*outcomes.values()]))
        return groups, outcomes

    def _draw(self, wanted: int, carried_over: Mapping[int, PartialGroup]) -> DrawBatch:
        fresh = max(0, wanted - len(carried_over))
        return self._numbered(comm.on_main(partial(self._next, fresh)) if fresh else [], carried_over)

    def _numbered(self, draws: Sequence[Draw], carried_over: Mapping[int, PartialGroup] | None = None) -> DrawBatch:
        draws = self.horizon.within(draws, self.step)
        first, self.drawn, carried_over = self.drawn, self.drawn + len(draws), carried_over or {}
        everyone = {**{h.number: h.draw for h in carried_over.values()}, **dict(enumerate(draws, first))}
        return DrawBatch(everyone, len(draws), carried_over)

    def _encode(self, drawn: DrawBatch) -> None:
        self.encoder.encode(drawn, self.step)
        draws: list[Draw] = []
        if self.prefetch.workers and self.step + 1 < self.config.steps:
            draws = comm.on_main(self._foreseen)[comm.rank()::comm.world()]
        self.encoder.ahead(draws, self.step + 1)

    def _answer(self, drawn: DrawBatch, tokens: int | None) -> dict[int, Group | PartialGroup]:
        accepted, generator = drawn.accepted, self.generator
        groups = generator.groups(accepted, self.step, tokens) if accepted or generator.collective else []
        return {a.number: group for a, group in zip(accepted, groups, strict=True)}

    def _observe(self, outcomes: Sequence[Outcome]) -> None:
        self.prompts.history.note(outcomes, self.step)
        self.sampler.observe(outcomes, self.step)

    def _foreseen(self) -> list[Draw]:
        count = self.filters.oversampled(self.config.rollout.prompts_per_step)
        foreseen = self.sampler.upcoming(count, self.step + 1) if isinstance(self.sampler, ForeseeingSampler) else []
        return self.horizon.within(foreseen, self.step + 1)

    def _share_outcomes(self, drawn: DrawBatch, groups: Mapping[int, Group]) -> dict[int, Outcome]:
        share = {n: Outcome(drawn.draws[n], tuple(g.rewards), tuple(r.correct for r in g.rollouts), _surprise(g),
                            any(r.completion.episode_id for r in g.rollouts), self.teaches(g))
                 for n, g in groups.items()}
        by_variant = [(r.variant, r.reward) for g in groups.values() for r in (*g.rollouts, *g.aside)]
        parts = [1 if r.completion.episode_id else len(r.completion.turns) for g in groups.values() for r in g.rollouts]
        gathered = comm.gather((parts, share, drawn.refused, by_variant if self.encoder.varies else []))
        self._segments += [n for counts, *_ in gathered for n in counts]
        everyone = {k: v for _, part, *_ in gathered for k, v in part.items()}
        for name, reward in (pair for *_, pairs in gathered for pair in pairs):
            self._of_variants.setdefault(name, []).append(reward)
        self.rejected.note([reason for *_, reasons, _ in gathered for reason in reasons], drawn.fresh,
                           bool(everyone or self.carried_over), self.config.limits.rejected, len(self.samples))
        return {number: everyone.get(number, Outcome(draw, ())) for number, draw in drawn.draws.items()
                if number not in self.carried_over}

    def metrics(self) -> dict[str, float]:
        """Metrics, over all processes, of the sampler of prompts, the methods in use, the services, rejected prompts,
        groups that are not trained on, and restarted environments."""
        restarts: dict[str, float] = {}
        if isinstance(self.engine, EpisodePlayer):
            restarts["environment/restarts"] = comm.total(self.engine.restarts)[0]
        return {**restarts, **self.horizon.metrics(), **comm.on_main(lambda: self.sampler.metrics()),
                **self.tally.metrics(), "groups/wasted": comm.total(self.wasted)[0],
                "prompts/rejected": float(self.rejected.count),
                **variant_metrics(self._of_variants), **self._partial_metrics(),
                **{name: value for method in self.generator.methods for name, value in method.metrics().items()},
                **(self.generator.likelihoods.metrics("train") if self.generator.likelihoods else {}),
                **(self.generator.services.metrics("train", self.step) if self.generator.services else {})}

    def _partial_metrics(self) -> dict[str, float]:
        if self.config.rollout.step_tokens is None:
            return {}
        mean = {"partial/segments_mean": float(np.mean(self._segments))} if self._segments else {}
        return {"partial/held": float(len(self.carried_over)), **mean}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. Only complete on the main process, which has the sampler."""
        sampler = self.sampler.state_dict() if comm.is_main() else {}
        return {"drawn": self.drawn, "sampler": sampler, "filters": self.filters.state_dict(),
                "horizon": self.horizon.state_dict(),
                "data": self.fingerprint.state_dict(), "history": self.prompts.history.state_dict(),
                "tally": self.tally.state_dict(), "rejected": self.rejected.count, "offered": self.rejected.drawn,
                "held": [group.state_dict() for group in self.carried_over.values()],
                **{key: own for key, method in methods_by_state_key(self.generator.methods, "source").items()
                   if (own := method.state_dict())}}

    def at_rest(self) -> tuple[dict[str, Any], Callable[[float], dict[str, Any] | None] | None]:
        """Returns (state between two steps, function), for a checkpoint.

        The state lacks the completions that are being generated ahead. function(seconds) waits for these completions
        and returns the state including them. It returns None if they take longer, or if other processes generate ahead.
        Instead of the function, None is returned if nothing is generated ahead."""
        return self.state_dict(), None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned. Raises RunError if the samples have changed."""
        named = f"data.train={self.config.data.train!r}" if self.config.data.train else f"task '{self.task.name}'"
        self.fingerprint.check(state.get("data") or {"rows": len(state["history"]["visits"])}, named)
        self.drawn = int(state["drawn"])
        if comm.is_main():
            self.sampler.load_state_dict(state["sampler"])
        self.filters.load_state_dict(state["filters"])
        self.horizon.load_state_dict(state.get("horizon") or {})
        self.prompts.history.load_state_dict(state["history"])
        self.tally.load_state_dict(state["tally"])
        self.rejected = RejectionCount(drawn=int(state["offered"]), count=int(state["rejected"]))
        self.carried_over = {group.number: group for group in map(PartialGroup.of, state.get("held", ()))}
        for key, method in methods_by_state_key(self.generator.methods, "source").items():
            if key in state:
                method.load_state_dict(state[key])


def _by_reset(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Separates episodes by whether their environment could be reset; the others have no tokens. Returns (groups with
    the episodes to train on, groups with the episodes that could not begin). Group ids are unchanged; empty groups
    are left out."""
    begun = [replace(g, rollouts=tuple(r for r in g.rollouts if r.completion.begun)) for g in groups]
    lost = [replace(g, rollouts=tuple(r for r in g.rollouts if not r.completion.begun), aside=()) for g in groups]
    return [g for g in begun if g.rollouts], [g for g in lost if g.rollouts]


def _surprise(group: Group) -> float:
    norms = [math.sqrt(float(np.nansum(((1 - np.exp(c.logprobs)) ** 2)[c.loss_mask])))
             for c in (r.completion for r in group.rollouts)]
    return float(np.mean(norms)) if norms else 0.0
