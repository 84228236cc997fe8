"""What a method of a paper may do to a step: `Method`, whose hooks all do nothing, and `Pass`, a loss beside the
objective.

A method lives in a folder of its own, `vlrl/methods/<name>`, and is imported when its section of the config asks for it
(config/sections.py). The trunk never names it: at each place below one line calls the hook of every active method, in
the order of that table.

    Algorithm(config)      Method(section, settings, algorithm)   options are bound; `requires` is known
    before anything loads  check(task, samples, generates)
    the model is there     start(run), where the run draws its own answers; else only share, passes and after_update
                           are called
    each step   generate   the completions of each group                          rollout/generate.py
                scored     whole groups, before the curriculum observes them      rollout/generate.py
                chosen     the groups that are trained on                         rollout/group_source.py
                read, scores, credited: before, for and after advantages          training/advantages.py
                draw       groups of its own, from files or demonstrations        training/loop.py
                passes     its losses, one for each optimizer step                training/update.py
                share      the weight of the objective                            training/update.py
                after_update, metrics
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from vlrl.algo.inputs import Scores
from vlrl.config.schema import Config
from vlrl.config.sections import METHODS, active
from vlrl.engine.base import Request
from vlrl.errors import ConfigError
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.task import Task
from vlrl.types import Completion, Group, Sample

Done = Callable[[int, list[Completion]], None]
"""Called as soon as a request is answered: (its place, its completions)."""


class Objectives(Protocol):
    """The Algorithm of a run, which makes its methods; algorithm.py imports this module."""

    @property
    def config(self) -> Config: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class AlgorithmStub:
    """In place of the Algorithm, for checks of methods beside one that cannot be made."""

    config: Config

    @property
    def temperature(self) -> float:
        return self.config.rollout.temperature


@dataclass(frozen=True, eq=False)
class Run:
    """The parts of a run that a method works with. `score` and `services` are those of the rollout generator."""

    task: Task
    policy: Policy
    encode: Encoder
    samples: Sequence[Sample]
    engine: Any
    score: Any
    services: Any = None


class RolloutContext(Protocol):
    """The rollout generator as a method sees it in one step."""

    engine: Any
    step: int
    task: Task

    @property
    def temperature(self) -> float: ...

    def rescored(self, group: Group, completions: Sequence[Completion]) -> Group:
        """Scores completions as a group of their own, under the sample and the prompt of `group`."""
        ...

    def judged(self, request: Request, completions: Sequence[Completion]) -> list[bool | None]:
        """Which completions of a request are correct; None where that cannot be known."""
        ...


class Pass(Protocol):
    """A loss beside the objective in one optimizer step. It is run once per epoch of the batch (rollout.updates).

    A loss is a sum over tokens (`part.rollouts[r].mask` for r in `micro.order`) divided by `part.total_tokens`, which
    counts those of all processes. The shortest one is that of methods/distillation.
    """

    part: Any
    """A Minibatch, whose micro-batches are halved where memory does not suffice; it may be that of the objective."""
    active: bool
    """Whether there is anything to learn from, on any process; known to be the same on all."""
    apart: bool
    """Its gradient is summed over processes by itself, so that its norm is known; else it is added to that of the
    objective."""

    def begin(self) -> None:
        """Before the first micro-batch, and again after one was halved: sums start from zero."""
        ...

    def work(self, b: int) -> None:
        """Forward and backward (policy.logprobs, policy.backward) of micro-batch `b`."""
        ...

    def end(self, norm: float, others: float) -> None:
        """After the last micro-batch, with the norms of its own gradient and of what was there; NaN if not `apart`."""
        ...


class Method:
    """A method that does nothing. Subclasses override the hooks that they need.

    __init__ binds options and raises ConfigError. No part of a run exists yet: dry runs and a bare `update` make an
    `Algorithm`, too.
    """

    collective: ClassVar[bool] = False
    """Whether `generate` or `scored` computes on every process, those without prompts included."""
    state_at: ClassVar[str] = ""
    """The place of its state in checkpoints, "source.NAME" or "algorithm.NAME"; empty = it has none."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        self.section, self.settings, self.algorithm = section, settings, algorithm
        self.config = algorithm.config
        self.requires: frozenset[str] = frozenset()
        """What the run must keep for it: "reference" = the reference model. Log-probabilities and statistics of the
        logits are computed for the objective alone; a Pass computes its own."""

    # --- once ---------------------------------------------------------------------------------------------------------

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        """Raises ConfigError where it could never act on this task and these training samples; dry runs call it.
        `generates`: the run draws its own answers; supervised fine-tuning does not."""

    def start(self, run: Run) -> None:
        """Takes the parts of a run that draws its own answers."""
        self.run = run

    # --- each step, on every process ----------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], ask: RolloutContext,
                 done: Done | None) -> list[list[Completion]] | None:
        """Returns the completions of each group in place of the engine's; None = the engine answers. One active method
        at most overrides it."""

    def scored(self, requests: Sequence[Request], groups: Sequence[Group], ask: RolloutContext) -> Sequence[Group]:
        """Returns scored groups with what it adds to them; the curriculum observes them next."""
        return groups

    def chosen(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Returns the groups as they are trained on, once all statistics of the curriculum are taken."""
        return groups

    def read(self, policy: Policy, groups: Sequence[Group], step: int) -> Sequence[Group]:
        """Returns the groups with what it reads of them before their advantages, at the weights of now."""
        return groups

    def scores(self, s: Scores) -> Scores:
        """Returns what the advantage looks at with what it adds; on every process that computes advantages."""
        return s

    def credited(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Looks at this process's groups with their advantages; returns metrics of them, over all processes."""
        return {}

    def share(self, step: int) -> float:
        """Returns the weight of the objective in a step."""
        return 1.0

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        """Returns this process's groups of its own for the update. `outcomes` are those of the step's draws
        (curriculum.Outcome), over all processes; `flush` waits for the rollout files of the run."""
        return ()

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group],
               step: int) -> Sequence[Pass | None]:
        """Returns its loss in each optimizer step of the update. `parts` are the packed rollouts of each
        (minibatch.Minibatch), which a pass may go over too; `drawn` what `draw` returned. None where no process has
        anything."""
        return [None] * len(parts)

    def after_update(self, policy: Policy, passes: Sequence[Pass | None], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        """Returns the metrics of its passes; may take an optimizer step of its own. No gradient is left, and `stats`
        are the metrics of the objective."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics of its rollouts since the last call, over all processes."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs; an empty one is not written, and nothing is loaded then."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` returned."""

    def overrides(self, hook: str) -> bool:
        """Whether the subclass has this hook."""
        return getattr(type(self), hook) is not getattr(Method, hook)


def methods_of(algorithm: Objectives) -> tuple[Method, ...]:
    """Returns the methods that a config asks for, in the order of config/sections.py; imports no other."""
    methods = tuple(METHODS[section](section, settings, algorithm) for section, settings in active(algorithm.config))
    writers = [m.section for m in methods if m.overrides("generate")]
    if len(writers) > 1:
        raise ConfigError(f"{writers[0]} and {writers[1]} both say how a group is written: leave one of them out")
    return methods


def methods_by_state_key(methods: Sequence[Method], place: str) -> dict[str, Method]:
    """Returns the methods with a state below `place` of a checkpoint, by their key there."""
    return {m.state_at.removeprefix(f"{place}."): m for m in methods if m.state_at.startswith(f"{place}.")}
