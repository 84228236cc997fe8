"""Prompts -> scored groups: draw, encode, generate, score, keep or refill; then credit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from vlrl.scoring import score_group
from vlrl.settings import Config, RolloutSettings
from vlrl.task import Task, task_samples, task_target
from vlrl.types import Completion, Group, Prompt, Request, Rollout, Sample, Sampling


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


class GroupSource:
    """Draws samples, generates and scores their groups; the same on every process, each doing its share.

    `next_groups(P)` returns this process's share of P groups; the sampler has observed all of them.
    """

    def __init__(self, config: Config, task: Task, encode: Encoder, engine: Engine, sampler: Sampler,
                 samples: Sequence[Sample], clock: Clock, services: Any = None, prefetch: Prefetcher | None = None):
        self.prefetch = prefetch or Prefetcher(encode, task, 0)
        self.config, self.task, self.encode, self.engine = config, task, encode, engine
        self.sampler, self.samples, self.clock, self.services = sampler, samples, clock, services
        self.drawn = 0
        """Groups drawn since the run began; numbers the groups and their random streams."""
        self.step = 0
        self.rejected = Rejected()
        self.dropped: list[Group] = []
        """This process's groups of the last call that were generated and not kept."""
        self._refused: list[str] = []

    def next_groups(self, count: int, step: int) -> list[Group]:
        """This process's share of `count` scored groups, refilled where a prompt was rejected or its group not kept.

        Raises TrainingError when too many prompts are rejected. With curriculum.keep=mixed fewer than `count` groups
        may come back after curriculum.max_refills rounds.
        """
        kept: list[Group] = []
        missing, refills, self.dropped = count, -1, []
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
        prompts = []
        self.prefetch.begin({draw: partial(self._sample, draw) for draw, _ in mine})
        for draw, number in mine:
            encoded = self._encoded(draw)
            if encoded is not None:
                prompts.append((number, draw, *encoded))
        self._look_ahead()
        groups = self._answers(prompts) if prompts else []
        return {number: group for (number, *_), group in zip(prompts, groups, strict=True)}

    def _answers(self, prompts: Sequence[tuple[int, Draw, Sample, Prompt]]) -> list[Group]:
        """Generates and scores one group per prompt.

        With rollout.score_ahead, groups that are whole are scored in a thread while others are still generated.
        """
        rollout = self.config.rollout
        sampling = sampling_of(rollout, rollout.temperature)
        requests = [Request(prompt=prompt, n=rollout.group_size, sampling=sampling, key=(0, number))
                    for number, _, _, prompt in prompts]

        def score(i: int, completions: Sequence[Completion]) -> Group:
            number, _, sample, prompt = prompts[i]
            return make_group(self.task, sample, prompt, completions, group_id=f"{number:08d}", split="train",
                              step=self.step, services=self.services)

        with Ahead(score, self.clock, "score") as ahead:
            return ahead.results(self.engine.generate(requests, ahead.begin if rollout.score_ahead else None))

    def _sample(self, draw: Draw) -> Sample:
        sample = self.samples[draw.index]
        return replace(sample, prompt=self.task.template(sample, draw.visit))

    def _look_ahead(self) -> None:
        """Starts on this process's share of the next step, as far as the sampler can tell it."""
        draws: list[Draw] = []
        if self.prefetch.workers and self.step + 1 < self.config.steps and isinstance(self.sampler, Foreseeing):
            draws = self.sampler.upcoming(self.config.rollout.prompts_per_step)[dist.rank()::dist.world()]
        self.prefetch.keep(draws)
        self.prefetch.begin({draw: partial(self._sample, draw) for draw in draws})

    def _encoded(self, draw: Draw) -> tuple[Sample, Prompt] | None:
        """The sample and prompt of a draw; None when it is rejected."""
        try:
            with phase("encode"):
                return self.prefetch.take(draw, partial(self._sample, draw))
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
        gathered = dist.gather((share, refused))
        everyone = {k: v for part, _ in gathered for k, v in part.items()}
        self._count([reason for _, reasons in gathered for reason in reasons], len(draws), any(everyone.values()))
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
                "prompts/rejected": float(self.rejected.count)}

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
               split: str, step: int, services: Any = None) -> Group:
    """A scored group. The sample learns its processed size here, so that scoring converts the model's coordinates."""
    if prompt.media:
        (width, height), known = prompt.media[0].size, [list(size) for size in prompt.processed_sizes[:1]]
        sizes = {"width": width, "height": height, **({"processed_size": known[0]} if known else {})}
        sample = replace(sample, row={**sizes, **sample.row})
    answers = [parse_answer(c.text, n_tokens=len(c.tokens), truncated=c.truncated, step=step) for c in completions]
    scored = score_group(task, sample, answers, step, services)
    rollouts = tuple(Rollout(group_id=group_id, index=i, completion=c, policy_step=step, parts=s.parts, reward=s.reward,
                             parsed=s.parsed, error=s.error)
                     for i, (c, s) in enumerate(zip(completions, scored, strict=True)))
    return Group(id=group_id, task=task.name, split=split, sample=sample, prompt=prompt, rollouts=rollouts,
                 weights=task.weights_at(step), target=task_target(task, sample))


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
