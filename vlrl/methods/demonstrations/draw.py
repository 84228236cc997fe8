"""Draws the demonstrations that a step trains on. A demonstration is a training row's `solution`, or the task's perfect
answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from vlrl.algo.method import Method, Objectives, Run
from vlrl.algo.named import bind
from vlrl.config.schema import Config
from vlrl.curriculum import Draw, Outcome
from vlrl.data.samples import readable
from vlrl.distributed import comm
from vlrl.engine.base import Engine, reset_sample
from vlrl.errors import ConfigError
from vlrl.methods.demonstrations import update
from vlrl.methods.demonstrations.mixes import MIXES, interleaves
from vlrl.models import shards
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder, PromptTooLong
from vlrl.rollout.demonstrations import demonstrated, has_demonstration
from vlrl.rollout.generate import AcceptedDraw
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.interface import given_answer
from vlrl.types import Group, Sample

_STREAM = 11
"""Key of the random stream that draws demonstrations, and resets their environments."""
_LOOKED_AT = 256
"""Number of training rows that are searched for a demonstration before the run starts."""
_TRIES = 64
"""Number of rows that are tried for each demonstration that a step needs."""


def check(config: Config, task: Task, samples: Sequence[Sample]) -> None:
    """Raises ConfigError if none of the first training rows has a demonstration, or if train.sharding prevents
    measuring the gradient norm of the demonstrations."""
    if shards.is_sharded(config):
        raise ConfigError(f"algo.demonstrations needs the gradient norm of its loss, which train.sharding="
                          f"{config.train.sharding} does not compute: set train.sharding=none, or "
                          "algo.demonstrations=null")
    episodes = any(map(has_environment, task.members))
    if not episodes and not any(given_answer(task, s) for s in islice(samples, _LOOKED_AT)):
        raise ConfigError(f"algo.demonstrations trains on given answers, but none of the first {_LOOKED_AT} training "
                          "rows has one: give rows a `solution`, give the task an oracle, set data.solutions to a "
                          "file, or set algo.demonstrations=null")


@dataclass(eq=False)
class DemonstrationSampler:
    """Draws the demonstrations of a step from the training rows. A resumed run draws the same demonstrations."""

    config: Config
    task: Task
    encode: Encoder
    engine: Engine
    samples: Sequence[Sample]
    mix: Any
    """The instance of the class that algo.demonstrations.mix names."""

    @property
    def settings(self) -> Any:
        return self.config.algo.demonstrations

    def __call__(self, step: int, outcomes: Sequence[Outcome] = ()) -> list[Group]:
        """This process's share of a step's demonstrations, as groups of one completion; empty if the step has none.
        `outcomes` are the results of the step's draws on all processes. Raises DataError if an environment rejects
        the actions of a demonstration."""
        mix, settings = self.mix, self.settings
        if interleaves(mix):
            mix.collect(comm.on_main(partial(self._failed, step, outcomes)))
            places = mix.due()
        elif mix.shares(step, self.config.seed)[1]:
            places = comm.on_main(partial(self._places, step, settings.rows))
        else:
            return []
        return comm.together(partial(self._shown, step, [*enumerate(places)][comm.rank()::comm.world()]))

    def _failed(self, step: int, outcomes: Sequence[Outcome]) -> list[int]:
        """Indices of the rows with a demonstration whose completions in this step are all known to be wrong. Samples
        generated with knobs are left out, because they are not rows."""
        wrong = [o.draw.index for o in outcomes if o.failed and not o.draw.knobs]
        return [place for place in dict.fromkeys(wrong) if self._sample(step, place) is not None]

    def _places(self, step: int, count: int) -> list[int]:
        """Indices of `count` rows with a demonstration, without repetition; fewer if fewer are found. Raises
        ConfigError if none is found."""
        draw = np.random.default_rng([self.config.seed, _STREAM, step])
        draws = draw.integers(len(self.samples), size=_TRIES * count)
        usable = (int(i) for i in dict.fromkeys(draws.tolist()) if self._sample(step, int(i)) is not None)
        places = [*islice(usable, count)]
        if not places:
            raise ConfigError(f"step {step}: none of {_TRIES * count} drawn training rows has a given answer: "
                              "give more rows a `solution`, or set algo.demonstrations=null")
        return places

    def _sample(self, step: int, place: int) -> Sample | None:
        sample = readable(self.samples, place) if self.config.data.quarantine else self.samples[place]
        if sample is None:
            return None
        sample = replace(sample, prompt=self.task.of(sample).template(sample, step))
        sample = reset_sample(self.engine, self.task, sample, _STREAM, place)
        return sample if has_demonstration(self.task, sample) else None

    def _shown(self, step: int, places: Sequence[tuple[int, int]]) -> list[Group]:
        accepted = []
        for number, place in places:
            sample = self._sample(step, place)
            assert sample is not None
            try:
                accepted.append(AcceptedDraw(number, Draw(place, 0), sample, self.encode(self.task, sample)))
            except PromptTooLong:
                continue  # skipped, like a prompt that is drawn for generation
        return demonstrated(self.task, self.encode, self.engine, self.config, accepted, step)


class Demonstrations(Method):
    """The method behind algo.demonstrations: the loss is rl * L_RL + share * L_demonstrations, with weights from
    algo.demonstrations.mix."""

    state_at = "algorithm.demonstrations"

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        super().__init__(section, settings, algorithm)
        self.bound = bind("algo.demonstrations.mix", settings.mix, MIXES)
        self.mix = self.bound.function

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        check(self.config, task, samples)

    def start(self, run: Run) -> None:
        self.demonstrator = DemonstrationSampler(self.config, run.task, run.encode, run.engine, run.samples, self.mix)

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        return self.demonstrator(step, outcomes)

    def share(self, step: int) -> float:
        return self.mix.shares(step, self.config.seed)[0]

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group],
               step: int) -> Sequence[update.DemonstrationPass | None]:
        shown = () if interleaves(self.mix) else drawn
        return update.make_passes(policy, shown, self.algorithm, self.mix, step)

    def after_update(self, policy: Policy, passes: Sequence[Any], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        if interleaves(self.mix):
            return update.interleave(policy, drawn, self.algorithm, self.mix, stats["grad_norm"])
        return update.step_metrics(passes, self.mix, self.config.seed, step)

    def state_dict(self) -> dict[str, Any]:
        return self.bound.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bound.load_state_dict(state)
