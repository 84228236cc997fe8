"""How the method of a paper extends a training step: `Method`, whose hooks do nothing by default, and `Pass`, an
additional loss.

A method lives in its own folder, `vlrl/methods/<name>`, and is imported when its section of the config is set
(config/sections.py). Code outside of this folder never names a method. At each point below, one line calls the hook of
every active method, in the order of config/sections.py.

    Algorithm(config)      Method(section, settings, algorithm)   options are bound; `requires` is known
    before anything loads  check(task, samples, generates)
    the model is loaded    start(run), if the run samples its own completions; otherwise only share, passes and
                           after_update are called
    each step   generate   the completions of each group                          rollout/generate.py
                scored     scored groups, before the curriculum observes them     rollout/generate.py
                chosen     the groups that are trained on                         rollout/group_source.py
                read       values that advantages need, from the current weights  training/advantages.py
                scores     the inputs of advantages                               training/advantages.py
                credited   metrics of groups with advantages                      training/advantages.py
                draw       additional groups, from files or demonstrations        training/loop.py
                passes     the method's losses, one per optimizer step            training/update.py
                share      the weight of the objective                            training/update.py
                after_update, metrics"""

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
"""Called for each complete request with (index of the request, its completions)."""


class Objectives(Protocol):
    """The attributes of a run's Algorithm that methods use. A protocol, because algorithm.py imports this module and
    not the reverse."""

    @property
    def config(self) -> Config: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class AlgorithmStub:
    """Stands in for an Algorithm that cannot be built, so that the methods of the config can still be checked."""

    config: Config

    @property
    def temperature(self) -> float:
        return self.config.rollout.temperature


@dataclass(frozen=True, eq=False)
class Run:
    """The parts of a run that a method uses. `score` (scores a group) and `services` are the RolloutGenerator's."""

    task: Task
    policy: Policy
    encode: Encoder
    samples: Sequence[Sample]
    engine: Any
    score: Any
    services: Any = None


class RolloutContext(Protocol):
    """The interface of the RolloutGenerator that methods use in one step."""

    engine: Any
    step: int
    task: Task

    @property
    def temperature(self) -> float: ...

    def rescored(self, group: Group, completions: Sequence[Completion]) -> Group:
        """Scores completions with the sample and the prompt of `group`, and returns them as a separate group."""
        ...

    def judged(self, request: Request, completions: Sequence[Completion]) -> list[bool | None]:
        """Returns for each completion of a request whether it is correct; None = unknown."""
        ...


class Pass(Protocol):
    """A loss in addition to the objective in one optimizer step, computed once per epoch over the batch
    (rollout.updates). The loss is a sum over the trained tokens (`part.rollouts[r].mask`) of the rollouts r in each
    micro-batch's `order`. It is divided by `part.total_tokens`, the number of tokens on all processes. The shortest
    example is in methods/distillation."""

    part: Any
    """The Minibatch on which this loss is computed; it may be the Minibatch of the objective. Its micro-batches are
    halved when memory runs out."""
    active: bool
    """Whether any process has data to train on. All processes have the same value."""
    separate_gradient: bool
    """Whether the gradient of this loss is summed over processes separately, so that its norm is known. Otherwise it is
    accumulated together with the gradient of the objective."""

    def begin(self) -> None:
        """Resets what the pass sums up over micro-batches. Called before the first micro-batch, and again after a
        micro-batch has been halved."""
        ...

    def work(self, b: int) -> None:
        """Runs the forward and backward pass (policy.logprobs, policy.backward) of the micro-batch with index `b`."""
        ...

    def end(self, norm: float, others: float) -> None:
        """Called after the last micro-batch. norm: gradient norm of this loss. others: norm of the gradient accumulated
        before this loss. Both are NaN unless `separate_gradient`."""
        ...


