"""Previews of samples as the model sees them, for `--dry-run` and `vlrl data check`. This module imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlrl.config.schema import LimitsSettings
from vlrl.data import media
from vlrl.data.coordinates import Coordinates
from vlrl.errors import TaskError
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, task_messages, task_oracle, task_target
from vlrl.task.scoring import AnswerScore, score_group
from vlrl.types import Parts, Sample

_QUESTION_FIELDS = ("question", "expression", "instruction")
"""Canonical fields that may hold the question. The first of them that a row has is shown."""
_TARGET_FIELDS = ("answer", "boxes", "box", "action", "label", "plan", "spans", "tracks", "labels")
"""Canonical fields that may hold the ground truth. The first of them that a row has is shown."""
_ROUNDING = 1e-6
UNKNOWN = "auto: the model family's, not known without the model"
"""Name that is displayed for the coordinate convention if the model's family is not known."""


@dataclass(frozen=True, kw_only=True)
class MediaFacts:
    """Properties of one image or video of a sample. Sizes are (width, height) in pixels."""

    kind: str
    original: tuple[int, int]
    frames: int = 1
    processed: tuple[int, int] | None = None
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredOracle:
    """The task's perfect answer, scored like an answer of the model."""

    answer: str  # the answer as the model would generate it, without the text `opened`
    tokens: int | None  # number of tokens, including the end token; None if it is not known
    parts: Parts
    weights: dict[str, float]
    reward: float | None
    best: float  # the reward if every reward part with a positive weight has its maximum value
    error: str | None = None
    opened: str = ""  # text that the chat template puts at the start of the answer

    @property
    def is_best(self) -> bool:
        return self.reward is not None and self.reward >= self.best - _ROUNDING


@dataclass(frozen=True, kw_only=True)
class SamplePreview:
    """What the model sees of one sample. Without a model, what the task shows of the sample."""

    id: str
    text: str  # the rendered prompt; without a model, the text of the messages
    tokens: int | None
    media: tuple[MediaFacts, ...]
    coordinates: str  # name of the coordinate convention of boxes; "" if there is no task
    target: Any = None
    oracle: ScoredOracle | None = None

    @property
    def text_tokens(self) -> int | None:
        return None if self.tokens is None else self.tokens - sum(m.tokens or 0 for m in self.media)


def preview_without_model(limits: LimitsSettings, task: Task, sample: Sample) -> SamplePreview:
    """The preview of a sample as the task renders it, without a processor. If the model's family is not known, boxes
    are in pixels of the original image."""
    convention = convention_of(task, sample)
    if convention == UNKNOWN:
        task.coordinates = Coordinates()
    loaded = [media.load(m, limits) for m in sample.media]
    if loaded:
        width, height = loaded[0].size
        sample = replace(sample, row={"width": width, "height": height, **sample.row})
    text = task_oracle(task, sample)
    oracle = None if text is None else scored_oracle(
        task, text, None, score_group(task, sample, [parse_answer(text)], 0)[0])
    return SamplePreview(
        id=sample.id, text=message_text(task_messages(task, sample)), tokens=None, coordinates=convention,
        media=tuple(MediaFacts(kind=m.kind, original=m.size, frames=len(m.frames)) for m in loaded),
        target=task_target(task, sample), oracle=oracle)


def preview_without_task(limits: LimitsSettings, sample: Sample) -> SamplePreview:
    """The preview of a row's question and ground truth, for a config without a task."""
    task = Task()
    task.prompt = next((f"{{{name}}}" for name in _QUESTION_FIELDS if sample.get(name) is not None), "")
    target = next((sample[name] for name in _TARGET_FIELDS if sample.get(name) is not None), None)
    return replace(preview_without_model(limits, task, sample), coordinates="", target=target)


def scored_oracle(task: Task, text: str, tokens: int | None, scored: AnswerScore, opened: str = "") -> ScoredOracle:
    """The perfect answer `text` of `tokens` tokens, with its score `scored` and the best possible reward. `opened` is
    the text that the chat template puts before the answer."""
    weights = {part: weight for part, weight in task.weights_at(0).items() if part in scored.parts}
    best = task.combine({part: (w > 0) * task.best_parts.get(part, 1.0) for part, w in weights.items()}, weights)
    return ScoredOracle(answer=text, tokens=tokens, parts=scored.parts, weights=weights, reward=scored.reward,
                        best=best, error=scored.error, opened=opened)


def convention_of(task: Task, sample: Sample) -> str:
    """Name of the coordinate convention in which boxes of a sample are written, or UNKNOWN."""
    try:
        return sample.get("coordinates") or task.coordinates.convention
    except TaskError:
        return UNKNOWN


def message_text(messages: Sequence[Any], media_mark: str = "<{kind}>") -> str:
    """The text of chat messages. Each image or video is replaced by `media_mark`, in which {kind} and {number} (counted
    from 1) are filled in. If there are several messages, each begins with its role."""
    count = itertools.count(1)

    def text_of(part: Mapping[str, Any]) -> str:
        return part["text"] if "text" in part else media_mark.format(kind=part["type"], number=next(count))

    contents = [(m["role"], [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else
                 m["content"]) for m in messages]
    return "\n".join((f"{role}: " if len(contents) > 1 else "") + "".join(map(text_of, content))
                     for role, content in contents)
