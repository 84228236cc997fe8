"""Prompts -> scored groups: draw, encode, generate, score, keep or refill; then credit."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vlrl import dist
from vlrl.ahead import Ahead
from vlrl.algo.advantage import Advantage, group_advantages
from vlrl.curriculum import Draw, Foreseeing, Outcome, Sampler
from vlrl.encode import Encoder, PromptTooLong
from vlrl.engine.base import Engine
from vlrl.errors import ConfigError, DataError, TrainingError
from vlrl.metrics import Clock, phase
from vlrl.prefetch import Prefetcher
from vlrl.rewards.text import parse_answer
from vlrl.scoring import score_alone, score_group
from vlrl.services import Services, looked_up, without_absent
from vlrl.settings import Config, RolloutSettings
from vlrl.task import Task, task_samples, task_target
from vlrl.types import Answer, Completion, Group, Prompt, Request, Rollout, Sample, Sampling, Variant
from vlrl.variants import has_variants, seen_as, trained_answers, variants_of

Reference = Callable[[Sequence[tuple[Prompt, Sequence[Completion]]]], list[list[np.ndarray]]]
"""What reads answers under the reference policy; see reference.Reference."""


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
        """The reasons since the last call."""
        out, self.fresh = self.fresh, []
        return out


@dataclass(frozen=True, eq=False)
class Asked:
    """An accepted draw: what is to be answered."""

    number: int
    """Of the group; names its random streams."""
    sample: Sample
    prompt: Prompt
    variants: tuple[tuple[Variant, Prompt], ...] = ()


class GroupSource:
    """Draws samples, generates and scores their groups; the same on every process, each doing its share.

    `next_groups(P)` returns this process's share of P groups; the sampler has observed all of them.
    """

    generates: ClassVar[bool] = True
    """Whether answers are drawn from the policy, with variants and services of training."""

    def __init__(self, config: Config, task: Task, encode: Encoder, engine: Engine, sampler: Sampler,
                 samples: Sequence[Sample], clock: Clock, prefetch: Prefetcher | None = None,
                 reference: Reference | None = None):
        self.prefetch = prefetch or Prefetcher(encode, task, 0)
        self.config, self.task, self.encode, self.engine = config, task, encode, engine
        self.sampler, self.samples, self.clock, self.reference = sampler, samples, clock, reference
        self._varies = self.generates and has_variants(task)
        self.drawn = 0
        """Groups drawn since the run began; numbers the groups and their random streams."""
        self.step = 0
        self.rejected = Rejected()
        self.dropped: list[Group] = []
        """This process's groups of the last call that were generated and not kept."""
        self._refused: list[str] = []
        self._made: dict[Draw, Sample] = {}
        """Samples of this step and the next; some are drawn by code, and a variant needs its sample too."""
        self._of_variants: dict[str, list[float | None]] = {}
        """Rewards of the last call by variant, over all processes; "" = answers to samples as they are."""

    def next_groups(self, count: int, step: int) -> list[Group]:
        """This process's share of `count` scored groups, refilled where a prompt was rejected or its group not kept.

        Raises TrainingError when too many prompts are rejected. With curriculum.keep=mixed fewer than `count` groups
        may come back after curriculum.max_refills rounds.
        """
        kept: list[Group] = []
        missing, refills, self.dropped, self._of_variants = count, -1, [], {}
        while missing > 0 and refills < self.config.curriculum.max_refills:
            draws, numbers = self.sampler.next(missing), range(self.drawn, self.drawn + missing)
            self.drawn += missing
            mine = list(zip(draws, numbers, strict=True))[dist.rank()::dist.world()]
            groups = dist.together(lambda mine=mine: self._collect(mine, step))
            outcomes = self._share_outcomes(draws, mine, groups)
            self.sampler.observe(outcomes)
            for group in groups.values():
                (kept if self._keep(group.rewards) else self.dropped).append(group)
            missing -= sum(self._keep(o.rewards) for o in outcomes)
            refills += any(o.rewards for o in outcomes)  # a round in which every prompt was rejected does not count
        return kept

    def _keep(self, rewards: Sequence[float | None]) -> bool:
        """Whether a group enters the update; equality is exact, on raw rewards."""
        if not rewards:
            return False
        return self.config.curriculum.keep == "all" or len({r for r in rewards if r is not None}) > 1

    def _collect(self, mine: Sequence[tuple[Draw, int]], step: int) -> dict[int, Group]:
        """Groups of this process by number; a rejected prompt has none."""
        self.step = step
        self.prefetch.begin(self._wanted([draw for draw, _ in mine], step))
        asked = [found for draw, number in mine if (found := self._encoded(draw, number)) is not None]
        self._look_ahead()
        groups = self._answers(asked) if asked or self.reference else []
        return {a.number: group for a, group in zip(asked, groups, strict=True)}

    def _answers(self, asked: Sequence[Asked]) -> list[Group]:
        """Generates and scores one group per prompt.

        With rollout.score_ahead, groups that are whole are scored in a thread while others are still generated, unless
        the reference policy is asked first. Variants are generated apart from the rest: what runs side by side decides
        the last bits of the logits, and answers to the samples as they are do not depend on any variant.
        """
        rollout = self.config.rollout
        sampling, soon = sampling_of(rollout, rollout.temperature), rollout.score_ahead and self.reference is None
        requests = [Request(prompt=a.prompt, n=rollout.group_size - trained_answers([v for v, _ in a.variants]),
                            sampling=sampling, key=(0, a.number)) for a in asked]
        others = [(i, v, Request(prompt=prompt, n=v.n, sampling=sampling, key=_stream(a, v)))
                  for i, a in enumerate(asked) for v, prompt in a.variants]
        drawn: list[dict[str, Sequence[Completion]]] = [{} for _ in asked]
        reference: list[list[np.ndarray]] = []

        def score(i: int, made: Sequence[Completion]) -> Group:
            return self._group(asked[i], made, drawn[i], reference[i] if self.reference else None)

        def done(j: int, made: Sequence[Completion]) -> None:
            i, variant, _ = others[j]
            drawn[i][variant.name] = made
            if soon and len(drawn[i]) == len(asked[i].variants):
                ahead.begin(i, completions[i])

        with Ahead(score, self.clock, "score") as ahead:
            completions = self.engine.generate(requests, ahead.begin if soon and not others else None)
            varied = self.engine.generate([request for *_, request in others], done) if others else []
            for (i, variant, _), made in zip(others, varied, strict=True):
                drawn[i][variant.name] = made
            if self.reference:
                reference += self.reference([(a.prompt, [*made, *_joining(a.variants, extra)]) for a, made, extra in
                                             zip(asked, completions, drawn, strict=True)])
            return ahead.results(completions)

    def _group(self, asked: Asked, completions: Sequence[Completion], drawn: Mapping[str, Sequence[Completion]],
               reference: Sequence[np.ndarray] | None) -> Group:
        variants = [(v, drawn[v.name]) for v, _ in asked.variants]
        return make_group(self.task, asked.sample, asked.prompt, completions, group_id=f"{asked.number:08d}",
                          split="train", step=self.step, variants=variants, reference=reference)

    def _sample(self, draw: Draw) -> Sample:
        if draw not in self._made:
            sample = self.samples[draw.index]
            self._made[draw] = replace(sample, prompt=self.task.template(sample, draw.visit))
        return self._made[draw]

    def _look_ahead(self) -> None:
        """Starts on this process's share of the next step, as far as the sampler can tell it."""
        draws: list[Draw] = []
        if self.prefetch.workers and self.step + 1 < self.config.steps and isinstance(self.sampler, Foreseeing):
            draws = self.sampler.upcoming(self.config.rollout.prompts_per_step)[dist.rank()::dist.world()]
        wanted = self._wanted(draws, self.step + 1)
        self.prefetch.keep(wanted)
        self.prefetch.begin(wanted)
        self._made = {draw: self._made[draw] for draw in draws if draw in self._made}

    def _wanted(self, draws: Sequence[Draw], step: int) -> dict[Hashable, Callable[[], Sample]]:
        """What is to be encoded for draws of a step, by key: the samples, and what their variants show."""
        wanted: dict[Hashable, Callable[[], Sample]] = {}
        for draw in draws:
            wanted[draw] = partial(self._sample, draw)
            if self._varies and self.prefetch.workers:
                with contextlib.suppress(Exception):  # `_encoded` meets it again, where it belongs
                    sample = self._sample(draw)
                    for v in variants_of(self.task, sample, self.config.rollout.group_size, step):
                        wanted[draw, step, v.name] = partial(seen_as, sample, v)
        return wanted

    def _encoded(self, draw: Draw, number: int) -> Asked | None:
        """The prompts of a draw; None when it is rejected."""
        try:
            with phase("encode"):
                sample, prompt = self.prefetch.take(draw, partial(self._sample, draw))
                variants = variants_of(self.task, sample, self.config.rollout.group_size,
                                       self.step) if self._varies else []
                shown = [(v, self.prefetch.take((draw, self.step, v.name), partial(seen_as, sample, v))[1])
                         for v in variants]
            return Asked(number, sample, prompt, tuple(shown))
        except DataError as error:
            if not isinstance(error, PromptTooLong) and not self.config.data.quarantine:
                raise
            self._refused.append(str(error))
            return None

    def _share_outcomes(self, draws: Sequence[Draw], mine: Sequence[tuple[Draw, int]],
                        groups: dict[int, Group]) -> list[Outcome]:
        """The outcome of every draw of every process, in draw order."""
        first = self.drawn - len(draws)
        share = {number - first: tuple(groups[number].rewards) if number in groups else () for _, number in mine}
        refused, self._refused = self._refused, []
        by_variant = [(r.variant, r.reward) for g in groups.values() for r in (*g.rollouts, *g.aside)]
        gathered = dist.gather((share, refused, by_variant if self._varies else []))
        everyone = {k: v for part, *_ in gathered for k, v in part.items()}
        for name, reward in (pair for *_, pairs in gathered for pair in pairs):
            self._of_variants.setdefault(name, []).append(reward)
        self._count([reason for _, reasons, _ in gathered for reason in reasons], len(draws), any(everyone.values()))
        return [Outcome(draw, everyone[i]) for i, draw in enumerate(draws)]

    def _count(self, refused: Sequence[str], drawn: int, accepted: bool) -> None:
        """Notes rejected prompts; TrainingError when they are too many, or when no sample can be used at all."""
        seen, limit = self.rejected, self.config.limits.rejected
        seen.drawn, seen.count = seen.drawn + drawn, seen.count + len(refused)
        seen.in_a_row = 0 if accepted else seen.in_a_row + drawn
        seen.fresh += refused
        if refused and (seen.count > max(8, limit * seen.drawn) or seen.in_a_row >= len(self.samples)):
            raise TrainingError(f"{seen.count} of {seen.drawn} drawn prompts were rejected (limits.rejected={limit}"
                                f"{', none accepted' if seen.in_a_row >= len(self.samples) else ''}). "
                                f"First of this step: {refused[0]}")

    def metrics(self) -> dict[str, float]:
        """What the sampler says, and what was generated or drawn in vain; over all processes."""
        return {**self.sampler.metrics(), "groups/wasted": dist.total(len(self.dropped))[0],
                "prompts/rejected": float(self.rejected.count), **self._variant_metrics()}

    def _variant_metrics(self) -> dict[str, float]:
        """Mean reward of each variant's answers, and their share of all answers that were drawn."""
        out: dict[str, float] = {}
        count = sum(map(len, self._of_variants.values()))
        for name in sorted(self._of_variants.keys() - {""}):
            rewards = [r for r in self._of_variants[name] if r is not None]
            out |= {f"variants/{name}/reward": float(np.mean(rewards)) if rewards else float("nan"),
                    f"variants/{name}/share": len(self._of_variants[name]) / count}
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "sampler": self.sampler.state_dict(),
                "rejected": self.rejected.count, "offered": self.rejected.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])
        self.sampler.load_state_dict(state["sampler"])
        self.rejected = Rejected(drawn=int(state["offered"]), count=int(state["rejected"]))


