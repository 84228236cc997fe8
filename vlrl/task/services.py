"""The services that `Task.score_group` can use, and the answers to variants. Imports no torch.

    def score_group(self, sample, answers, services):
        shuffled = services.variants.get("shuffled", ())        # answers to a variant with other media
        sure = services.reference_logprobs(answers)             # a service; the task names it in `needs`

A service that is not available raises AbsentService; check with `"judge" in services` first."""

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
    """A text whose likelihood is computed in place of the final answer of a completion."""

    answer: Answer | None
    """The answer whose prompt and reasoning precede the text. None: the text follows the prompt directly, in an answer
    tag and without any reasoning."""
    text: str


Key = tuple[int | None, str | None]
"""Identifies a Reading or an Answer whose log-probabilities are computed: (index of its answer in the group, text that
replaces the final text of this answer). The index is None for a Reading without an answer. The text is None for an
Answer."""
GroupLogprobs = Mapping[str, Mapping[Key, np.ndarray]]
"""Name of a service -> Key -> log-probabilities [t]."""


class Logprobs(Protocol):
    """`services.policy_logprobs` and `services.reference_logprobs`: token log-probabilities of answers under the policy
    being trained or under the reference model (algo.reference)."""

    def __call__(self, readings: Sequence[Answer | Reading]) -> list[np.ndarray]:
        """For each item of `readings`, the log-probabilities [t] at temperature 1 of the tokens in the last <answer>
        tag: for an Answer, of the answer's own tokens there; for a Reading, of the tokens of its text, which
        replaces the content of the tag. An array is empty if there are no tokens. The items may be any of those that
        `Task.readings` returned for the group (by default, its answers), in any order and number."""
        ...


LOGPROBS = ("policy_logprobs", "reference_logprobs")
"""Names of the services that compute log-probabilities; they do so in one pass over all groups before scoring."""


@dataclass(frozen=True)
class ServiceContext:
    """The split and the step to which a request to a service belongs."""

    split: str = ""
    step: int = 0
    policy_step: int = 0
    """Number of completed training steps of the policy that wrote the judged text."""


@dataclass(frozen=True, eq=False)
class Question:
    """A question to a judge that has images or asks for a reply in JSON; other questions are plain strings.

    Example: `Question("Is it a cat?", sample.media, {"verdict": ("yes", "no")})`."""

    text: str
    media: Sequence[Media] = ()
    """Images and videos that are shown before the text; a video is shown as its frames."""
    fields: Fields | None = None
    """Fields that the JSON reply must have (rewards/verdicts.py). If one is missing, the question is asked again."""


class Judge(Protocol):
    """`services.judge`: an LLM that answers questions about the model's answers."""

    def __call__(self, questions: Sequence[str | Question]) -> list[str | None]:
        """The reply to each question; None if there is no reply, or no reply with the required `fields`. Treat None as
        unknown: a reward part that depends on it must be None, which makes the answer unscorable."""
        ...


