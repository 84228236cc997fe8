"""`vlrl play`: a sample as a question that a person can answer, and the score of the person's answer. No model is
needed.

question = ask(task, sample, config.limits, folder)
judge(task, question, "<think>three</think><answer>3</answer>").scored.parts"""

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
from vlrl.tools.play.preview import message_text
from vlrl.types import Answer, LoadedMedia, Media, Sample


@dataclass(frozen=True)
class QuestionMedia:
    """One image or video of a question, as a file."""

    kind: str
    path: str  # path or URL at which the image or video can be opened
    size: tuple[int, int] | None = None  # width and height in pixels; None if the file cannot be read
    problem: str = ""


@dataclass(frozen=True)
class Question:
    """A sample with its prompt as text, and its images and videos as files."""

    sample: Sample
    text: str
    media: tuple[QuestionMedia, ...]


@dataclass(frozen=True)
class ScoredAnswer:
    """A person's answer with its score, and the faults in its form."""

    text: str
    scored: AnswerScore
    weights: dict[str, float]
    skipped: list[str]  # names of the reward parts that were not scored because they need a service
    complaints: list[str]  # faults in the form of the answer, such as tags that are not closed


def walk(task: Task, split: str, index: int | None = None, id: str | None = None,
         shuffled: bool = False) -> Iterator[tuple[int, Sample]]:
    """Yields (index in the split, sample) for the samples from index `index`, or from the sample with this `id`, to the
    end. With `shuffled`, these samples come in random order.

    Raises ConfigError if the split has no such index or id."""
    with prints_aside():
        samples = task_samples(task, split)
    if not len(samples):
        raise ConfigError(f"task '{task.name}' has no samples in split '{split}': choose another --split")
    first = index or 0 if id is None else _index_of(samples, id)
    if not -len(samples) <= first < len(samples):
        raise ConfigError(f"--index {first}: split '{split}' has the samples 0 to {len(samples) - 1}")
    numbers = list(range(first % len(samples), len(samples)))
    if shuffled:
        random.shuffle(numbers)
    for n in numbers:
        with prints_aside():
            sample = samples[n]
        yield n, sample


def _index_of(samples: Sequence[Sample], id: str) -> int:
    known = []
    for n in range(len(samples)):
        known.append(samples[n].id)
        if known[-1] == id:
            return n
    raise ConfigError(f"--id {id!r}: no sample has this id.{did_you_mean(id, known)} The first id is {known[0]!r}.")


@prints_aside()
def ask(task: Task, sample: Sample, limits: LimitsSettings, folder: Path) -> Question:
    """Turns a sample into a question with the task's first prompt template. Images drawn by code are written to files
    in `folder`.

    A person answers in pixels of the original image, so the original size is used as `processed_size` if the row has no
    `processed_size`."""
    sample = replace(sample, prompt=sample.prompt or task.of(sample).templates_for(sample)[0])
    shown = media_files([*sample.media, *(sample.opening.media if sample.opening else ())], limits, folder)
    size = next((s.size for s in shown if s.size), None)
    if size:
        sample = replace(sample, row={"width": size[0], "height": size[1], "processed_size": list(size), **sample.row})
    return Question(sample, message_text(task_messages(task, sample)), shown)


@prints_aside()
def judge(task: Task, question: Question, text: str, step: int = 0) -> ScoredAnswer:
    """Scores the text of a person's answer, as training would score it at step `step`."""
    return judge_answer(task, question, parse_answer(text, step=step))


@prints_aside()
def judge_answer(task: Task, question: Question, answer: Answer, error: str | None = None) -> ScoredAnswer:
    """Scores an answer to a question. `error` is the environment's error if the answer is an episode that failed."""
    reduced, skipped = without_absent_parts(task, question.sample, [answer], Services())
    (scored,) = score_group(reduced, question.sample, [answer], answer.step)
    faults = [] if answer.turns else complaints(question.text, answer.text)
    return ScoredAnswer(answer.text, without_score(scored, error), reduced.weights_at(answer.step), skipped, faults)


@prints_aside()
def oracle(task: Task, question: Question, step: int = 0) -> ScoredAnswer | None:
    """The task's perfect answer with its score; None if the task has none."""
    text = task_oracle(task, question.sample)
    return None if text is None else judge(task, question, text, step)


@prints_aside()
def target(task: Task, question: Question) -> Any:
    """The ground truth that the parsed answer is compared with."""
    return task_target(task, question.sample)


def complaints(prompt: str, text: str) -> list[str]:
    """Faults in the form of an answer, as sentences: the answer is empty, or tags that the prompt asks for are missing,
    not closed, or used twice."""
    problems = [] if text.strip() else ["the answer is empty"]
    for tag in ("think", "answer"):
        opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
        if f"<{tag}>" in prompt and not opened and not closed:
            problems.append(f"the prompt asks for <{tag}>, but the answer does not contain it")
        elif opened != closed:
            problems.append(f"<{tag}> occurs {opened} times, </{tag}> {closed} times")
        elif opened > 1:
            problems.append(f"<{tag}> occurs {opened} times")
    return problems


def media_files(items: Sequence[Media], limits: LimitsSettings, folder: Path, prefix: str = ""
                ) -> tuple[QuestionMedia, ...]:
    """Each image or video as a file. Images drawn by code are written to `folder`, named `prefix` and a number."""
    return tuple(_media_file(item, limits, folder / f"{prefix}{i}.png") for i, item in enumerate(items))


def _media_file(item: Media, limits: LimitsSettings, file: Path) -> QuestionMedia:
    path = str(item.source) if isinstance(item.source, (str, Path)) else ""
    try:
        loaded: LoadedMedia = media.load(item, limits)
    except DataError as error:
        return QuestionMedia(item.kind, path, problem=str(error))
    if not path:
        loaded.frames[0].save(file)
    return QuestionMedia(item.kind, path or str(file), loaded.size)
