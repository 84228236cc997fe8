"""`vlrl play`: a sample as a person can answer it, and what the task says about the answer. Needs no model.

    question = ask(task, sample, config.limits, folder)
    judge(task, question, "<think>three</think><answer>3</answer>").scored.parts
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlrl.config.registry import prints_aside
from vlrl.config.schema import LimitsSettings
from vlrl.data import media
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, task_messages, task_oracle, task_samples, task_target
from vlrl.task.scoring import AnswerScore, score_group, without_score
from vlrl.task.services import Services, without_absent_parts
from vlrl.tools.play.preview import words_of
from vlrl.types import Answer, LoadedMedia, Media, Sample


@dataclass(frozen=True)
class QuestionMedia:
    """One image or video of a question."""

    kind: str
    path: str
    """Where it can be opened."""
    size: tuple[int, int] | None = None
    """Width and height in pixels."""
    frame: Any = None
    """The (first) frame, a PIL image; None when it cannot be read."""
    problem: str = ""


@dataclass(frozen=True)
class Question:
    """What the model is asked, for a person."""

    sample: Sample
    text: str
    media: tuple[QuestionMedia, ...]


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer and what the task says about it."""

    text: str
    scored: AnswerScore
    weights: dict[str, float]
    skipped: list[str]
    complaints: list[str]


def walk(task: Task, split: str, index: int | None = None, id: str | None = None,
         shuffled: bool = False) -> Iterator[tuple[int, Sample]]:
    """Yields (place, sample) from a place or id on, in order or shuffled. ConfigError for what the split does not
    have.
    """
    with prints_aside():
        samples = task_samples(task, split)
    if not len(samples):
        raise ConfigError(f"task '{task.name}' has no samples in split '{split}'")
    first = _place(samples, id) if id is not None else index or 0
    if not -len(samples) <= first < len(samples):
        raise ConfigError(f"--index {first}: split '{split}' has {len(samples)} samples, 0 to {len(samples) - 1}")
    places = list(range(first % len(samples), len(samples)))
    if shuffled:
        random.shuffle(places)
    for place in places:
        with prints_aside():
            sample = samples[place]
        yield place, sample


@prints_aside()
def ask(task: Task, sample: Sample, limits: LimitsSettings, folder: Path) -> Question:
    """Returns the question of a sample under its first template; pictures drawn by code are written into `folder`.

    A person answers in pixels of the picture as it is, so without a row's own `processed_size` it is the original one.
    """
    sample = replace(sample, prompt=sample.prompt or task.of(sample).templates[0])
    shown = media_shown([*sample.media, *(sample.opening.media if sample.opening else ())], limits, folder)
    size = next((s.size for s in shown if s.size), None)
    if size:
        sample = replace(sample, row={"width": size[0], "height": size[1], "processed_size": list(size), **sample.row})
    return Question(sample, words_of(task_messages(task, sample)), shown)


@prints_aside()
def judge(task: Task, question: Question, text: str, step: int = 0) -> ScoredAnswer:
    """Scores one answer as training would at `step`."""
    return judge_answer(task, question, parse_answer(text, step=step))


@prints_aside()
def judge_answer(task: Task, question: Question, answer: Answer, error: str | None = None) -> ScoredAnswer:
    """Scores an answer, which may be an episode that ended with an `error` of its environment."""
    reduced, skipped = without_absent_parts(task, question.sample, [answer], Services())
    (scored,) = score_group(reduced, question.sample, [answer], answer.step)
    odd = [] if answer.turns else complaints(question.text, answer.text)
    return ScoredAnswer(answer.text, without_score(scored, error), reduced.weights_at(answer.step), skipped, odd)


@prints_aside()
def oracle(task: Task, question: Question, step: int = 0) -> ScoredAnswer | None:
    """Returns the task's perfect answer, judged; None when it knows none."""
    text = task_oracle(task, question.sample)
    return None if text is None else judge(task, question, text, step)


@prints_aside()
def target(task: Task, question: Question) -> Any:
    """Returns what the parsed answer is compared with."""
    return task_target(task, question.sample)


def complaints(prompt: str, text: str) -> list[str]:
    """Returns what is odd about an answer's form: tags the prompt asks for and lacking, left open, or used twice."""
    problems = [] if text.strip() else ["the answer is empty"]
    for tag in ("think", "answer"):
        opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
        if f"<{tag}>" in prompt and not opened and not closed:
            problems.append(f"the prompt asks for <{tag}>, the answer has none")
        elif opened != closed:
            problems.append(f"<{tag}> occurs {opened} times, </{tag}> {closed} times")
        elif opened > 1:
            problems.append(f"<{tag}> occurs {opened} times")
    return problems


def half_blocks(image: Any, columns: int, rows: int) -> list[list[tuple[Any, Any]]]:
    """Returns a small picture as lines of (upper, lower) RGB colours, for one "▀" each; at most columns x rows
    characters.
    """
    scale = min(columns / image.width, 2 * rows / image.height, 1)
    width, height = max(1, round(image.width * scale)), max(1, round(image.height * scale / 2))
    small = image.convert("RGB").resize((width, 2 * height))
    pixels = small.load()
    return [[(pixels[x, 2 * y], pixels[x, 2 * y + 1]) for x in range(width)] for y in range(height)]


def _place(samples: Sequence[Sample], id: str) -> int:
    known = []
    for place in range(len(samples)):
        known.append(samples[place].id)
        if known[-1] == id:
            return place
    raise ConfigError(f"--id {id!r}: no sample has this id.{did_you_mean(id, known)} The first is {known[0]!r}.")


def media_shown(items: Sequence[Media], limits: LimitsSettings, folder: Path, begin: str = "") -> tuple[QuestionMedia,
                                                                                                        ...]:
    """Returns media as files: those drawn by code are written into `folder`, as `begin` and their number."""
    return tuple(_shown(item, limits, folder / f"{begin}{i}.png") for i, item in enumerate(items))


def _shown(item: Media, limits: LimitsSettings, file: Path) -> QuestionMedia:
    path = str(item.source) if isinstance(item.source, (str, Path)) else ""
    try:
        loaded: LoadedMedia = media.load(item, limits)
    except DataError as error:
        return QuestionMedia(item.kind, path, problem=str(error))
    if not path:
        loaded.frames[0].save(file)
    return QuestionMedia(item.kind, path or str(file), loaded.size, loaded.frames[0])
