"""From prompts to scored groups: generates completions of prompts and of variants of these prompts, and scores
finished groups in the meantime.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.method import Method
from vlrl.config.schema import Config, RolloutSettings
from vlrl.curriculum import Draw
from vlrl.engine.base import Done, Engine, Request, Sampling
from vlrl.monitoring.metrics import Clock
from vlrl.rewards.text import EnvironmentAction, parse_answer
from vlrl.rollout.overlap import OverlappedWork
from vlrl.rollout.partial import PartialGroup, in_one_step, last_part
from vlrl.task import Task, task_target
from vlrl.task.scoring import AnswerScore, MarkedScores, score_all, without_score
from vlrl.task.services import (
    GroupLogprobs,
    GroupServices,
    RunServices,
    ServiceContext,
    Services,
    parts_needing,
    precomputed_logprobs,
)
from vlrl.task.variants import GREEDY, KEPT, trained_count
from vlrl.types import Answer, Completion, Group, PastAction, Prompt, Rollout, Sample, Turn, Variant


@dataclass(frozen=True, eq=False)
class UnscoredGroup:
    """All completions of a sample before they are scored."""

    sample: Sample
    prompt: Prompt
    members: Sequence[tuple[str, Completion]]
    """(name of the variant, completion) for each completion; empty while the group continues in a later step."""


Likelihoods = Callable[[Sequence[UnscoredGroup], str, int], list[GroupLogprobs]]
"""Function (groups, split, step) that computes log-probabilities of texts under the policy or the reference policy. The
result has one entry per group. See services/likelihoods.py."""

Score = Callable[[Task, Sample, Sequence[Answer], Sequence[Answer], int, Services],
                 tuple[MarkedScores, dict[str, float]]]
"""Function that scores a group; its signature is that of scoring.score_all."""


@dataclass(frozen=True, eq=False)
class AcceptedDraw:
    """A drawn prompt that is encoded, so that completions can be generated."""

    number: int  # number of the group, which also selects its random streams
    draw: Draw
    sample: Sample
    prompt: Prompt
    variants: tuple[tuple[Variant, Sample, Prompt], ...] = ()
    carried_over: PartialGroup | None = None  # the unfinished group from the previous step; None for a new group

    def answered(self, completions: Sequence[Completion], most: int, step: int) -> PartialGroup:
        """Returns the draw's group with the `completions` that were generated for it in `step`, as a PartialGroup.
        most: token limit of a completion."""
        if self.carried_over is None:
            return PartialGroup(self.number, self.draw, tuple(completions), (step,) * len(completions), most)
        return self.carried_over.after(completions, step)


@dataclass(eq=False)
class RolloutGenerator:
    """Samples completions from the policy for encoded prompts, and scores them."""

    config: Config
    task: Task
    engine: Engine
    clock: Clock
    algorithm: Algorithm | None = None
    """The run's Algorithm, which determines the temperature; None = use rollout.temperature."""
    score: Score = score_all
    likelihoods: Likelihoods | None = None  # computes log-probabilities for services; None if the task needs none
    services: RunServices | None = None  # the services of `services.*` that the task needs; None if it needs none
    methods: Sequence[Method] = ()  # the active methods of the run, whose `start` was called
    policy_step: int | None = None  # number of completed steps of the engine's weights; None = equal to `step`
    fixed_temperature: float | None = None
    step: int = 0

    def with_engine(self, engine: Engine, clock: Clock, policy_step: int) -> RolloutGenerator:
        """A copy of this generator for another thread, with another engine. Its temperature stays fixed at the current
        value. policy_step: number of completed steps of the engine's weights."""
        return replace(self, engine=engine, clock=clock, policy_step=policy_step, fixed_temperature=self.temperature)

    @property
    def temperature(self) -> float:
        """Sampling temperature of the policy."""
        if self.fixed_temperature is not None:
            return self.fixed_temperature
        return self.algorithm.temperature if self.algorithm else self.config.rollout.temperature

    @property
    def collective(self) -> bool:
        """Whether `groups` contains collective calls, so that processes without prompts must call `groups` too."""
        return self.likelihoods is not None or any(method.collective for method in self.methods)

    def group_size(self, draw: Draw) -> int:
        """Number of completions in the group of a drawn prompt, including completions of trained variants."""
        return draw.group_size or self.config.rollout.group_size

    def groups(self, accepted: Sequence[AcceptedDraw], step: int,
               tokens: int | None = None) -> list[Group | PartialGroup]:
        """Generates and scores one group per accepted draw.

        tokens: maximum number of new tokens per completion (rollout.step_tokens). A group with an unfinished completion
        is returned as a PartialGroup. With rollout.score_ahead, complete groups are scored in a thread while others are
        generated, unless log-probabilities are needed first. Variants are generated separately, because the sequences
        of a batch affect the last bits of each other's logits, and other completions must not depend on variants."""
        self.step = step
        soon = self.config.rollout.score_ahead and self.likelihoods is None
        requests, others = self._requests(accepted)
        most = [r.sampling.max_new_tokens for r in requests]
        if tokens is not None:
            requests = [in_one_step(r, a.carried_over, tokens) for r, a in zip(requests, accepted, strict=True)]
        drawn: list[dict[str, Sequence[Completion]]] = [{} for _ in accepted]
        likely: list[GroupLogprobs] = []

        def so_far(i: int, answers: Sequence[Completion]) -> PartialGroup:
            return accepted[i].answered(answers, most[i], step)

        def score(i: int, answers: Sequence[Completion]) -> Group | PartialGroup:
            partial_group = so_far(i, answers)
            if tokens is not None and partial_group.unfinished:
                return partial_group
            return self._group(accepted[i], partial_group, drawn[i], likely[i] if self.likelihoods else None)

        def keep(j: int, answers: Sequence[Completion]) -> None:
            i, variant, request = others[j]
            drawn[i][variant.name] = [c.behind(request.prompt, accepted[i].prompt) if c.episode_id else c
                                      for c in answers]

        def done(j: int, answers: Sequence[Completion]) -> None:
            i, *_ = others[j]
            keep(j, answers)
            if soon and len(drawn[i]) == len(accepted[i].variants):
                ahead.begin(i, completions[i])

        with OverlappedWork(score, self.clock, "score", self.services.threads if self.services else 1) as ahead:
            completions = self._drawn(requests, ahead.begin if soon and not others else None)
            varied = self.engine.generate([request for *_, request in others], done) if others else []
            for j, variant_answers in enumerate(varied):
                keep(j, variant_answers)
            if self.likelihoods:
                partial_groups = [so_far(i, answers) for i, answers in enumerate(completions)]
                likely += self.likelihoods([
                    UnscoredGroup(a.sample, a.prompt, [] if tokens is not None and h.unfinished else _members(
                        h.answers, [(v, more[v.name]) for v, *_ in a.variants]))
                    for a, h, more in zip(accepted, partial_groups, drawn, strict=True)], "train", step)
            groups = ahead.results(completions)
        return self._scored(accepted, self._with_greedy_rollouts(accepted, groups))

    def write(self, accepted: Sequence[AcceptedDraw]) -> None:
        """Makes the engine generate all completions that the method `groups` would request for new groups, and discards
        the result. For engines that store their completions for later use."""
        for requests in self._calls(accepted):
            self.engine.generate(requests)

    def keys(self, accepted: Sequence[AcceptedDraw]) -> set[tuple[int, ...]]:
        """The keys (random streams) of all requests that `write` makes."""
        return {request.key for requests in self._calls(accepted) for request in requests}

    def _calls(self, accepted: Sequence[AcceptedDraw]) -> list[list[Request]]:
        requests, others = self._requests(accepted)
        calls = requests, [r for *_, r in others], self._greedy(accepted) if self._with_greedy else []
        return [call for call in calls if call]

    def _requests(self, accepted: Sequence[AcceptedDraw]) -> tuple[list[Request], list[tuple[int, Variant, Request]]]:
        """Returns (requests for the unmodified samples, one per draw; requests for variants). A request for a variant
        is (index of the draw in `accepted`, variant, request)."""
        sampling = [sampling_of(self.config.rollout, self.temperature, a.draw.max_new_tokens) for a in accepted]
        requests = [Request(prompt=a.prompt, n=self.group_size(a.draw) - trained_count([v for v, *_ in a.variants]),
                            sampling=s, key=(0, a.number), sample=a.sample, max_turns=a.draw.max_turns)
                    for a, s in zip(accepted, sampling, strict=True)]
        return requests, [(i, v, Request(prompt=prompt, n=v.n, sampling=sampling[i], key=_variant_key(a, v),
                                         sample=sample, max_turns=a.draw.max_turns))
                          for i, a in enumerate(accepted) for v, sample, prompt in a.variants]

    def _drawn(self, requests: Sequence[Request], done: Done | None) -> list[list[Completion]]:
        for method in self.methods:
            if (written := method.generate(requests, self, done)) is not None:
                return written
        return self.engine.generate(requests, done)

    def _with_greedy_rollouts(self, accepted: Sequence[AcceptedDraw],
                       groups: Sequence[Group | PartialGroup]) -> list[Group | PartialGroup]:
        """If the advantage requires "greedy", adds a greedy completion of each prompt to `Group.aside`. The greedy
        completion is generated separately, scored as a group of one, and excluded from all statistics of its group."""
        if not self._with_greedy:
            return list(groups)
        greedy_answers = self.engine.generate(self._greedy(accepted))
        visits = groups_without_variants([(a.number, a.sample, a.prompt) for a in accepted], greedy_answers)
        likely = self.likelihoods(visits, "train", self.step) if self.likelihoods else [None] * len(greedy_answers)
        out: list[Group | PartialGroup] = []
        for a, group, answers, known in zip(accepted, groups, greedy_answers, likely, strict=True):
            assert isinstance(group, Group)  # partial.check
            alone = self._make(a.sample, a.prompt, answers, group.id, likely=known)
            greedy = replace(alone.rollouts[0], index=len(group.rollouts) + len(group.aside), variant=GREEDY,
                             trained=False)
            out.append(replace(group, aside=(*group.aside, greedy)))
        return out

    def _scored(self, accepted: Sequence[AcceptedDraw],
                groups: Sequence[Group | PartialGroup]) -> list[Group | PartialGroup]:
        adding = [method for method in self.methods if method.overrides("scored")]
        if not adding:
            return list(groups)
        whole: Sequence[Group] = [g for g in groups if isinstance(g, Group)]
        assert len(whole) == len(groups)  # Config refuses such methods with groups that continue in a later step
        requests, _ = self._requests(accepted)
        for method in adding:
            whole = method.scored(requests, whole, self)
        return [*whole]

    def rescored(self, group: Group, completions: Sequence[Completion]) -> Group:
        """Scores completions as a separate group, with the sample and prompt of `group`."""
        return self._make(group.sample, group.prompt, completions, group.id)

    def _make(self, sample: Sample, prompt: Prompt, completions: Sequence[Completion], group_id: str,
              **more: Any) -> Group:
        return make_group(self.task, sample, prompt, completions, group_id=group_id, split="train", step=self.step,
                          policy_step=self.policy_step, score=self.score, served=self.services, **more)

    def judged(self, request: Request, completions: Sequence[Completion]) -> list[bool | None]:
        """Scores the completions of a request as a separate group. Returns for each completion whether it is correct,
        or None if it cannot be scored."""
        assert request.sample is not None
        with self.clock("score"):
            group = self._make(request.sample, request.prompt, completions, "")
        return [None if r.reward is None else r.correct for r in group.rollouts]

    @property
    def _with_greedy(self) -> bool:
        return self.algorithm is not None and "greedy" in self.algorithm.requires

    def _greedy(self, accepted: Sequence[AcceptedDraw]) -> list[Request]:
        return [Request(prompt=a.prompt, n=1, sampling=sampling_of(self.config.rollout, 0.0, a.draw.max_new_tokens),
                        key=(5, a.number), sample=a.sample, max_turns=a.draw.max_turns) for a in accepted]

    def _group(self, accepted: AcceptedDraw, partial_group: PartialGroup, drawn: Mapping[str, Sequence[Completion]],
               likely: GroupLogprobs | None) -> Group:
        variants = [(v, drawn[v.name]) for v, *_ in accepted.variants]
        answers = [last_part(c) for c in partial_group.answers] if accepted.carried_over else partial_group.answers
        group = self._make(accepted.sample, accepted.prompt, answers, f"{accepted.number:08d}", variants=variants,
                           likely=likely)
        return partial_group.with_policy_steps(group) if accepted.carried_over else group


