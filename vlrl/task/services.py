"""What `Task.score_group` gets beside the answers: answers of variants, and services by name. No torch.

    def score_group(self, sample, answers, services):
        shuffled = services.variants.get("shuffled", ())        # answers that were drawn with other media
        sure = services.reference_logprobs(answers)             # a service; the task names it in `needs`

A service that is not available raises AbsentService; `"judge" in services` asks first."""

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
    """A text whose likelihood is evaluated in place of the final answer of a completion."""

    answer: Answer | None
    """None: the text directly follows the prompt, in its own tag, without any reasoning."""
    text: str


Key = tuple[int | None, str | None]
"""Index of an answer in its group, and the text in place of its own; see Reading."""
GroupLogprobs = Mapping[str, Mapping[Key, np.ndarray]]
"""Log-probabilities [t] of the readings of a group, by service."""


class Logprobs(Protocol):
    """`services.policy_logprobs` and `services.reference_logprobs`: the likelihood of answers under the trained policy
    or its reference (algo.reference)."""

    def __call__(self, readings: Sequence[Answer | Reading]) -> list[np.ndarray]:
        """[t] log-probabilities at temperature 1 of the tokens of each answer's last <answer> content, or of the text
        in its place; empty if there is none. Takes any of the readings that `Task.readings` gave for the group, by
        default its answers, in any order and number."""
        ...


LOGPROBS = ("policy_logprobs", "reference_logprobs")
"""The services that are evaluated in one pass over all groups before scoring."""


@dataclass(frozen=True)
class ServiceContext:
    """The split and step that a request to a service belongs to."""

    split: str = ""
    step: int = 0
    policy_step: int = 0
    """Completed steps of the weights that wrote the judged text."""


@dataclass(frozen=True, eq=False)
class Question:
    """A question to a judge with more than plain text: with images, or for a reply in JSON.

    Example: `Question("Is it a cat?", sample.media, {"verdict": ("yes", "no")})`."""

    text: str
    media: Sequence[Media] = ()
    """Shown before the text; a video as its frames."""
    fields: Fields | None = None
    """Fields that the reply must have (rewards/verdicts.py); otherwise it is asked again."""


class Judge(Protocol):
    """`services.judge`: a model that answers questions about answers."""

    def __call__(self, questions: Sequence[str | Question]) -> list[str | None]:
        """The reply to each question; None without a reply, or without one that has the `fields`. Parts that depend on
        None are unscorable, and neither right nor wrong."""
        ...


class Clip(Protocol):
    """`services.clip`: how well images and texts match."""

    def __call__(self, images: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        """[images, texts] cosines of PIL images with texts."""
        ...


class RewardModel(Protocol):
    """`services.reward_model`: scores of answers by a model trained for it."""

    def __call__(self, question: str, media: Sequence[Media], answers: Sequence[str]) -> list[tuple[float, ...] | None]:
        """For each answer the scores of all models (services.reward_model.name), on their own scales; None if one of
        them has no score, so that parts that depend on it are unscorable."""
        ...


SERVICES: Mapping[str, type] = {**dict.fromkeys(LOGPROBS, Logprobs), "judge": Judge, "clip": Clip,
                                "reward_model": RewardModel}
"""Every service that a task may need, by name."""


FAILED = "service: "
"""How the error of a rollout starts if a service did not answer."""
_ABSENT = Table({"without": "vlrl.services.missing:without_unserved_parts",
                 "served": "vlrl.services.missing:served_task"})
"""Handling of services that a task needs and a run does not have."""


class AbsentService(TaskError, AttributeError):
    """A requested service is not available."""


@dataclass(frozen=True, eq=False)
class Services:
    """The argument of `score_group`. Attributes besides `variants` are services of SERVICES."""

    variants: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    """Answers drawn with other media, by the name of their Variant; a missing name = none were made."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The available services, by name."""

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def __getattr__(self, name: str) -> Any:
        given = object.__getattribute__(self, "__dict__").get("given", {})
        if name in given:
            return given[name]
        raise AbsentService(f"the service '{name}' is not available; check with `\"{name}\" in services`, and name it "
                            "in the task's `needs`")


def reading_key(reading: Answer | Reading, group: Sequence[Answer]) -> Key:
    """The key of a reading. Raises TaskError if its answer is not in the group."""
    answer, text = (reading.answer, reading.text) if isinstance(reading, Reading) else (reading, None)
    places = [i for i, one in enumerate(group) if one is answer]
    if answer is not None and not places:
        raise TaskError("services of log-probabilities take answers that readings or score_group were given, none of a "
                        "variant aside and no copies")
    return (places[0] if places else None), text


def precomputed_logprobs(name: str, group: Sequence[Answer], values: Mapping[Key, np.ndarray]) -> Logprobs:
    """A service of log-probabilities that returns values computed for a group before it is scored."""

    def logprobs(readings: Sequence[Answer | Reading]) -> list[np.ndarray]:
        keys = [reading_key(one, group) for one in readings]
        if unread := next((key for key in keys if key not in values), None):
            what = "an answer" if unread[1] is None else f"the text {unread[1]!a:.80} in place of an answer's own"
            raise TaskError(f"services.{name} was asked for {what}, which Task.readings did not give: let it return "
                            "all that score_group asks for")
        return [values[key] for key in keys]

    return logprobs


class GroupServices(Protocol):
    """The services of `services.*` for one group."""

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Held while task code runs, and released while it waits for a server, so that groups wait concurrently."""
        ...

    @property
    def services(self) -> Mapping[str, Callable[..., Any]]: ...

    @property
    def problem(self) -> str | None:
        """Why parts that depend on a service have no value, as the `error` of a rollout; None if all replied."""
        ...


class RunServices(Protocol):
    """The services of `services.*` that a run has and its task needs, in one process (vlrl/services/provided.py)."""

    @property
    def threads(self) -> int:
        """Number of groups scored concurrently."""
        ...

    def at(self, place: ServiceContext) -> GroupServices: ...

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Statistics of the requests of a split up to a step, over all processes; resets them."""
        ...

    def close(self) -> None: ...


def without_absent_parts(task: Task, sample: Sample, answers: Sequence[Answer],
                         services: Services) -> tuple[Task, list[str]]:
    """The task without the parts whose services in `needs` are absent, and the names of those parts.

    A task that needs nothing absent is returned unchanged; of a mixture it is the sample's."""
    task = task.of(sample)
    served = all(name in services for name in task.needs)
    return (task, []) if served else _ABSENT["without"](task, sample, answers, services)


def drop_unserved_parts(task: Task, available: Collection[str], samples: Sequence[Sample]) -> Task:
    """The task, or each of a mixture, without the parts of weight 0 that need a service not in `available`. Raises
    ConfigError for such a part with a weight."""
    lacking = any(set(one.needs) - set(available) for one in task.members)
    return _ABSENT["served"](task, available, samples) if lacking else task


def parts_needing(task: Task, service: str) -> Collection[str] | None:
    """The parts that need a service; None if the task does not say which."""
    if service not in task.needs:
        return ()
    return task.needs[service] if isinstance(task.needs, Mapping) else None
