"""Measures a task's scoring (the verifier) on answers that were labelled as correct or wrong: counts false positives
and false negatives.

    {"id": "train-3", "answer": "<answer>4</answer>", "correct": true}
    {"sample": {"id": "7", "image": "7.jpg", "label": "cat"}, "answer": "a cat", "correct": false, "part": "accuracy"}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.checks.answers import answer_of, part_weights
from vlrl.checks.finding import shorten
from vlrl.config.registry import prints_aside
from vlrl.data import SPLITS, read_rows
from vlrl.data.sources.dataset import sample_from
from vlrl.errors import ConfigError, DataError, VlrlError, did_you_mean
from vlrl.task import Task, task_samples
from vlrl.task.scoring import score_group
from vlrl.types import Sample

THRESHOLD = 0.5
"""The verifier counts an answer as correct if the reward part has at least this value."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """An answer on which the verifier and the label disagree."""

    line: int
    """Number of the row in the file, starting from 1."""
    sample: str
    answer: str
    """The answer, shortened."""
    part: str
    value: float
    correct: bool
    """The label of the answer: True for a false negative, False for a false positive."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The agreement of the verifier with the labels."""

    correct: int
    """Number of answers labelled as correct."""
    wrong: int
    """Number of answers labelled as wrong."""
    mistakes: tuple[Mistake, ...]

    @property
    def false_positives(self) -> tuple[Mistake, ...]:
        """Answers that are labelled as wrong but rewarded."""
        return tuple(m for m in self.mistakes if not m.correct)

    @property
    def false_negatives(self) -> tuple[Mistake, ...]:
        """Answers that are labelled as correct but not rewarded."""
        return tuple(m for m in self.mistakes if m.correct)


@prints_aside()
def judge(task: Task, file: Path) -> Verdict:
    """Scores every labelled answer of a file and compares the result with the answer's label.

    The verifier counts an answer as correct if the reward part has a value of at least 0.5. The field `part` of a row
    names this reward part; by default it is the reward part with the largest weight. Raises DataError, which names the
    file and the row."""
    rows = read_rows(file)
    if not rows:
        raise DataError(f"{file} has no rows: write one row for each labelled answer, e.g. "
                        '{"id": "train-3", "answer": "<answer>4</answer>", "correct": true}')
    samples = samples_by_id(task, {str(row.get("id")) for row in rows if "sample" not in row})
    mistakes, correct = [], 0
    for number, row in enumerate(rows, 1):
        try:
            mistake = _judged(task, row, samples, file.parent, number)
        except DataError as error:
            raise DataError(f"{file}, row {number}: {error}") from None
        correct += row["correct"]
        mistakes += [mistake] if mistake else []
    return Verdict(correct=correct, wrong=len(rows) - correct, mistakes=tuple(mistakes))


def _judged(task: Task, row: Mapping[str, Any], samples: Mapping[str, Sample], root: Path, number: int
            ) -> Mistake | None:
    text, label = row.get("answer"), row.get("correct")
    if not isinstance(text, str):
        raise DataError(f"answer={shorten(str(text))} must be a string")
    if not isinstance(label, bool):
        raise DataError(f"correct={label!r} must be true or false")
    sample = sample_of(task, row, samples, root)
    part = _part(task, row)
    (scored,) = score_group(task, sample, [answer_of(text)], step=0)
    value = scored.parts.get(part)
    if value is None:
        raise DataError(f"the reward part '{part}' of this answer has no value")
    if (value >= THRESHOLD) is label:
        return None
    return Mistake(line=number, sample=sample.id, answer=shorten(text), part=part, value=value, correct=label)


def _part(task: Task, row: Mapping[str, Any]) -> str:
    weights = part_weights(task)
    part = row.get("part") or max(weights, key=lambda name: weights[name], default="")
    if part not in weights:
        raise DataError(f"part={part!r} is not a reward part of this task; its parts: {', '.join(weights)}."
                        f"{did_you_mean(str(part), weights)}")
    return part


def sample_of(task: Task, row: Mapping[str, Any], samples: Mapping[str, Sample], root: Path) -> Sample:
    """The sample that a row contains (`sample`) or names (`id`). `root`: media folder. Raises DataError if there is
    none."""
    if "sample" in row:
        if not isinstance(row["sample"], dict):
            raise DataError("sample must be a row of the task, as a JSON object")
        return sample_from(task, row["sample"], root)
    sample = samples.get(str(row.get("id")))
    if sample is None:
        raise DataError(f"id={row.get('id')!r} is not a sample of train or heldout; give the whole row as 'sample'")
    return sample


def samples_by_id(task: Task, wanted: Iterable[str]) -> dict[str, Sample]:
    """Returns {id: sample} for the ids `wanted`. The splits are searched one after the other."""
    missing, out = set(wanted), {}
    for split in SPLITS:
        if not missing:
            break
        try:
            samples = task_samples(task, split)
        except ConfigError:
            continue
        for i in range(len(samples)):
            if not missing:
                break
            try:
                sample = samples[i]
            except VlrlError:
                continue
            if sample.id in missing:
                missing.discard(sample.id)
                out[sample.id] = sample
    return out
