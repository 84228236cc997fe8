"""Named reward parts that can be added to any task: `task.parts`.

    task:
      name: qa
      parts: [cascade, {name: rubric, criteria: [names the colour, gives the count]}]
      rewards: {accuracy: 0, cascade: 1.0, rubric: 0.5}

A part is a function `(task, sample, answers, services, *, options) -> [{part: value}, ...]`, which returns one mapping
per answer:

    @part({"polite": 1.0}, needs=("judge",))        # names of the reward parts -> default weights
    def polite(task, sample, answers, services, *, words: int = 3): ...

vlrl's parts are in judged_parts.py, compared_parts.py and scored_parts.py; a user's part is named path/file.py:name or
module:name, and may also be a plain function of a completion and its row (functions.py). If the run does not have the
service that a part needs, the part is left out, as for the task's own reward parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlrl.algo.named import bind as bind_options
from vlrl.config.base import Named
from vlrl.config.registry import Table, resolve
from vlrl.errors import ConfigError, TaskError
from vlrl.services.functions import RewardFunction
from vlrl.task.base import Task, Weight, usual_outcome
from vlrl.task.combine import weight_at
from vlrl.task.part import ATTRIBUTE, PartSpec
from vlrl.types import Answer, Parts, Sample

PARTS = Table({
    "judge": "vlrl.services.judged_parts:judge",
    "cascade": "vlrl.services.judged_parts:cascade",
    "general_verdict": "vlrl.services.judged_parts:general_verdict",
    "rubric": "vlrl.services.judged_parts:rubric",
    "pairwise": "vlrl.services.compared_parts:pairwise",
    "tournament": "vlrl.services.compared_parts:tournament",
    "principles": "vlrl.services.compared_parts:principles",
    "consistency": "vlrl.services.scored_parts:consistency",
    "likelihood": "vlrl.services.scored_parts:likelihood",
    "reasoned": "vlrl.services.judged_parts:reasoned",
    "reward_model": "vlrl.services.scored_parts:reward_model",
    "process": "vlrl.services.scored_parts:process",
})
"""Name in `task.parts` -> "module:name" of the function."""


@dataclass(frozen=True, eq=False)
class ExtraPart:
    """A function named in `task.parts`, with its options bound. `offer` declares its reward parts."""

    function: Callable[..., Any]
    """Function (task, sample, answers, services) -> [{part: value}]; if `single`, (sample, answer) -> value."""
    offer: PartSpec
    readings: Callable[..., Sequence[Any]]
    """Function (task, sample, answers) that returns the texts whose log-probabilities are needed."""
    alone: bool = False
    """Whether the value of an answer depends on no other answer of its group, so that `Task.score` can return it."""
    unconverted: str = ""
    """The name of a plain function that does not take `to_pixels`; "" for any other function."""
    plain: bool = False
    """Whether the function is a plain reward function, without @part."""


def bind(setting: str, named: Named) -> ExtraPart:
    """Resolves one entry `named` of `task.parts` to its function, with its options bound. Raises ConfigError for an
    unknown name, and an option that is unknown, missing or of the wrong type. `setting` names the entry in
    messages."""
    found = resolve(setting, named.name, PARTS)
    offer = getattr(found, ATTRIBUTE, None)
    if not isinstance(offer, PartSpec):
        own = RewardFunction(setting, named, found)
        return ExtraPart(lambda task, sample, answers, _: own.parts(sample, answers, task.coordinates), own.offer,
                         lambda task, sample, answers: (), alone=not own.together, plain=True,
                         unconverted="" if own.converts else named.name)
    function = bind_options(setting, named, PARTS, skip=4)
    readings = partial(offer.readings, **function.options) if offer.readings else _all_answers
    return ExtraPart(function, offer, readings)


def _all_answers(task: Task, sample: Sample, answers: Sequence[Answer]) -> Sequence[Answer]:
    return answers


def with_extra_parts(cls: type[Task], named: Sequence[Named]) -> type[Task]:
    """Returns a subclass of the task class `cls` that also has the reward parts of `task.parts`. named: the entries of
    `task.parts`; without entries, `cls` itself is returned."""
    extras = [bind(f"task.parts.{i}", one) for i, one in enumerate(named)]
    if not extras:
        return cls
    weights: dict[str, float] = {}
    for extra in extras:
        if twice := sorted(weights.keys() & extra.offer.weights):
            raise ConfigError(f"task.parts: the part '{twice[0]}' is named twice: remove one of the two entries")
        weights |= extra.offer.weights

    class Mixed(cls):
        name = cls.name
        unconverted = tuple(extra.unconverted for extra in extras if extra.unconverted)
        plain_group = cls.score_group is Task.score_group and all(extra.plain for extra in extras)
        added_parts = (*cls.added_parts, *(part for extra in extras if extra.plain for part in extra.offer.weights))

        @classmethod
        def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, Weight]:
            own = super().rewards_for(settings)
            if twice := sorted(own.keys() & weights):
                raise ConfigError(f"task.parts: the part '{twice[0]}' already belongs to this task. Remove this part "
                                  "from task.parts; a reward function needs another name for it (its own name, the "
                                  "key of the dict that it returns, or NAME in --reward NAME=file.py:f)")
            if str(settings.get("combine", "")).startswith("max:"):  # the larger of both counts
                return {**own, **weights}
            return {**own, **weights, **_replaced_weights(own, cls.outcome_for(settings), extras)}

        @classmethod
        def outcome_for(cls, settings: Mapping[str, Any]) -> Mapping[str, float]:
            return super().outcome_for(settings) or usual_outcome(super().rewards_for(settings))

        @property
        def needs(self) -> Collection[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
            return _needs(super().needs, extras)

        def readings(self, service: str, sample: Sample, answers: Sequence[Answer]) -> Sequence[Any]:
            own = super().readings(service, sample, answers) if service in super().needs else ()
            return [*own, *(r for extra in extras if service in extra.offer.needs
                            for r in extra.readings(self, sample, answers))]

        def score(self, sample: Sample, answer: Answer) -> Parts:
            out = dict(super().score(sample, answer))
            for extra in extras:
                if extra.alone:
                    out |= extra.function(self, sample, [answer], None)[0]
            return out

        def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
            own = super().score_group(sample, answers, services)
            out = [dict(parts) for parts in own] if own else [{} for _ in answers]
            for extra in extras:
                if not extra.alone and all(name in services for name in extra.offer.needs):
                    given = extra.function(self, sample, answers, services)
                    if len(given) != len(answers) or len(out) != len(answers):
                        raise TaskError(f"task '{self.name}': for {len(answers)} answers, a part of task.parts "
                                        f"returned {len(given)} values, and score_group returned {len(out)}")
                    out = [{**parts, **more} for parts, more in zip(out, given, strict=True)]
            return out

    if all(extra.alone for extra in extras):
        del Mixed.score_group  # checks of single answers apply to the task
    Mixed.__qualname__ = Mixed.__name__ = cls.__name__
    Mixed.__module__ = cls.__module__
    return Mixed


def _replaced_weights(own: Mapping[str, Weight], outcome: Mapping[str, float],
                  extras: Sequence[ExtraPart]) -> dict[str, Weight]:
    """Returns {part: weight} for the reward parts whose weight changes because some of `extras` replace the task's
    outcome parts; {} if none of them does. The outcome parts get weight 0, and their total weight is divided equally
    among the replacements. A weight schedule is kept if one part replaces one part; otherwise the schedule's initial
    value is used."""
    given = [next(iter(extra.offer.weights)) for extra in extras if extra.offer.replaces_outcome]
    weights = [own[part] for part in outcome if part in own]
    if not given or not any(weight_at(w, 0) for w in weights):
        return {}
    one = weights[0] if len(weights) == len(given) == 1 else sum(weight_at(w, 0) for w in weights) / len(given)
    return {**dict.fromkeys(outcome, 0.0), **dict.fromkeys(given, one)}


def _needs(own: Collection[str], extras: Sequence[ExtraPart]) -> Collection[str]:
    """Returns the services that the task (`own`) and the extra parts need, as {service: reward parts}. If `own` is a
    set of services, returns a set of services."""
    requested: dict[str, list[str]] = {}
    for extra in extras:
        for service in extra.offer.needs:
            requested.setdefault(service, []).extend(extra.offer.weights)
    if own and not isinstance(own, Mapping):
        return frozenset(own) | requested.keys()
    before: Mapping[str, Sequence[str]] = own if isinstance(own, Mapping) else {}
    return {service: (*before.get(service, ()), *requested.get(service, ())) for service in {**before, **requested}}
