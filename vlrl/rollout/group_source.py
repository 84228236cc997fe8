"""Prompts -> scored groups of a step: draw, encode, answer, score, keep or refill, choose; then credit."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from vlrl.algo.method import placed
from vlrl.config.episodes import EpisodeSettings
from vlrl.curriculum import Draw, Filters, Foreseeing, Intake, Measuring, Outcome, Probing, Prompts, Sampler
from vlrl.curriculum.horizon import Horizon
from vlrl.curriculum.report import Tally
from vlrl.data import readable
from vlrl.distributed import comm
from vlrl.errors import ConfigError, DataError, TrainingError
from vlrl.models.processing import Encoder, PromptTooLong
from vlrl.monitoring.metrics import phase
from vlrl.rollout import fingerprint
from vlrl.rollout.episodes import EpisodeEngine, opened, reopened
from vlrl.rollout.generate import AcceptedDraw, Answering
from vlrl.rollout.partial import PartialGroup
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task import Task, generated, task_samples
from vlrl.task.services import FAILED
from vlrl.task.variants import has_variants, looks_alike, variants_of, with_media_of
from vlrl.types import Group, Rollout, Sample, Variant

Tell = Callable[[str, int, int], None]
"""(what, done, total)"""
Measure = Callable[[Sequence[Sample], np.ndarray, Tell], np.ndarray]
"""(all samples, places of some [n], tell) -> [n] a number of each, nan where it cannot be used."""


@dataclass
class Rejected:
    """Prompts left out, over all processes."""

    drawn: int = 0
    count: int = 0
    in_a_row: int = 0
    """Draws since a prompt was last accepted."""
    fresh: list[str] = field(default_factory=list)
    """Why, for each one since `take`."""

    def take(self) -> list[str]:
        """Returns the reasons since the last call."""
        out, self.fresh = self.fresh, []
        return out


@dataclass(eq=False)
class Draws:
    """Draws that are answered together: drawn, then encoded, then answered."""

    draws: Mapping[int, Draw]
    """Those of all processes by number, groups that go on included."""
    fresh: int
    """How many of them are new."""
    carried_over: Mapping[int, PartialGroup] = field(default_factory=dict)
    """Groups by number that go on."""
    accepted: list[AcceptedDraw] = field(default_factory=list)
    """The accepted draws of this process, encoded."""
    refused: list[str] = field(default_factory=list)
    """Why others of this process were rejected."""
    encoded: bool = False


class GroupSource:
    """Draws samples, has their groups answered and scored; the same on every process, each doing its share.

    `next_groups(P)` returns this process's share of P groups; the sampler, which is the main process's, has observed
    all of them. `measures`: what samplers can have measured of prompts by the policy, by name (curriculum.Measuring).
    `tell` shows how far something before a step is; `teaches` is Outcome.teaches of a group.
    """

    generates: ClassVar[bool] = True
    """Whether answers are drawn from the policy, with variants and services of training."""

    def __init__(self, answering: Answering, encode: Encoder, sampler: Sampler, samples: Sequence[Sample],
                 prefetch: Prefetcher | None = None, prompts: Prompts | None = None,
                 measures: Mapping[str, Measure] | None = None, tell: Tell = lambda what, done, total: None,
                 teaches: Callable[[Group], bool | None] = lambda group: None):
        self.answering, self.encode, self.sampler, self.samples = answering, encode, sampler, samples
        self.config, self.task, self.engine, self.clock = (
            answering.config, answering.task, answering.engine, answering.clock)
        self.prefetch = prefetch or Prefetcher(encode, self.task, 0)
        self.prompts = prompts or Prompts.of(samples, self.config.seed, self.config.data.difficulty)
        self.measures, self.tell, self.teaches = measures or {}, tell, teaches
        self.fingerprint = fingerprint.of(samples)
        self.filters, self.tally = Filters(self.config.curriculum), Tally()
        self.horizon = Horizon(self.config.episode if self.generates else EpisodeSettings())
        self._varies = self.generates and has_variants(self.task)
        self.drawn = 0
        """Groups drawn since the run began; numbers the groups and their random streams."""
        self.step = 0
        self.rejected = Rejected()
        self.outcomes: list[Outcome] = []
        """What became of all draws of the last call, over all processes."""
        self.dropped: list[Group] = []
        """This process's groups of the last call that were answered and are not trained on, and episodes that could not
        begin."""
        self.wasted = 0
        """How many of these groups were answered in vain."""
        self._opened: dict[Draw, Sample] = {}
        """Samples of this step and the next; some are drawn by code, and a variant needs its sample too."""
        self._may_lack = True
        self._of_variants: dict[str, list[float | None]] = {}
        """Rewards of the last call by variant, over all processes; "" = answers to samples as they are."""
        self.carried_over: dict[int, PartialGroup] = {}
        """Groups by number, over all processes, that go on in the next step; see rollout.step_tokens."""
        self._parts: list[int] = []
        """In how many steps each answer of the last call was written, over all processes."""

    def next_groups(self, count: int, step: int) -> list[Group]:
        """This process's share of `count` scored groups, refilled where a prompt was rejected or its group not kept.

        Raises TrainingError when too many prompts are rejected. Where not every group is kept, fewer than `count` may
        come back after curriculum.max_refills further rounds. Groups that the step before held over count too: they
        go on, and as many fewer prompts are drawn; those held over again come back in a later step.
        """
        self.step, self._of_variants, self._parts = step, {}, []
        self._measure()
        intake, groups = Intake(self.filters, count), {}
        probed, probes = self._round(self._numbered(comm.on_main(self._probes)))
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
        chosen_groups, lost = _begun([groups[number] for number in chosen if number in groups])
        self.wasted, self.dropped = len(wasted), [*wasted, *lost]
        for method in self.answering.methods:
            chosen_groups = method.chosen(chosen_groups)
        return [*chosen_groups]

    def sync(self, policy: Any, step: int, now: bool = True) -> None:
        """Hands the weights to the engine before a step; `now`: it is to be used by others too."""
        if self.generates or now:
            self.engine.sync(policy, step)

    def close(self) -> None:
        """Ends what goes on beside the loop; the engine and the prefetcher are closed by others."""

    def _measure(self) -> None:
        """Before the first draw: what the sampler must know of prompts, measured by all processes together."""
        missing = comm.on_main(self._missing) if self._may_lack else None
        self._may_lack = False
        if missing is not None:
            name, indices = missing
            values, sampler = self.measures[name](self.samples, indices, self.tell), cast(Any, self.sampler)
            comm.on_main(lambda: sampler.measured(indices, values))

    def _missing(self) -> tuple[str, np.ndarray] | None:
        if isinstance(self.sampler, Measuring) and len(indices := self.sampler.missing()):
            return self.sampler.measures, indices
        return None

    def _next(self, count: int) -> list[Draw]:
        """Returns the sampler's next draws. Raises TrainingError when they are not `count` samples of the split."""
        draws, size = list(self.sampler.next(count, self.step)), len(self.samples)
        usable = [d for d in draws if isinstance(d, Draw) and 0 <= d.index < size]
        if len(usable) != count or len(draws) != count:
            raise TrainingError(f"step {self.step}: curriculum.name={self.config.curriculum.name!r} gave {len(draws)} "
                                f"draws, {len(usable)} of them of the {size} samples, where {count} were asked for")
        return draws

    def _probes(self) -> list[Draw]:
        return self.sampler.probes(self.step) if isinstance(self.sampler, Probing) else []

    def _round(self, drawn: Draws, tokens: int | None = None) -> tuple[dict[int, Group], dict[int, Outcome]]:
        """This process's groups of some draws by number, and the outcomes of all draws, which the sampler observes.

        Groups of which an answer has not ended after `tokens` more have no outcome yet.
        """
        if not drawn.draws:
            return {}, {}
        self._encode(drawn)
        answered = comm.together(lambda: self._answer(drawn, tokens))
        groups = {number: group for number, group in answered.items() if isinstance(group, Group)}
        if self.config.rollout.step_tokens is not None:  # all processes know all groups that go on
            unfinished = comm.gather([h for h in answered.values() if isinstance(h, PartialGroup)])
            everyone = {**self.carried_over, **{h.number: h for part in unfinished for h in part}}
            self.carried_over = dict(sorted(everyone.items()))
        outcomes = self._share_outcomes(drawn, groups)
        comm.on_main(lambda: self._observe([*outcomes.values()]))
        return groups, outcomes

    def _draw(self, wanted: int, carried_over: Mapping[int, PartialGroup]) -> Draws:
        """`wanted` groups: those held over, and new draws for the others."""
        fresh = max(0, wanted - len(carried_over))
        return self._numbered(comm.on_main(partial(self._next, fresh)) if fresh else [], carried_over)

    def _numbered(self, draws: Sequence[Draw], carried_over: Mapping[int, PartialGroup] | None = None) -> Draws:
        """New draws beside groups that go on."""
        draws = self.horizon.within(draws, self.step)
        first, self.drawn, carried_over = self.drawn, self.drawn + len(draws), carried_over or {}
        everyone = {**{h.number: h.draw for h in carried_over.values()}, **dict(enumerate(draws, first))}
        return Draws(everyone, len(draws), carried_over)

    def _encode(self, drawn: Draws) -> None:
        """Encodes this process's share of the draws, and begins with that of the next step."""
        mine = list(drawn.draws.items())[comm.rank()::comm.world()]

        def encode() -> None:
            self.prefetch.begin(self._wanted([draw for _, draw in mine], self.step))
            for number, draw in mine:
                try:
                    with phase("encode"):
                        sample, prompt = self.prefetch.take(draw, partial(self._sample, draw))
                        variants = [(v, *self.prefetch.take(key, show))
                                    for v, key, show in self._variants(draw, sample, self.step)]
                        variants = [one for one in variants if one[0].trained or not looks_alike(one[2], prompt)]
                    drawn.accepted.append(AcceptedDraw(number, draw, sample, prompt, tuple(variants),
                                                       drawn.carried_over.get(number)))
                except DataError as error:
                    if not isinstance(error, PromptTooLong) and not self.config.data.quarantine:
                        raise
                    drawn.refused.append(str(error))

        comm.together(encode)
        drawn.encoded = True
        self._look_ahead()

    def _answer(self, drawn: Draws, tokens: int | None) -> dict[int, Group | PartialGroup]:
        """Groups of this process by number."""
        accepted, answering = drawn.accepted, self.answering
        groups = answering.groups(accepted, self.step, tokens) if accepted or answering.collective else []
        return {a.number: group for a, group in zip(accepted, groups, strict=True)}

    def _observe(self, outcomes: Sequence[Outcome]) -> None:
        self.prompts.history.note(outcomes, self.step)
        self.sampler.observe(outcomes, self.step)

    def _sample(self, draw: Draw) -> Sample:
        if draw not in self._opened:
            sample = generated(self.task, draw.index, dict(draw.knobs)) if draw.knobs else self.samples[draw.index]
            task = self.task.of(sample)
            more = {name: value for name, value in draw.fields if name in task.stage_fields}
            more |= {} if draw.weight == 1 else {"weight": sample.weight * draw.weight}
            sample = replace(sample, prompt=task.template(sample, draw.visit), row={**sample.row, **more})
            self._opened[draw] = opened(self.engine, self.task, sample, draw.index, draw.visit)
        return self._opened[draw]

    def _variants(self, draw: Draw, sample: Sample,
                  step: int) -> list[tuple[Variant, Hashable, Callable[[], Sample]]]:
        """Returns what variants of a draw show, each with its key."""
        if not self._varies:
            return []
        variants = variants_of(self.task.of(sample), sample, self.answering.group_size(draw), step)
        return [(v, (draw, step, v.name), partial(self._as_variant, sample, v)) for v in variants]

    def _as_variant(self, sample: Sample, variant: Variant) -> Sample:
        return reopened(self.engine, with_media_of(sample, variant))

    def _look_ahead(self) -> None:
        """Starts on this process's share of the next step, as far as the sampler can tell it."""
        draws: list[Draw] = []
        if self.prefetch.workers and self.step + 1 < self.config.steps:
            draws = comm.on_main(self._foreseen)[comm.rank()::comm.world()]
        wanted = self._wanted(draws, self.step + 1)
        self.prefetch.keep(wanted)
        self.prefetch.begin(wanted)
        self._opened = {draw: self._opened[draw] for draw in draws if draw in self._opened}

    def _foreseen(self) -> list[Draw]:
        count = self.filters.oversampled(self.config.rollout.prompts_per_step)
        foreseen = self.sampler.upcoming(count, self.step + 1) if isinstance(self.sampler, Foreseeing) else []
        return self.horizon.within(foreseen, self.step + 1)

    def _wanted(self, draws: Sequence[Draw], step: int) -> dict[Hashable, Callable[[], Sample]]:
        """Returns what is to be encoded for draws of a step, by key: the samples, and what their variants show."""
        wanted: dict[Hashable, Callable[[], Sample]] = {}
        for draw in draws:
            wanted[draw] = partial(self._sample, draw)
            if self._varies and self.prefetch.workers:
                with contextlib.suppress(Exception):  # `_encode` meets it again, where it belongs
                    wanted |= {key: show for _, key, show in self._variants(draw, self._sample(draw), step)}
        return wanted

    def _share_outcomes(self, drawn: Draws, groups: Mapping[int, Group]) -> dict[int, Outcome]:
        """Returns the outcome of every draw of every process by number, in draw order."""
        share = {n: Outcome(drawn.draws[n], tuple(g.rewards), tuple(r.correct for r in g.rollouts), _surprise(g),
                            any(r.completion.episode_id for r in g.rollouts), self.teaches(g))
                 for n, g in groups.items()}
        by_variant = [(r.variant, r.reward) for g in groups.values() for r in (*g.rollouts, *g.aside)]
        parts = [1 if r.completion.episode_id else len(r.completion.turns) for g in groups.values() for r in g.rollouts]
        gathered = comm.gather((parts, share, drawn.refused, by_variant if self._varies else []))
        self._parts += [n for counts, *_ in gathered for n in counts]
        everyone = {k: v for _, part, *_ in gathered for k, v in part.items()}
        for name, reward in (pair for *_, pairs in gathered for pair in pairs):
            self._of_variants.setdefault(name, []).append(reward)
        self._count([reason for *_, reasons, _ in gathered for reason in reasons], drawn.fresh,
                    bool(everyone or self.carried_over))
        return {number: everyone.get(number, Outcome(draw, ())) for number, draw in drawn.draws.items()
                if number not in self.carried_over}

    def _count(self, refused: Sequence[str], drawn: int, accepted: bool) -> None:
        """Notes rejected prompts; TrainingError when they are too many, or when no sample can be used at all."""
        rejections, limit = self.rejected, self.config.limits.rejected
        rejections.drawn, rejections.count = rejections.drawn + drawn, rejections.count + len(refused)
        rejections.in_a_row = 0 if accepted else rejections.in_a_row + drawn
        rejections.fresh += refused
        if refused and (rejections.count > max(8, limit * rejections.drawn)
                        or rejections.in_a_row >= len(self.samples)):
            raise TrainingError(f"{rejections.count} of {rejections.drawn} drawn prompts were rejected "
                                f"(limits.rejected={limit}"
                                f"{', none accepted' if rejections.in_a_row >= len(self.samples) else ''}). "
                                f"First of this step: {refused[0]}")

    def metrics(self) -> dict[str, float]:
        """Returns what the sampler says, what was generated or drawn in vain, and how often a process of environments
        was started again; over all processes."""
        restarts: dict[str, float] = {}
        if isinstance(self.engine, EpisodeEngine):
            restarts["environment/restarts"] = comm.total(self.engine.environments.restarts)[0]
        return {**restarts, **self.horizon.metrics(), **comm.on_main(lambda: self.sampler.metrics()),
                **self.tally.metrics(), "groups/wasted": comm.total(self.wasted)[0],
                "prompts/rejected": float(self.rejected.count), **self._variant_metrics(), **self._partial_metrics(),
                **{name: value for method in self.answering.methods for name, value in method.metrics().items()},
                **(self.answering.likelihoods.metrics("train") if self.answering.likelihoods else {}),
                **(self.answering.services.metrics("train", self.step) if self.answering.services else {})}

    def _partial_metrics(self) -> dict[str, float]:
        """Groups that go on in the next step, and the steps that an answer of the last one was written in."""
        if self.config.rollout.step_tokens is None:
            return {}
        values = {"partial/held": float(len(self.carried_over))}
        return values | ({"partial/segments_mean": float(np.mean(self._parts))} if self._parts else {})

    def _variant_metrics(self) -> dict[str, float]:
        """Returns the mean reward of each variant's answers, and their share of all answers that were drawn."""
        out: dict[str, float] = {}
        count = sum(map(len, self._of_variants.values()))
        for name in sorted(self._of_variants.keys() - {""}):
            rewards = [r for r in self._of_variants[name] if r is not None]
            out |= {f"variants/{name}/reward": float(np.mean(rewards)) if rewards else float("nan"),
                    f"variants/{name}/share": len(self._of_variants[name]) / count}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs; of the main process, which alone has the sampler."""
        sampler = self.sampler.state_dict() if comm.is_main() else {}
        return {"drawn": self.drawn, "sampler": sampler, "filters": self.filters.state_dict(),
                "horizon": self.horizon.state_dict(),
                "data": self.fingerprint.state_dict(), "history": self.prompts.history.state_dict(),
                "tally": self.tally.state_dict(), "rejected": self.rejected.count, "offered": self.rejected.drawn,
                "held": [group.state_dict() for group in self.carried_over.values()],
                **{key: own for key, method in placed(self.answering.methods, "source").items()
                   if (own := method.state_dict())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises RunError where the samples were others then."""
        named = f"data.train={self.config.data.train!r}" if self.config.data.train else f"task '{self.task.name}'"
        self.fingerprint.check(state.get("data") or {"rows": len(state["history"]["visits"])}, named)
        self.drawn = int(state["drawn"])
        if comm.is_main():
            self.sampler.load_state_dict(state["sampler"])
        self.filters.load_state_dict(state["filters"])
        self.horizon.load_state_dict(state.get("horizon") or {})
        self.prompts.history.load_state_dict(state["history"])
        self.tally.load_state_dict(state["tally"])
        self.rejected = Rejected(drawn=int(state["offered"]), count=int(state["rejected"]))
        self.carried_over = {group.number: group for group in map(PartialGroup.of, state.get("held", ()))}
        for key, method in placed(self.answering.methods, "source").items():
            if key in state:
                method.load_state_dict(state[key])


