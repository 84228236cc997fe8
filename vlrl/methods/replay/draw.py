"""Draws the stored rollouts that a step replays, and converts them to groups."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.algo.method import Method, Objectives, Run
from vlrl.algo.named import Bound, bind
from vlrl.algo.tables import ADVANTAGES, BATCHES
from vlrl.config.schema import Config
from vlrl.data.samples import readable
from vlrl.distributed import comm
from vlrl.errors import ConfigError, DataError
from vlrl.methods.replay import update
from vlrl.methods.replay.buffer import RolloutBuffer, SourceFolder, StoredGroup
from vlrl.methods.replay.rows import RowLimits
from vlrl.methods.replay.rules import DRAWS, RULES, SCHEDULES
from vlrl.models import shards
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.models.token_text import TokenTexts, tokenizer_file
from vlrl.rollout.generate import Score, make_group
from vlrl.store import utf8
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.services import RunServices
from vlrl.training.advantages import credit_alone
from vlrl.types import Completion, Group, Prompt, Rollout, Sample, Turn

_STREAM = 22
"""Key of the random stream that draws stored groups."""


@dataclass(frozen=True, eq=False)
class ReplayFunctions:
    """The functions that algo.stored names, with their options bound: the loss (`rule`), the filter of completions
    (`batch`), the advantage, the sampling weights of groups (`draw`) and the schedule (`every`)."""

    rule: Bound
    batch: Bound
    advantage: Bound
    draw: Bound
    every: Bound

    @classmethod
    def of(cls, settings: Any) -> ReplayFunctions:
        """Looks up the functions of the settings. Raises ConfigError, which names the setting, if one is not valid, or
        if the advantage needs more than the completions of a single group."""
        rule = bind("algo.stored.rule", settings.rule, RULES)
        needs = frozenset[str](getattr(rule.function, "requires", ()))
        advantage = bind("algo.stored.advantage", settings.advantage, ADVANTAGES)
        if unknown := advantage.requires - {"local", "tokens", "texts", "parts"}:
            raise ConfigError(f"algo.stored.advantage={advantage.name!r} needs {', '.join(sorted(unknown))}, which "
                              "stored rollouts do not have: choose another advantage, such as "
                              "algo.stored.advantage=grpo")
        return cls(replace(rule, requires=needs), bind("algo.stored.batch", settings.batch, BATCHES), advantage,
                   bind("algo.stored.draw", settings.draw, DRAWS, skip=2),
                   bind("algo.stored.every", settings.every, SCHEDULES))


@dataclass(eq=False)
class ReplaySampler:
    """Draws the stored groups of a step. A resumed run draws the same groups."""

    config: Config
    task: Task
    encode: Encoder
    samples: Sequence[Sample]
    score: Score
    services: RunServices | None
    policy: Policy
    parts: ReplayFunctions
    unused: Counter[str] = field(default_factory=Counter)
    """This process's drawn groups of the last step that could not be used, counted by reason."""
    drawn: int = 0
    """Number of groups drawn in the last step, over all processes."""

    def __call__(self, step: int, flush: Callable[[], None]) -> list[Group]:
        """Returns this process's share of a step's stored groups, with advantages. `flush` waits until this run's
        rollout files are written. Called on every process."""
        settings, parts = self.settings, self.parts
        self.unused, self.drawn = Counter(), 0
        if not settings.coef:
            return []
        if settings.own:
            flush()
        stored_groups: list[StoredGroup] = comm.on_main(partial(self._taken, step, settings, parts))
        self.drawn = len(stored_groups)
        mine = stored_groups[comm.rank()::comm.world()]
        groups = comm.together(lambda: [self._group(stored, step) for stored in mine])
        credited = [self._credited(g, step, parts) for g in groups if g is not None]
        return [g for g in credited if g is not None]

    @property
    def settings(self) -> Any:
        return self.config.algo.stored

    def _taken(self, step: int, settings: Any, parts: ReplayFunctions) -> list[StoredGroup]:
        self.buffer.take(step)
        if not parts.every(step):
            return []
        rng = np.random.default_rng([self.config.seed, _STREAM, step])
        # even with equal rewards some answers of a group may be correct and others wrong
        by_outcome = "outcome" in getattr(parts.advantage.function, "reads", ())
        return self.buffer.draw(settings.groups, step, rng, parts.draw, settings.max_age, by_outcome)

    @cached_property
    def buffer(self) -> RolloutBuffer:
        """The replay buffer; used on the main process only."""
        settings, policy, run = self.settings, self.policy, Path(self.config.run.dir)
        texts, end = TokenTexts(policy), policy.eos
        limits = RowLimits(vocabulary=policy.base.config.get_text_config().vocab_size,
                        banned=frozenset(policy.banned.tolist()), most_tokens=self.config.rollout.max_new_tokens,
                        decode=lambda ids: texts.decode(ids[:-1] if ids[-1] in end else ids), most_gap=settings.max_gap)
        sources = [SourceFolder(Path(name)) for name in settings.runs]
        return RolloutBuffer(run, [*sources, *([SourceFolder(run, own=True)] if settings.own else [])], limits,
                              settings.capacity, tokenizer_file(policy.processor.tokenizer) or "")

    @cached_property
    def _places(self) -> dict[str, int]:
        rows = ((i, readable(self.samples, i)) for i in range(len(self.samples)))
        return {utf8(sample.id): i for i, sample in rows if sample is not None}

    def _group(self, stored: StoredGroup, step: int) -> Group | None:
        """Converts stored rollouts to a group, with the training row and the prompt that `_matching` finds. Rollouts of
        another run are scored again. Returns None if no row matches."""
        match = self._matching(stored)
        if match is None:
            return None
        sample, prompt = match
        answers = [_completion(row) for row in stored.rows]
        if stored.own:
            task = self.task.of(sample)
            rollouts = tuple(_rollout(stored, i, row, c) for i, (row, c) in enumerate(zip(stored.rows, answers,
                                                                                          strict=True)))
            return Group(id=stored.name, task=task.name, split="train", sample=sample, prompt=prompt,
                         rollouts=rollouts, weights=dict(stored.rows[0]["weights"] or ()))
        return make_group(self.task, sample, prompt, answers, group_id=stored.name, split="train", step=step,
                          policy_step=max(step - stored.age, 0), score=self.score, served=self.services)

    def _matching(self, stored: StoredGroup) -> tuple[Sample, Prompt] | None:
        """Returns the training row of a stored group, and the row's prompt. Returns None if text or media of that
        prompt differ from those that the group was sampled with."""
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
                continue  # skipped, like a prompt that is drawn for generation
            if utf8(prompt.text) == first["prompt"] and [m.sha256 for m in prompt.media] == first["hashes"]:
                return candidate, prompt
        self.unused["different prompt"] += 1
        return None

    def _credited(self, group: Group, step: int, parts: ReplayFunctions) -> Group | None:
        seed = zlib.crc32(f"{self.config.seed}/{group.id}".encode())
        credited = credit_alone(group, parts.advantage, parts.batch, step, seed, "algo.stored")
        if group.zero_variance and not any(r.advantage for r in credited.rollouts):
            self.unused["equal rewards"] += 1
            return None
        return replace(credited, rollouts=tuple(r for r in credited.rollouts if r.trained))

    def metrics(self) -> dict[str, float]:
        """Metrics of the buffer and of the last draw, over all processes. Called on every process."""
        if not self.settings.coef:
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


class Replay(Method):
    """The method behind algo.stored: draws stored groups in each step, and trains on them with the loss
    algo.stored.rule."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        self.parts = ReplayFunctions.of(settings)
        self.requires = self.parts.rule.requires

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        config = self.config
        if shards.is_sharded(config):
            raise ConfigError(f"algo.stored needs the gradient norm of its loss, which train.sharding="
                              f"{config.train.sharding} does not compute: set train.sharding=none, or "
                              "algo.stored=null")
        if all(map(has_environment, task.members)):
            raise ConfigError(f"algo.stored replays single answers, but task {config.task_name!r} has episodes "
                              "only: set algo.stored=null")

    def start(self, run: Run) -> None:
        self.stored = ReplaySampler(self.config, run.task, run.encode, run.samples, run.score, run.services,
                                    run.policy, self.parts)

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        return self.stored(step, flush)

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group],
               step: int) -> Sequence[update.ReplayPass | None]:
        return update.make_passes(policy, drawn, self.algorithm, self.parts.rule, step)

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        return update.step_metrics(passes)

    def metrics(self) -> Mapping[str, float]:
        return self.stored.metrics()