class Clip(Protocol):
    """`services.clip`: similarity of images and texts, computed by a CLIP model."""

    def __call__(self, images: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
        """[images, texts] Cosine similarities of PIL images and texts."""
        ...


class RewardModel(Protocol):
    """`services.reward_model`: scores of answers from one or more trained reward models."""

    def __call__(self, question: str, media: Sequence[Media], answers: Sequence[str]) -> list[tuple[float, ...] | None]:
        """For each answer, a tuple with the score of every model in services.reward_model.name. Each model has its own
        scale. None for an answer if a model returned no score; reward parts that depend on the scores are then
        unscorable."""
        ...


SERVICES: Mapping[str, type] = {**dict.fromkeys(LOGPROBS, Logprobs), "judge": Judge, "clip": Clip,
                                "reward_model": RewardModel}
"""Name of a service -> the Protocol class of this service, for every service that a task may need."""


FAILED = "service: "
"""Prefix of the error of a rollout that could not be scored because a service did not reply."""
_ABSENT = Table({"without": "vlrl.services.missing:without_unserved_parts",
                 "served": "vlrl.services.missing:served_task"})
"""Functions that remove reward parts whose service is not available. Imported only if a service is not available."""


class AbsentService(TaskError, AttributeError):
    """Raised when a task uses a service that is not available."""


@dataclass(frozen=True, eq=False)
class Services:
    """The `services` argument of `score_group`. Its attributes are `variants` and the services in SERVICES."""

    variants: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    """Name of a variant -> the answers to it. A name is missing if there are no answers to this variant."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Name -> service, for the available services."""

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def __getattr__(self, name: str) -> Any:
        given = object.__getattribute__(self, "__dict__").get("given", {})
        if name in given:
            return given[name]
        raise AbsentService(f"the service '{name}' is not available; check for it with `\"{name}\" in services`, and "
                            "add it to the task's `needs`")


def reading_key(reading: Answer | Reading, group: Sequence[Answer]) -> Key:
    """Returns the Key of `reading`. Raises TaskError if its answer is not in `group`."""
    answer, text = (reading.answer, reading.text) if isinstance(reading, Reading) else (reading, None)
    places = [i for i, one in enumerate(group) if one is answer]
    if answer is not None and not places:
        raise TaskError("a log-probability service was given an answer that is not in the group. Pass it the answer "
                        "objects that readings() or score_group() received, and no copies of them")
    return (places[0] if places else None), text


def precomputed_logprobs(name: str, group: Sequence[Answer], values: Mapping[Key, np.ndarray]) -> Logprobs:
    """Returns the log-probability service `name` for the answers `group`. When called, the service looks up
    log-probabilities in `values`, which were computed before scoring."""

    def logprobs(readings: Sequence[Answer | Reading]) -> list[np.ndarray]:
        keys = [reading_key(one, group) for one in readings]
        if unread := next((key for key in keys if key not in values), None):
            what = "an answer" if unread[1] is None else f"the text {unread[1]!a:.80} in place of the text of an answer"
            raise TaskError(f"services.{name} was asked for {what}, which Task.readings did not return: "
                            "Task.readings must return everything that score_group passes to the service")
        return [values[key] for key in keys]

    return logprobs


class GroupServices(Protocol):
    """The services (settings `services.*`) for scoring one group."""

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """A lock that is held while task code runs, and released while the task code waits for a server. So several
        groups can wait at the same time."""
        ...

    @property
    def services(self) -> Mapping[str, Callable[..., Any]]: ...

    @property
    def problem(self) -> str | None:
        """The reason why reward parts that depend on a service have no value, for the `error` of a rollout. None if all
        services replied."""
        ...


class RunServices(Protocol):
    """The services (settings `services.*`) that the run has and the task needs. Each process of the run has its own
    instance. See vlrl/services/service_set.py."""

    @property
    def threads(self) -> int:
        """Number of groups that are scored at the same time."""
        ...

    def at(self, context: ServiceContext) -> GroupServices: ...

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Statistics of the requests that were made for a split since the last call, up to step `step`, summed over all
        processes. With `times`, the durations of the requests are included."""
        ...

    def close(self) -> None: ...


def without_absent_parts(task: Task, sample: Sample, answers: Sequence[Answer],
                         services: Services) -> tuple[Task, list[str]]:
    """Returns two values: the task that scores a sample, without the reward parts that need an unavailable service; and
    the names of the removed parts.

    If all services are available, the task is `task.of(sample)`, unchanged."""
    task = task.of(sample)
    served = all(name in services for name in task.needs)
    return (task, []) if served else _ABSENT["without"](task, sample, answers, services)


def drop_unserved_parts(task: Task, available: Collection[str], samples: Sequence[Sample]) -> Task:
    """Returns the task (or mixture) without the reward parts that need a service not in `available`. Only parts of
    weight 0 can be removed: raises ConfigError if one of these parts has another weight."""
    lacking = any(set(one.needs) - set(available) for one in task.members)
    return _ABSENT["served"](task, available, samples) if lacking else task


def parts_needing(task: Task, service: str) -> Collection[str] | None:
    """The names of the reward parts that need a service; () if the task does not need the service; None if the task
    needs the service without saying for which parts."""
    if service not in task.needs:
        return ()
    return task.needs[service] if isinstance(task.needs, Mapping) else None