def _begun(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Returns the groups to train on, and apart from them, in groups of the same ids, the episodes that never began:
    they have no tokens."""
    begun = [replace(g, rollouts=tuple(r for r in g.rollouts if r.completion.begun)) if _never(g) else g
             for g in groups]
    lost = [replace(g, rollouts=tuple(_never(g)), aside=()) for g in groups if _never(g)]
    return [g for g in begun if g.rollouts], lost


def _never(group: Group) -> list[Rollout]:
    return [r for r in group.rollouts if not r.completion.begun]


def _surprise(group: Group) -> float:
    """Outcome.surprise of a group."""
    norms = [math.sqrt(float(np.nansum(((1 - np.exp(c.logprobs)) ** 2)[c.loss_mask])))
             for c in (r.completion for r in group.rollouts)]
    return float(np.mean(norms)) if norms else 0.0


def check_score_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> float:
    """Returns the share of the rollouts (over all processes) that failed to score; TrainingError above `limit`.

    `what` and where they are `stored` enter the message.
    """
    failed, rollouts, first = _errors(groups, lambda r: r.error and r.completion.error is None and not _lost(r))
    if failed > limit * max(rollouts, 1):
        where = f" They are in {stored}." if stored else ""
        raise TrainingError(f"{what}: {failed} of {rollouts} rollouts failed to score, more than "
                            f"limits.score_errors={limit} allows. First error: {first}.{where}")
    return failed / max(rollouts, 1)


def check_environment_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> None:
    """Raises TrainingError when more than `limit` of the episodes were ended by an error of their environment."""
    failed, rollouts, first = _errors(groups, lambda r: r.completion.error is not None)
    if failed > limit * max(rollouts, 1):
        where = f" They are in {stored}." if stored else ""
        raise TrainingError(f"{what}: {failed} of {rollouts} episodes ended with an error of their environment, more "
                            f"than limits.environment_errors={limit} allows. First error: {first}.{where}")


def check_service_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> float:
    """Returns the share of the rollouts (over all processes) for which a service did not answer; TrainingError above
    `limit`.
    """
    failed, rollouts, first = _errors(groups, _lost)
    if failed > limit * max(rollouts, 1):
        where = f" They are in {stored}." if stored else ""
        raise TrainingError(f"{what}: a service did not answer for {failed} of {rollouts} rollouts, more than "
                            f"limits.service_errors={limit} allows. First error: {first}.{where} See whether it runs "
                            "(services.*); the same command goes on from the last checkpoint.")
    return failed / max(rollouts, 1)


def _lost(rollout: Rollout) -> bool:
    return bool(rollout.error and rollout.error.startswith(FAILED))


def _errors(groups: Sequence[Group], among: Callable[[Rollout], Any]) -> tuple[int, int, str]:
    """Returns how many rollouts of all processes have an error, of how many, and the first one."""
    errors = [f"sample {g.sample.id!r}: {r.error}, at the answer {ascii(r.completion.text)[:80]}"
              for g in groups for r in g.rollouts if among(r)]
    failed, rollouts = comm.total(len(errors), sum(len(g.rollouts) for g in groups))
    first = next((e for part in comm.gather(errors[:1]) for e in part), "") if failed else ""
    return int(failed), int(rollouts), first


def first_samples(task: Task, split: str, count: int) -> list[Sample]:
    """Returns the first `count` samples of a split, with the templates of their task in turn. ConfigError when it is
    empty.
    """
    samples = task_samples(task, split)
    if len(samples) == 0:
        raise ConfigError(f"task '{task.name}' has no samples in split '{split}'")
    leave_out = task.data is not None and task.data.quarantine
    candidates = (readable(samples, i) if leave_out else samples[i] for i in range(len(samples)))
    first = list(itertools.islice((sample for sample in candidates if sample is not None), count))
    out, last_turn = [], dict[str, int]()
    for sample in first:  # each task goes through its templates
        turn = last_turn[sample.task] = last_turn.get(sample.task, -1) + 1
        templates = task.of(sample).templates
        out.append(replace(sample, prompt=templates[turn % len(templates)]))
    return out
