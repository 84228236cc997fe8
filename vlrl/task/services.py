"""What the loop hands to `Task.score_group` beside the answers: answers of variants, and services by name. No torch.

    def score_group(self, sample, answers, services):
        shuffled = services.variants.get("shuffled", ())        # answers that were drawn with other media
            sure = services.reference_logprobs(answers)             # a service; the task names it in `needs`

A service that is not there raises AbsentService; `"judge" in services` asks first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlrl.config.registry import Table
from vlrl.errors import TaskError
from vlrl.types import Answer, Media, Sample

if TYPE_CHECKING:
    from vlrl.rewards.verdicts import Fields
    from vlrl.task.base import Task


@dataclass(frozen=True, eq=False)
class Reading:
    """What a policy is to find likely: a text in place of what an answer finally says."""

    answer: Answer | None
    """None = none: the text stands right behind the prompt, in a tag of its own, without any reasoning."""
    text: str


Key = tuple[int | None, str | None]
"""Number of an answer in its group, and the text in place of its own; see Reading."""
GroupLogprobs = Mapping[str, Mapping[Key, np.ndarray]]
"""Log-probabilities [t] of what was read for a group, by service."""


class Logprobs(Protocol):
    """`services.policy_logprobs` and `services.reference_logprobs`: how likely the policy that is trained, or its
    reference (algo.reference), finds what answers say."""

    def __call__(self, readings: Sequence[Answer | Reading]) -> list[np.ndarray]:
        """Returns [t] log-probabilities at temperature 1 of the tokens of each answer's last <answer> content, or of
        the text in its place; empty where there is none. Takes what `Task.readings` gave for the group, in any order
        and number: without an own one these are its answers.
        """
        ...


LOGPROBS = ("policy_logprobs", "reference_logprobs")
"""The services that are read in a pass over all groups before these are scored."""


@dataclass(frozen=True)
class ServiceContext:
    """For what something is asked."""

    split: str = ""
    step: int = 0
    policy_step: int = 0
    """Completed steps of the weights that wrote what is judged."""


@dataclass(frozen=True, eq=False)
class Question:
    """What a judge is asked, beside a plain text: with pictures, or for a reply in JSON.

    Example: `Question("Is it a cat?", sample.media, {"verdict": ("yes", "no")})`.
    """

    text: str
    media: Sequence[Media] = ()
    """Shown before the text; a video as its frames."""
    fields: Fields | None = None
    """What the reply must say (rewards/verdicts.py); one that does not is asked for again."""


class Judge(Protocol):
    """`services.judge`: a model that answers questions about answers."""

    def __call__(self, questions: Sequence[str | Question]) -> list[str | None]:
        """Returns the text it gives to each question; None where there is none, or none that says what `fields` asks
        for. What rests on None is unscorable, and neither right nor wrong.
        """
        ...


class Clip(Protocol):
    """`services.clip`: how well pictures and texts fit."""

    def __call__(self, images: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        """Returns [images, texts] cosines; images are PIL images."""
        ...


class RewardModel(Protocol):
    """`services.reward_model`: how good a model that was trained for it finds answers."""

    def __call__(self, question: str, media: Sequence[Media], answers: Sequence[str]) -> list[tuple[float, ...] | None]:
        """Returns of each answer the scores of all models (services.reward_model.name), on whatever scale they have;
        None where one of them has none, and what rests on it is unscorable.
        """
        ...


SERVICES: Mapping[str, type] = {**dict.fromkeys(LOGPROBS, Logprobs), "judge": Judge, "clip": Clip,
                                "reward_model": RewardModel}
"""Every service that a task may need, by name."""


FAILED = "service: "
"""How the error of a rollout begins that a service did not answer."""
_ABSENT = Table({"without": "vlrl.services.missing:without_unserved_parts",
                 "served": "vlrl.services.missing:served_task"})
"""What makes do without services that a task needs and a run does not have."""


class AbsentService(TaskError, AttributeError):
    """A service was asked for that is not there."""


@dataclass(frozen=True, eq=False)
class Services:
    """What `score_group` is given. Attributes besides `variants` are services of SERVICES."""

    variants: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    """Answers drawn with other media, by the name of their Variant; a missing name = none were made."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The services that are there, by name."""

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def __getattr__(self, name: str) -> Any:
        given = object.__getattribute__(self, "__dict__").get("given", {})
        if name in given:
            return given[name]
        raise AbsentService(f"the service '{name}' is not there; ask with `\"{name}\" in services`, and name it in "
                            "the task's `needs`")


def reading_key(reading: Answer | Reading, group: Sequence[Answer]) -> Key:
    """Returns what is to be read. Raises TaskError where it is of no answer of the group."""
    answer, text = (reading.answer, reading.text) if isinstance(reading, Reading) else (reading, None)
    places = [i for i, one in enumerate(group) if one is answer]
    if answer is not None and not places:
        raise TaskError("services of log-probabilities take answers that readings or score_group were given, none of a "
                        "variant aside and no copies")
    return (places[0] if places else None), text


def precomputed_logprobs(name: str, group: Sequence[Answer], values: Mapping[Key, np.ndarray]) -> Logprobs:
    """Returns a service of log-probabilities, as computed for the answers of a group before it is scored."""

    def logprobs(readings: Sequence[Answer | Reading]) -> list[np.ndarray]:
        keys = [reading_key(one, group) for one in readings]
        if unread := next((key for key in keys if key not in values), None):
            what = "an answer" if unread[1] is None else f"the text {unread[1]!a:.80} in place of an answer's own"
            raise TaskError(f"services.{name} was asked for {what}, which Task.readings did not give: let it return "
                            "all that score_group asks for")
        return [values[key] for key in keys]

    return logprobs


class GroupServices(Protocol):
    """The services of `services.*` as one group has them."""

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Held while a task's code runs, and not while it waits for a server: groups wait side by side."""
        ...

    @property
    def services(self) -> Mapping[str, Callable[..., Any]]: ...

    @property
    def problem(self) -> str | None:
        """Why what rests on a service has no value, as the `error` of a rollout; None where all replied."""
        ...


class RunServices(Protocol):
    """The services of `services.*` that a run has and its task needs, on one process (vlrl/services/service_set.py)."""

    @property
    def threads(self) -> int:
        """Groups that are scored side by side."""
        ...

    def at(self, place: ServiceContext) -> GroupServices: ...

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Returns what was asked for a split up to a step, over all processes, and forgets it."""
        ...

    def close(self) -> None: ...


def without_absent_parts(task: Task, sample: Sample, answers: Sequence[Answer],
                         services: Services) -> tuple[Task, list[str]]:
    """Returns the task less the parts that it cannot give without the services it `needs`, and their names.

    A task that needs nothing, or nothing that is absent, stays as it is; of a mixture it is the sample's.
    """
    task = task.of(sample)
    served = all(name in services for name in task.needs)
    return (task, []) if served else _ABSENT["without"](task, sample, answers, services)


def served(task: Task, available: Collection[str], samples: Sequence[Sample]) -> Task:
    """Returns the task, or each of a mixture, less the parts that weigh nothing and need a service that is not
    `available`. Raises ConfigError for such a part that has a weight.
    """
    lacking = any(set(one.needs) - set(available) for one in task.members)
    return _ABSENT["served"](task, available, samples) if lacking else task


def parts_needing(task: Task, service: str) -> Collection[str] | None:
    """Returns the parts that need a service; None where the task does not say which."""
    if service not in task.needs:
        return ()
    return task.needs[service] if isinstance(task.needs, Mapping) else None