def sampling_of(rollout: RolloutSettings, temperature: float, max_new_tokens: int | None = None) -> Sampling:
    """The sampling parameters of the settings `rollout.*` with this temperature. max_new_tokens replaces
    rollout.max_new_tokens if set. A thinking budget that can never apply is dropped."""
    most, budget = max_new_tokens or rollout.max_new_tokens, rollout.thinking_budget
    return Sampling(max_new_tokens=most, temperature=temperature, stop=rollout.stop,
                    thinking_budget=budget if budget is not None and budget < most else None,
                    thinking_end=rollout.thinking_end)


def make_group(task: Task, sample: Sample, prompt: Prompt, completions: Sequence[Completion], *, group_id: str,
               split: str, step: int, variants: Sequence[tuple[Variant, Sequence[Completion]]] = (),
               likely: GroupLogprobs | None = None, policy_step: int | None = None,
               score: Score = score_all, served: RunServices | None = None) -> Group:
    """Scores the completions of a sample and returns them as a group.

    policy_step: number of completed steps of the weights that sampled the completions; None = `step`. The original and
    processed size of the sample's image are added to its row, so that scoring can convert the model's coordinates.
    Completions of trained `variants` join the group under the unmodified prompt. Completions of other variants are
    passed to the task and stored in `Group.aside`. `likely`: log-probabilities for the services of the group; `served`:
    the other services. A reward part whose service is missing is left out. If a service did not respond, its reward
    part has no value and the rollout has an `error`."""
    task = task.of(sample)
    sample, members = with_image_size(sample, prompt), _members(completions, variants)
    aside = [(v.name, c) for v, variant_answers in variants if not v.trained for c in variant_answers]
    answers = [answer_of(c, prompt, step, name) for name, c in members]
    others = [answer_of(c, prompt, step, name) for name, c in aside]
    policy_step = step if policy_step is None else policy_step
    given = served.at(ServiceContext(split, step, policy_step)) if served else None
    services = Services({v.name: [a for a in others if a.variant == v.name] for v, _ in variants if not v.trained},
                        {**{name: precomputed_logprobs(name, answers, values)
                            for name, values in (likely or {}).items()},
                         **(given.services if given else {})})
    with given.turn if given else contextlib.nullcontext():
        scored, weights = score(task, sample, answers, others, step, services)
    scored = [(_with_service_error(task, s, given), marks) for s, marks in scored] if given else scored
    scored = [(without_score(s, c.error), marks) for (_, c), (s, marks) in zip([*members, *aside], scored, strict=True)]
    rollouts = [Rollout(group_id=group_id, index=i, completion=c, parts=s.parts, reward=s.reward,
                        steps=s.steps, correct=s.correct, parsed=s.parsed, error=s.error,
                        variant=name if c.policy_step is None else KEPT,
                        train_prompt=prompt if name else None, marks=marks,
                        policy_step=policy_step if c.policy_step is None else c.policy_step,
                        trained=i < len(members))
                for i, ((name, c), (s, marks)) in enumerate(zip([*members, *aside], scored, strict=True))]
    return Group(id=group_id, task=task.name, split=split, sample=sample, prompt=prompt,
                 rollouts=tuple(rollouts[:len(members)]), aside=tuple(rollouts[len(members):]),
                 weights=weights, target=task_target(task, sample))