class Method:
    """Base class of methods, whose hooks do nothing. Subclasses override the hooks that they need. __init__ only binds
    options, and raises ConfigError for invalid ones. It must not need the model, the engine or the data, because an
    `Algorithm` is also created in dry runs and by code that only runs the update."""

    collective: ClassVar[bool] = False
    """Whether `generate` or `scored` contains collective calls. Then processes without prompts call both too."""
    state_at: ClassVar[str] = ""
    """Where a checkpoint holds the method's state: "source.NAME" or "algorithm.NAME"; "" if it has no state."""

    def __init__(self, section: str, settings: Any, algorithm: Objectives):
        self.section, self.settings, self.algorithm = section, settings, algorithm
        self.config = algorithm.config
        self.requires: frozenset[str] = frozenset()
        """Inputs that the method needs in addition to those of the objective: "reference" = the reference model.
        Log-probabilities and statistics of the logits are computed only for the objective; a Pass computes its own."""

    # --- once ---------------------------------------------------------------------------------------------------------

    def check(self, task: Task, samples: Sequence[Sample], generates: bool) -> None:
        """Raises ConfigError if the method cannot have an effect on this task and these training samples. Also called
        by dry runs. generates: whether the run samples its own completions, unlike supervised fine-tuning."""

    def start(self, run: Run) -> None:
        """Receives the parts of the run once the model is loaded. Only called if the run samples completions."""
        self.run = run

    # --- each step, on every process ----------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], ask: RolloutContext,
                 done: Done | None) -> list[list[Completion]] | None:
        """Returns the completions of each request, generated by the method; None = the engine generates them. At most
        one active method overrides this hook. `ask` samples and scores further completions. `done` (see Done), if
        given, must be called once per request."""

    def scored(self, requests: Sequence[Request], groups: Sequence[Group], ask: RolloutContext) -> Sequence[Group]:
        """Returns the scored groups, extended by the method, before the curriculum sees them. `ask`: see `generate`."""
        return groups

    def chosen(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Returns the groups to train on, after the curriculum has computed all of its statistics."""
        return groups

    def read(self, policy: Policy, groups: Sequence[Group], step: int) -> Sequence[Group]:
        """Returns the groups with additional values, computed with the current weights. Called before advantages are
        computed."""
        return groups

    def scores(self, s: Scores) -> Scores:
        """Returns `s`, the inputs of the advantage, with values that the method adds. Called wherever advantages are
        computed."""
        return s

    def credited(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Returns metrics of this process's groups, whose advantages are already computed. The metrics are reduced over
        all processes later."""
        return {}

    def share(self, step: int) -> float:
        """The factor by which the method multiplies the weight of the objective in a step."""
        return 1.0

    def draw(self, step: int, outcomes: Sequence[Any], flush: Callable[[], None]) -> Sequence[Group]:
        """Returns additional groups of this process for the update. outcomes: the scored results of all prompts drawn
        in the step, over all processes (curriculum.Outcome). flush: waits until the run's rollout files are written."""
        return ()

    def passes(self, policy: Policy, parts: Sequence[Any], drawn: Sequence[Group], step: int) -> Sequence[Pass | None]:
        """Returns the method's loss for each optimizer step of the update; None where no process has data. parts: the
        packed rollouts of each optimizer step (minibatch.Minibatch), which a pass may use. drawn: the groups from
        `draw`."""
        return [None] * len(parts)

    def after_update(self, policy: Policy, passes: Sequence[Pass | None], drawn: Sequence[Group], step: int,
                     stats: Mapping[str, float]) -> Mapping[str, float]:
        """Called after the update with cleared gradients; may take an additional optimizer step. Returns metrics of the
        method's `passes`. stats: the metrics of the objective. drawn: the groups from `draw`."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the rollouts that the method made since the last call, over all processes."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. An empty state is neither written nor loaded."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""

    def overrides(self, hook: str) -> bool:
        """Whether the method's class overrides the hook of this name."""
        return getattr(type(self), hook) is not getattr(Method, hook)


def methods_of(algorithm: Objectives) -> tuple[Method, ...]:
    """The active methods of a config, in the order of config/sections.py. Only active methods are imported."""
    methods = tuple(METHODS[section](section, settings, algorithm) for section, settings in active(algorithm.config))
    writers = [m.section for m in methods if m.overrides("generate")]
    if len(writers) > 1:
        raise ConfigError(f"{writers[0]} and {writers[1]} both determine how groups are generated: remove one of "
                          "the two sections")
    return methods


def methods_by_state_key(methods: Sequence[Method], place: str) -> dict[str, Method]:
    """The methods whose state a checkpoint holds at "<place>.KEY" (Method.state_at), as {KEY: method}."""
    return {m.state_at.removeprefix(f"{place}."): m for m in methods if m.state_at.startswith(f"{place}.")}
