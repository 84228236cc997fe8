"""A sample on its way to the model, as `--dry-run` and `vlrl data check` show it. Imports no torch."""

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

_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class MediaFacts:
    """One image or video of a sample; sizes are (width, height) in pixels."""

    kind: str
    original: tuple[int, int]
    frames: int = 1
    processed: tuple[int, int] | None = None
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredOracle:
    """The task's perfect answer, scored as the model's answers are."""

    answer: str
    """As the model writes it: without what its prompt `opened`."""
    tokens: int | None
    """With the end token."""
    parts: Parts
    weights: dict[str, float]
    reward: float | None
    best: float
    """The sum of the positive weights: the reward of parts in [0, 1]."""
    error: str | None = None
    opened: str = ""
    """What the chat template begins the answer with."""

    @property
    def is_best(self) -> bool:
        return self.reward is not None and self.reward >= self.best - _ROUNDING


@dataclass(frozen=True, kw_only=True)
class SamplePreview:
    """One sample on its way to the model. Without a model only what the task itself says is known."""

    id: str
    text: str
    """The rendered prompt; without a model the text of the messages."""
    tokens: int | None
    media: tuple[MediaFacts, ...]
    coordinates: str
    """The convention in which boxes are written; empty where no task asks."""
    target: Any = None
    oracle: ScoredOracle | None = None

    @property
    def text_tokens(self) -> int | None:
        return None if self.tokens is None else self.tokens - sum(m.tokens or 0 for m in self.media)


def preview_without_model(limits: LimitsSettings, task: Task, sample: Sample) -> SamplePreview:
    """Returns what can be said of a sample without a model; boxes in original pixels when its family is not known."""
    convention = convention_of(task, sample)
    if convention == NOT_KNOWN:
        task.coordinates = Coordinates()
    loaded = [media.load(m, limits) for m in sample.media]
    if loaded:
        width, height = loaded[0].size
        sample = replace(sample, row={"width": width, "height": height, **sample.row})
    text = task_oracle(task, sample)
    oracle = None
    if text is not None:
        oracle = oracle_of(task, text, None, score_group(task, sample, [parse_answer(text)], 0)[0])
    return SamplePreview(id=sample.id, text=words_of(task_messages(task, sample)), tokens=None, coordinates=convention,
                 media=tuple(MediaFacts(kind=m.kind, original=m.size, frames=len(m.frames)) for m in loaded),
                 target=task_target(task, sample), oracle=oracle)


ASKS = ("question", "expression", "instruction")
"""Canonical fields that say what is asked, the first that a row has."""
ANSWERS = ("answer", "boxes", "box", "action", "label", "plan", "spans", "tracks", "labels")
"""Canonical fields that an answer is compared with, the first that a row has."""


def outline(limits: LimitsSettings, sample: Sample) -> SamplePreview:
    """Returns what a row alone says of its prompt: its own words without those of a task, which nobody named."""
    plain = Task()
    plain.prompt = next((f"{{{name}}}" for name in ASKS if sample.get(name) is not None), "")
    said = preview_without_model(limits, plain, sample)
    target = next((sample[name] for name in ANSWERS if sample.get(name) is not None), None)
    return replace(said, coordinates="", target=target)


def oracle_of(task: Task, text: str, tokens: int | None, scored: AnswerScore, opened: str = "") -> ScoredOracle:
    weights = {part: weight for part, weight in task.weights_at(0).items() if part in scored.parts}
    best = task.combine({part: (w > 0) * task.best_parts.get(part, 1.0) for part, w in weights.items()}, weights)
    return ScoredOracle(answer=text, tokens=tokens, parts=scored.parts, weights=weights, reward=scored.reward,
                        best=best,
                  error=scored.error, opened=opened)


NOT_KNOWN = "auto: the model family's, not known without the model"


def convention_of(task: Task, sample: Sample) -> str:
    try:
        return sample.get("coordinates") or task.coordinates.convention
    except TaskError:
        return NOT_KNOWN


def words_of(messages: Sequence[Any], place: str = "<{kind}>") -> str:
    """Returns the texts of messages with `place` where media stand ({kind}, {number} from 1); of several messages,
    whose each is.
    """
    count = itertools.count(1)

    def words(part: Mapping[str, Any]) -> str:
        return part["text"] if "text" in part else place.format(kind=part["type"], number=next(count))

    said = [(m["role"], [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"])
            for m in messages]
    whose = len(said) > 1
    return "\n".join((f"{role}: " if whose else "") + "".join(map(words, content))
                     for role, content in said)