def with_image_size(sample: Sample, prompt: Prompt) -> Sample:
    """Returns the sample with the original and processed size of its first image added to its row, where scoring reads
    them to convert coordinates. Sizes that the row already has are kept."""
    if not prompt.media:
        return sample
    (width, height), known = prompt.media[0].size, [list(size) for size in prompt.processed_sizes[:1]]
    sizes = {"width": width, "height": height, **({"processed_size": known[0]} if known else {})}
    return replace(sample, row={**sizes, **sample.row})


def groups_without_variants(numbered: Sequence[tuple[Any, Sample, Prompt]],
                            completions: Sequence[Sequence[Completion]]) -> list[UnscoredGroup]:
    """Makes an unscored group without variants from each (number, sample, prompt) and the prompt's completions."""
    return [UnscoredGroup(sample, prompt, _members(answers, ()))
            for (_, sample, prompt), answers in zip(numbered, completions, strict=True)]


def _members(completions: Sequence[Completion],
             variants: Sequence[tuple[Variant, Sequence[Completion]]]) -> list[tuple[str, Completion]]:
    return [("", c) for c in completions] + [(v.name, c) for v, answers in variants if v.trained for c in answers]


def _with_service_error(task: Task, scored: AnswerScore, given: GroupServices) -> AnswerScore:
    if scored.reward is not None or scored.error is not None or given.problem is None:
        return scored
    served = [parts_needing(task, name) for name in given.services]
    parts = scored.parts if None in served else {part for names in served for part in names or ()}
    lost = any(scored.parts.get(part, 0.0) is None for part in parts)
    return replace(scored, error=given.problem) if lost else scored