def sampling_of(rollout: RolloutSettings, temperature: float) -> Sampling:
    """How answers are drawn with the settings of `rollout.*`."""
    return Sampling(max_new_tokens=rollout.max_new_tokens, temperature=temperature, stop=rollout.stop,
                    thinking_budget=rollout.thinking_budget, thinking_end=rollout.thinking_end)


def make_group(task: Task, sample: Sample, prompt: Prompt, completions: Sequence[Completion], *, group_id: str,
               split: str, step: int, variants: Sequence[tuple[Variant, Sequence[Completion]]] = (),
               reference: Sequence[np.ndarray] | None = None) -> Group:
    """A scored group. The sample learns its processed size here, so that scoring converts the model's coordinates.

    Answers of `variants` that are trained join the completions, under the unchanged prompt; the others are given to
    the task and kept aside. `reference` is what the service reference_logprobs says of each answer of the group.
    Parts that need a service which is not given are left out.
    """
    if prompt.media:
        (width, height), known = prompt.media[0].size, [list(size) for size in prompt.processed_sizes[:1]]
        sizes = {"width": width, "height": height, **({"processed_size": known[0]} if known else {})}
        sample = replace(sample, row={**sizes, **sample.row})
    members = [("", c) for c in completions] + [(v.name, c) for v, made in variants if v.trained for c in made]
    aside = [(v.name, c) for v, made in variants if not v.trained for c in made]
    answers = [_answer(c, name, step) for name, c in members]
    others = [_answer(c, name, step) for name, c in aside]
    services = Services({v.name: [a for a in others if a.variant == v.name] for v, _ in variants if not v.trained},
                        {} if reference is None else {"reference_logprobs": looked_up(answers, reference)})
    task, _ = without_absent(task, sample, answers, services)
    scored = [*score_group(task, sample, answers, step, services), *score_alone(task, sample, others, step)]
    rollouts = [Rollout(group_id=group_id, index=i, completion=c, policy_step=step, parts=s.parts, reward=s.reward,
                        parsed=s.parsed, error=s.error, variant=name, train_prompt=prompt if name else None)
                for i, ((name, c), s) in enumerate(zip([*members, *aside], scored, strict=True))]
    return Group(id=group_id, task=task.name, split=split, sample=sample, prompt=prompt,
                 rollouts=tuple(rollouts[:len(members)]), aside=tuple(rollouts[len(members):]),
                 weights=task.weights_at(step), target=task_target(task, sample))


