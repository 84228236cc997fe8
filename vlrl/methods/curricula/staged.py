"""Samplers that train in stages (Staged), and that mix prompts seen before into the draws, most often those with low
rewards (Retrospective)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic
from pydantic import Field, field_validator

from vlrl.config.base import Fraction, Positive, Rate, Settings
from vlrl.curriculum.base import Prompts, as_uniform, stream
from vlrl.curriculum.drawing import Adaptive, Cycle, next_distinct, weighted
from vlrl.curriculum.history import History
from vlrl.curriculum.types import Draw, Outcome
from vlrl.errors import ConfigError, did_you_mean


class CarryPool:
    """Draws from shuffled passes over the prompts `members`. The fraction `carry` of the draws goes instead to prompts
    that were answered earlier, with weight 1 / max(mean reward of the last group, lowest). If `before` [N] bool is
    given, only prompts that are marked in it are carried."""

    def __init__(self, history: History, members: np.ndarray, key: Sequence[int], before: np.ndarray | None = None,
                 carry: float = 0.0, lowest: float = 0.1):
        self.history, self.before, self.carry, self.lowest = history, before, carry, lowest
        self.cycle = Cycle(members, *key)
        self._weights: np.ndarray | None = None

    def weights(self) -> np.ndarray:
        """[N] sampling weights of the prompts that may be carried; 0 for all others."""
        if self._weights is None:
            self._weights = np.zeros(len(self.history.visits))
            self._note(np.flatnonzero(self.history.visited))
        return self._weights

    def take(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws `count` prompts. Returns two arrays of indices: the prompts from the shuffled passes, and the carried
        prompts."""
        return self._take(self.cycle, count, rng)

    def peek(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """The prompts that `take` would draw, as one array, without changing the pool."""
        return np.concatenate(self._take(copy.copy(self.cycle), count, rng))

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """Updates the weights of the prompts in `outcomes`. The history must already contain the outcomes."""
        if self.carry:
            self._note(np.array([o.draw.index for o in outcomes], dtype=np.int64))

    def restart(self, drawn: int) -> None:
        """Restores the pool of a checkpoint: the passes continue after `drawn` draws, and the weights are rebuilt from
        the history when they are needed."""
        self.cycle.drawn, self._weights = drawn, None

    def _take(self, cycle: Cycle, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        old = np.zeros(0, dtype=np.int64)
        wanted = int(count * self.carry + rng.random()) if self.carry else 0  # stochastic rounding: exact on average
        if wanted:
            weights = self.weights()
            there = min(wanted, int(np.count_nonzero(weights)))
            old = weighted(weights, there, rng) if there else old
        return next_distinct(cycle, count - len(old), {*old.tolist()}), old

    def _note(self, indices: np.ndarray) -> None:
        weights = self.weights()
        again = indices if self.before is None else indices[self.before[indices]]
        weights[again] = 1.0 / np.maximum(self.history.reward[again].astype(np.float64), self.lowest)


@as_uniform(carry=0)
class Retrospective(Adaptive):
    """Draws shuffled passes over all prompts. The fraction `carry` of the draws goes instead to prompts that were
    answered earlier, with probability proportional to 1 / max(mean reward of the prompt's last group, lowest).

    So new prompts come from the passes, and prompts with a low reward are repeated most often. The weight 1 / mean
    reward is that of the difficulty-aware retrospective sampling of QwenLong-L1 (2505.17667), which applies it between
    phases (see Staged). The share and the lowest reward, which limits the weight, are ours.

    carry: in [0, 1]. lowest: above 0, in the unit of the reward."""

    def __init__(self, prompts: Prompts, carry: Fraction = 0.25, lowest: Rate = 0.1):
        super().__init__(prompts)
        every = np.arange(prompts.size, dtype=np.int32)
        self.pool = CarryPool(prompts.history, every, (prompts.seed, 4), None, carry, lowest)

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        return np.concatenate(self.pool.take(count, rng))

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """Returns the draws that `next(count, step)` would return if no result were observed before that call."""
        return uncounted_draws(self.history, self.pool.peek(count, stream(self.prompts.seed, 3, self.calls + 1)))

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        self.pool.note(outcomes)

    def state(self) -> dict[str, Any]:
        return {"drawn": self.pool.cycle.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self.pool.restart(int(state["drawn"]))

    def metrics(self) -> dict[str, float]:
        return {"curriculum/epoch": self.pool.cycle.drawn / self.prompts.size}


def uncounted_draws(history: History, indices: np.ndarray, **more: Any) -> list[Draw]:
    """Creates Draws of the prompts `indices` without changing the history. Draw.visit is set as if the draws were
    counted."""
    before: dict[int, int] = {}
    out = []
    for index in indices.tolist():
        again = before[index] = before.get(index, -1) + 1
        out.append(Draw(index, int(history.visits[index]) + again, **more))
    return out


class Stage(Settings):
    """A stage of training: its prompts, its end conditions and its limits. One entry of `curriculum.stages`."""

    where: dict[str, Any] = {}
    """Conditions that select the stage's prompts: field -> a value, a list of values, or {min, max}, both inclusive.
    "task" is the task's name in a mixture. All conditions must hold; without conditions, the stage has all prompts."""
    steps: Positive | None = None
    """Maximum number of training steps of the stage; None = no limit."""
    reward: float | None = None
    """The stage ends when the running mean of the reward reaches this value; None = no such condition."""
    pass_rate: Fraction | None = None
    """The stage ends when the running mean of the pass rate reaches this value; None = no such condition."""
    max_new_tokens: Positive | None = None
    """Token limit of completions in this stage; None = rollout.max_new_tokens."""
    group_size: Annotated[int, Field(ge=2)] | None = None
    """Group size in this stage; None = rollout.group_size."""
    carry: Fraction = 0.0
    """Share of the stage's draws that go to prompts that were answered in earlier stages."""
    fields: dict[str, bool | int | float | str] = {}
    """Values that override fields of the stage's samples; only fields in the task's `stage_fields`."""

    @field_validator("where")
    @classmethod
    def _conditions(cls, where: dict[str, Any]) -> dict[str, Any]:
        for name, wanted in where.items():
            values = list(wanted.values()) if isinstance(wanted, Mapping) else wanted
            values = values if isinstance(values, list) else [values]
            if isinstance(wanted, Mapping) and (not wanted or {*wanted} - {"min", "max"}
                                                or any(type(v) not in (int, float) for v in values)):
                raise ValueError(f"{name}={wanted!r}: a range needs min or max or both, as numbers")
            if not all(isinstance(v, (str, int, float)) for v in values):
                raise ValueError(f"{name}={wanted!r}: give a string, a number, true or false, a list of these, or "
                                 "a range")
        return where

    def ends(self) -> bool:
        """Whether the stage has an end condition."""
        return any(v is not None for v in (self.steps, self.reward, self.pass_rate))


def read_stages(given: Sequence[Mapping[str, Any]]) -> list[Stage]:
    """Converts `given`, the value of `curriculum.stages`, to Stages. Raises ConfigError for an invalid stage; the
    message names the stage (counted from 1) and the key in its mapping."""
    if not given:
        raise ConfigError("curriculum.stages=[] is empty: give at least one stage")
    stages = []
    for number, entry in enumerate(given, 1):
        try:
            stages.append(Stage.model_validate(dict(entry)))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key, text = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
            if first["type"] == "extra_forbidden":
                text = f"not a key of a stage.{did_you_mean(key, Stage.model_fields)} " \
                       f"Keys of a stage: {', '.join(Stage.model_fields)}."
            raise ConfigError(f"curriculum.stages: stage {number}: {key}={first['input']!r}: {text}") from None
        if number < len(given) and not stages[-1].ends():
            raise ConfigError(f"curriculum.stages: stage {number} never ends: give it steps, reward or pass_rate")
    if stages[-1].ends():
        raise ConfigError(f"curriculum.stages: stage {len(stages)} is the last stage, which never ends: leave out "
                          "its steps, reward and pass_rate, or add a stage")
    if stages[0].carry:
        raise ConfigError(f"curriculum.stages: stage 1: carry={stages[0].carry}: there is no earlier stage to carry "
                          "prompts from. Leave carry out of stage 1")
    return stages


class Staged(Adaptive):
    """Trains in stages. Each stage has its own prompts, drawn in shuffled passes, its own token limit and its own group
    size.

    A stage ends, at the beginning of a step, after `steps` training steps, or when the mean reward (or pass rate) of
    its last `window` groups is at least `reward` (or `pass_rate`). The last stage never ends. The fraction `carry` of a
    stage's draws goes to answered prompts of earlier stages, with weight 1 / max(mean reward, lowest). The running
    means leave out these prompts, and groups that were drawn in an earlier stage.

    Published curricula of this form are in configs/curricula/. Curr-ReFT (2503.07065): yes/no questions, then choices,
    then open answers. Progressive thinking suppression of Vision-R1 (2503.06749): completions of 4K, 8K, 16K tokens in
    groups of 16, 8, 4. QwenLong-L1 (2505.17667): phases of growing context with difficulty-aware retrospective
    sampling. The window is ours.

    stages: mappings with the keys of Stage. window: number of groups, at least 1. lowest: above 0, in the unit of the
    reward. Raises ConfigError for an invalid stage, or a stage without prompts. Functions that use
    rollout.max_new_tokens as the length of the longest completion (algo.shaping=[overlong]) do not know a stage's
    higher limit."""

    def __init__(self, prompts: Prompts, stages: list[dict[str, Any]], window: Positive = 64, lowest: Rate = 0.1):
        super().__init__(prompts)
        self.stages, self.lowest = read_stages(stages), lowest
        _check_fields(self.stages, prompts.stage_fields)
        self.members = [members(prompts, stage, number) for number, stage in enumerate(self.stages, 1)]
        """Indices of the prompts of each stage."""
        self.began = -1
        """The step in which the current stage began; -1 = no step yet."""
        self.last = -1
        """The last step in which prompts were drawn."""
        self.rewards, self.passes = deque[float](maxlen=window), deque[float](maxlen=window)
        """Rewards and pass rates of the last groups of the current stage."""
        self._own: set[tuple[int, int]] = set()
        """(prompt index, Draw.visit) of each draw of the current stage's own prompts whose outcome is not known yet."""
        self._fresh = 0
        """How many of the last draws are the stage's own prompts, as opposed to prompts of earlier stages."""
        self.at, self.pool = 0, self._pool(0)

    @property
    def stage(self) -> Stage:
        """The stage that is trained on now."""
        return self.stages[self.at]

    def _pool(self, at: int) -> CarryPool:
        before = np.zeros(self.prompts.size, dtype=bool)
        for earlier in self.members[:at]:
            before[earlier] = True
        return CarryPool(self.history, self.members[at], (self.prompts.seed, 4, at), before, self.stages[at].carry,
                    self.lowest)

    def _due(self, step: int) -> bool:
        if self.at + 1 == len(self.stages) or self.began < 0 or step == self.last:
            return False
        reached = [wanted is not None and len(recent) == recent.maxlen and float(np.mean(recent)) >= wanted
                   for wanted, recent in ((self.stage.reward, self.rewards), (self.stage.pass_rate, self.passes))]
        return any(reached) or (self.stage.steps is not None and step - self.began >= self.stage.steps)

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        if self._due(step):
            self.at, self.began = self.at + 1, step
            self.pool = self._pool(self.at)
            for of_the_last in (self.rewards, self.passes, self._own):
                of_the_last.clear()
        self.began = step if self.began < 0 else self.began
        self.last = step
        fresh, old = self.pool.take(count, rng)
        self._fresh = len(fresh)
        return np.concatenate([fresh, old])

    def draws(self, indices: np.ndarray | Sequence[int], **more: Any) -> list[Draw]:
        batch = super().draws(indices, **draw_options(self.stage), **more)
        self._own |= {(d.index, d.visit) for d in batch[:self._fresh]}
        return batch

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        super().observe(outcomes, step)
        self._own -= {(o.draw.index, o.draw.visit) for o in outcomes}

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """Returns the draws that `next(count, step)` would return if no result were observed before that call."""
        at = self.at + self._due(step)
        pool = self.pool if at == self.at else self._pool(at)
        indices = pool.peek(count, stream(self.prompts.seed, 3, self.calls + 1))
        return uncounted_draws(self.history, indices, **draw_options(self.stages[at]))

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        self.pool.note(outcomes)
        own = [o for o in outcomes if (o.draw.index, o.draw.visit) in self._own]
        self.rewards.extend(o.reward for o in own)
        self.passes.extend(o.pass_rate for o in own if o.pass_rate == o.pass_rate)

    def state(self) -> dict[str, Any]:
        return {"stage": self.at, "began": self.began, "last": self.last, "drawn": self.pool.cycle.drawn,
                "rewards": list(self.rewards), "passes": list(self.passes), "own": sorted(map(list, self._own))}

    def restore(self, state: dict[str, Any]) -> None:
        self.at, self.began, self.last = (int(state[k]) for k in ("stage", "began", "last"))
        self.pool = self._pool(self.at)
        self.pool.restart(int(state["drawn"]))
        self._own = {(int(index), int(visit)) for index, visit in state["own"]}
        for name in ("rewards", "passes"):
            getattr(self, name).clear()
            getattr(self, name).extend(map(float, state[name]))

    def metrics(self) -> dict[str, float]:
        means = {name: float(np.mean(recent)) for name, recent in (("reward", self.rewards), ("pass_rate", self.passes))
                 if recent}
        return {"curriculum/stage": self.at + 1.0, **{f"curriculum/stage_{k}": v for k, v in means.items()}}


def draw_options(stage: Stage) -> dict[str, Any]:
    """The fields of Draw that a stage sets: group size, token limit and overridden sample fields."""
    return {"group_size": stage.group_size, "max_new_tokens": stage.max_new_tokens,
            "fields": tuple(sorted(stage.fields.items()))}


def _check_fields(stages: Sequence[Stage], known: Collection[str]) -> None:
    for number, stage in enumerate(stages, 1):
        for name in stage.fields:
            if name not in known:
                lists = f"stage_fields of the task: {', '.join(known)}" if known else "The task has no stage_fields"
                raise ConfigError(f"curriculum.stages: stage {number}: fields={stage.fields!r}: stages cannot set the "
                                  f"field {name!r} of this task.{did_you_mean(name, known)} {lists} "
                                  "(docs/write-an-environment.md, \"Temporary help\")")


def members(prompts: Prompts, stage: Stage, number: int) -> np.ndarray:
    """The prompts of a stage, as sorted int32 indices. Raises ConfigError if the stage has no prompts; the message
    names the stage by its `number`."""
    chosen = np.ones(prompts.size, dtype=bool)
    for name, wanted in stage.where.items():
        chosen &= matching(prompts, name, wanted)
    if not chosen.any():
        lacking = [n for n in stage.where if all(v is None for v in prompts.field(n))]
        why = f": no row has the field {lacking[0]!r}" if lacking else ""
        raise ConfigError(f"curriculum.stages: stage {number}: where={stage.where!r} selects none of the "
                          f"{prompts.size} training rows{why}. Change the conditions, or leave this stage out.")
    return np.flatnonzero(chosen).astype(np.int32)


def matching(prompts: Prompts, name: str, wanted: Any) -> np.ndarray:
    """[N] bool: whether each row meets the condition `wanted` on the field `name`: a value, a list of values, or {min,
    max} (see Stage.where). The condition `true` does not match the number 1."""
    if isinstance(wanted, Mapping):
        numbers = prompts.numbers(name).astype(np.float64)
        low, high = wanted.get("min", -np.inf), wanted.get("max", np.inf)
        with np.errstate(over="ignore"):  # float32 limits, like the numbers, so that .7 == .7
            return (numbers >= np.float32(low)) & (numbers <= np.float32(high))
    known = [(isinstance(w, bool), w) for w in (wanted if isinstance(wanted, list) else [wanted])]
    return np.fromiter(((isinstance(v, (bool, np.bool_)), v) in known for v in prompts.field(name)), dtype=bool,
                       count=prompts.size)