def answer_of(completion: Completion, prompt: Prompt, step: int, variant: str = "") -> Answer:
    """Converts a completion to the Answer that a task scores. For an episode, the text of the Answer is the last
    action, and `turns` has all actions."""
    actions = completion.actions
    text, opened = (actions[-1].text, actions[-1].opened) if actions else (completion.text, prompt.opened)
    answer = parse_answer(text, len(completion.tokens), completion.truncated, step, opened)
    turns = _acted(completion) if completion.episode_id else ()
    return replace(answer, variant=variant, turns=turns) if variant or turns else answer


def _acted(completion: Completion) -> tuple[PastAction, ...]:
    media = {m.sha256: m.as_media() for m in completion.observed_media}
    out = []
    for turn, after in itertools.zip_longest(completion.turns, completion.turns[1:]):
        if turn.role == "assistant":
            after = after or Turn(start=turn.end, end=turn.end)
            shown = tuple(media[name] for name in after.media)
            out.append(PastAction(action=EnvironmentAction(turn.text, turn.opened), observation=after.text,
                                  media=shown, parts=turn.parts or {}, state=turn.state, done=bool(turn.done),
                                  error=turn.error))
    return tuple(out)


def _variant_key(accepted: AcceptedDraw, variant: Variant) -> tuple[int, ...]:
    """Key of the random stream for the completions of a variant. It begins with 4, while keys of groups begin with 0
    and those of evaluations with 1."""
    return 4, accepted.number, zlib.crc32(variant.name.encode())