def _answer(completion: Completion, variant: str, step: int) -> Answer:
    found = parse_answer(completion.text, n_tokens=len(completion.tokens), truncated=completion.truncated, step=step)
    return replace(found, variant=variant) if variant else found


def _stream(asked: Asked, variant: Variant) -> tuple[int, ...]:
    """Key of a variant's random stream; that of the group begins with 0, that of an evaluation with 1."""
    return 4, asked.number, zlib.crc32(variant.name.encode())


def _joining(variants: Sequence[tuple[Variant, Prompt]], drawn: Mapping[str, Sequence[Completion]]) -> list[Completion]:
    """The answers of variants that join the group, in its order."""
    return [c for v, _ in variants if v.trained for c in drawn[v.name]]


def credit(groups: Sequence[Group], advantage: Advantage) -> list[Group]:
    """The groups with an advantage on every rollout."""
    def credited(group: Group) -> Group:
        values = group_advantages(group.rewards, advantage)
        return replace(group, rollouts=tuple(replace(r, advantage=a) for r, a in
                                             zip(group.rollouts, values, strict=True)))
    return [credited(g) for g in groups]


def check_score_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> float:
    """Share of the rollouts (over all processes) that failed to score; TrainingError above `limit`.

    `what` and where they are `stored` enter the message.
    """
    errors = [f"sample {g.sample.id!r}: {r.error}, at the answer {ascii(r.completion.text)[:80]}"
              for g in groups for r in g.rollouts if r.error]
    failed, rollouts = dist.total(len(errors), sum(len(g.rollouts) for g in groups))
    share = failed / max(rollouts, 1)
    if share > limit:
        first = next((e for part in dist.gather(errors[:1]) for e in part), "")
        where = f" They are in {stored}." if stored else ""
        raise TrainingError(f"{what}: {int(failed)} of {int(rollouts)} rollouts failed to score, more than "
                            f"limits.score_errors={limit} allows. First error: {first}.{where}")
    return share


def first_samples(task: Task, split: str, count: int) -> list[Sample]:
    """The first `count` samples of a split, with their first template. ConfigError when the split is empty."""
    samples = task_samples(task, split)
    if len(samples) == 0:
        raise ConfigError(f"task '{task.name}' has no samples in split '{split}'")
    templates = task.templates
    return [replace(samples[i], prompt=templates[i % len(templates)]) for i in range(min(count, len(samples)))]
