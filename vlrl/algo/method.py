"""How a method of a paper extends a step: `Method`, whose hooks all do nothing, and `Pass`, a loss beside the
objective.

A method lives in its own folder, `vlrl/methods/<name>`, and is imported when its section of the config is set
(config/sections.py). The trunk never names it: at each point below one line calls the hook of every active method, in
the order of that table.

    Algorithm(config)      Method(section, settings, algorithm)   options are bound; `requires` is known
    before anything loads  check(task, samples, generates)
    the model is loaded    start(run), where the run samples its own completions; else only share, passes and
                           after_update are called
    each step   generate   the completions of each group                          rollout/generate.py
                scored     scored groups, before the curriculum observes them     rollout/generate.py
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
"""Called as soon as a request is complete: (its index, its completions)."""


class Objectives(Protocol):
    """The Algorithm of a run, as its methods see it (algorithm.py imports this module)."""

    @property
    def config(self) -> Config: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class AlgorithmStub:
    """Stands in for an Algorithm that cannot be built, so that its methods can still be checked."""

    config: Config

    @property
    def temperature(self) -> float:
        return self.config.rollout.temperature


@dataclass(frozen=True, eq=False)
class Run:
    """The parts of a run that a method uses. `score` and `services` are those of the rollout generator."""

    task: Task
    policy: Policy
    encode: Encoder
    samples: Sequence[Sample]
    engine: Any
    score: Any
    services: Any = None


class RolloutContext(Protocol):
    """The rollout generator in one step, as methods see it."""

    engine: Any
    step: int
    task: Task

    @property
    def temperature(self) -> float: ...

    def rescored(self, group: Group, completions: Sequence[Completion]) -> Group:
        """Scores completions as a separate group, under the sample and the prompt of `group`."""
        ...

    def judged(self, request: Request, completions: Sequence[Completion]) -> list[bool | None]:
        """Whether each completion of a request is correct; None = unknown."""
        ...


class Pass(Protocol):
    """A loss beside the objective in one optimizer step, computed once per epoch over the batch (rollout.updates).

    It is a sum over tokens (`part.rollouts[r].mask` for r in `micro.order`) divided by `part.total_tokens`, which
    counts the tokens of all processes. The shortest example is in methods/distillation."""

    part: Any
    """A Minibatch, whose micro-batches are halved when memory runs out; it may be the objective's."""
    active: bool
    """Whether any process has something to learn from; equal on all processes."""
    apart: bool
    """Whether its gradient is summed over processes separately, so that its norm is known; else it is accumulated
    together with that of the objective."""

    def begin(self) -> None:
        """Called before the first micro-batch, and again after one was halved: resets all sums."""
        ...

    def work(self, b: int) -> None:
        """Forward and backward (policy.logprobs, policy.backward) of micro-batch `b`."""
        ...

    def end(self, norm: float, others: float) -> None:
        """Called after the last micro-batch, with the norms of its own gradient and of the accumulated one; NaN if not
        `apart`."""
        ...


class Method:
    """A method that does nothing; subclasses override the hooks that they need.

    __init__ binds options and raises ConfigError. No part of a run exists yet: dry runs and a bare `update` also create
    an `Algorithm`."""

    collective: ClassVar[bool] = False
    """Whether `generate` or `scored` contains collectives, which processes without prompts must join."""
    state_at: ClassVar[str] = ""
    """Key of its state in checkpoints, "source.NAME" or "algorithm.NAME"; empty = stateless."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        self.section, self.settings, self.algorithm = section, settings, algorithm
        self.config = algorithm.config
        self.requires: frozenset[str] = frozenset()
        """Beyond the objective's needs: "reference" = the reference model. Log-probabilities and statistics of the
        logits are computed for the objective alone; a Pass computes its own."""

    # --- once ---------------------------------------------------------------------------------------------------------

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        """Raises ConfigError where the method can have no effect on this task and these training samples; also called
        by dry runs. `generates`: the run samples its own completions, unlike supervised fine-tuning."""

    def start(self, run: Run) -> None:
        """Receives the parts of a run that samples its own completions."""
        self.run = run

    # --- each step, on every process ----------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], ask: RolloutContext,
                 done: Done | None) -> list[list[Completion]] | None:
        """The completions of each group, in place of the engine's; None = the engine generates. At most one active
        method overrides it."""

    def scored(self, requests: Sequence[Request], groups: Sequence[Group], ask: RolloutContext) -> Sequence[Group]:
        """Scored groups, extended by the method, before the curriculum observes them."""
        return groups

    def chosen(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups as they are trained on, after all statistics of the curriculum."""
        return groups

    def read(self, policy: Policy, groups: Sequence[Group], step: int) -> Sequence[Group]:
        """The groups with values computed at the current weights, before their advantages."""
        return groups

    def scores(self, s: Scores) -> Scores:
        """The inputs of the advantage, extended by the method; on every process that computes advantages."""
        return s

    def credited(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Metrics of this process's groups with advantages, reduced over all processes."""
        return {}

    def share(self, step: int) -> float:
        """The weight of the objective in a step."""
        return 1.0

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        """This process's additional groups for the update. `outcomes` are those of the step's draws
        (curriculum.Outcome), over all processes; `flush` waits until the rollout files of the run are written."""
        return ()

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group],
               step: int) -> Sequence[Pass | None]:
        """Its loss in each optimizer step of the update, None where no process has data. `parts` are the packed
        rollouts of each optimizer step (minibatch.Minibatch), which a pass may use too; `drawn` is the result of
        `draw`."""
        return [None] * len(parts)

    def after_update(self, policy: Policy, passes: Sequence[Pass | None], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        """Metrics of its passes; may take an optimizer step of its own. Gradients are cleared, and `stats` are the
        metrics of the objective."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Metrics of its rollouts since the last call, over all processes."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; an empty one is neither written nor loaded."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""

    def overrides(self, hook: str) -> bool:
        """Whether the subclass overrides a hook."""
        return getattr(type(self), hook) is not getattr(Method, hook)


def methods_of(algorithm: Objectives) -> tuple[Method, ...]:
    """The active methods of a config, in the order of config/sections.py; no others are imported."""
    methods = tuple(METHODS[section](section, settings, algorithm) for section, settings in active(algorithm.config))
    writers = [m.section for m in methods if m.overrides("generate")]
    if len(writers) > 1:
        raise ConfigError(f"{writers[0]} and {writers[1]} both determine how groups are generated: remove one of them")
    return methods


def methods_by_state_key(methods: Sequence[Method], place: str) -> dict[str, Method]:
    """The methods whose state is at `place.KEY` of a checkpoint, by KEY."""
    return {m.state_at.removeprefix(f"{place}."): m for m in methods if m.state_at.startswith(f"{place}.")}
