r"""`vlrl score`: reads rows with a sample and completions, one JSON object per line, and returns for each row one line
with the rewards of its completions.

    {"sample": {...}, "completions": ["text", {"text": "...", "n_tokens": 12, "truncated": false}],
     "step": 0, "opened": "<think>\n", "variants": {"shuffled": ["text"]}}
    {"rewards": [{"parts": {...}, "reward": 1.0, "parsed": ..., "error": null}], "weights": {...}, "skipped": []}

`step`, `opened` and `variants` are optional. `opened` is the text with which the chat template starts an answer; it is
scored as the beginning of every completion of the row. If the config has several tasks, a row also has "task", the
label of its task. The completions of a row form one group. `variants` holds completions that were sampled with other
media, by the name of their Variant. They are passed to `score_group`, and each is scored by `score`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlrl.config.registry import prints_aside
from vlrl.data.coordinates import Convention, Coordinates
from vlrl.data.sources.dataset import sample_from
from vlrl.errors import DataError, VlrlError, did_you_mean
from vlrl.rewards.boxes import is_number
from vlrl.rewards.text import parse_answer
from vlrl.store import plain
from vlrl.task import Task
from vlrl.task.scoring import AnswerScore, score_alone, score_group
from vlrl.task.services import Services, without_absent_parts
from vlrl.types import Answer, Sample

if TYPE_CHECKING:
    from vlrl.services.service_set import ServiceSet  # loads torch

_KEYS = ("sample", "completions", "step", "opened", "variants", "task")
_COMPLETION_KEYS = ("text", "n_tokens", "truncated")


def score_lines(task: Task, lines: Iterable[bytes], root: Path,
                provided: ServiceSet | None = None) -> Iterator[tuple[str, VlrlError | None]]:
    """Scores rows, one JSON object per line; blank lines are skipped. Yields (JSON to print, None), or ({"error": ...},
    the error) for a row that cannot be scored.

    The error names the line, counted from 1. Only one line is in memory at a time. Relative media paths are relative to
    `root`. `provided` are the available services."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield to_json(score_row(task, _parsed(line, first=number == 1), root, provided)), None
        except (VlrlError, RecursionError) as error:
            error = DataError("nested too deeply") if isinstance(error, RecursionError) else error
            named = type(error)(f"line {number}: {error}")
            yield to_json({"error": str(named)}), named


@prints_aside()
def score_row(task: Task, row: Mapping[str, Any], root: Path, provided: ServiceSet | None = None) -> dict[str, Any]:
    """Scores one row and returns the output object shown in the module docstring. `provided` are the available
    services.

    Raises DataError for a malformed row, TaskError for a task that breaks the Task contract."""
    step = _integer(row, "step")
    opened = row.get("opened") or ""
    if not isinstance(opened, str):
        raise DataError(f"opened={_short(opened)} must be a string: the text that the chat template "
                        "puts before each answer")
    answers = _answers(row.get("completions"), "completions", step, opened)
    variants = row.get("variants") or {}
    if not isinstance(variants, dict):
        raise DataError(f"variants={_short(variants)} must be an object {{name: [completions]}}")
    others = {name: [replace(a, variant=name) for a in _answers(given, f"variants[{name!r}]", step, opened)]
              for name, given in variants.items()}
    sample_row = row.get("sample")
    if not isinstance(sample_row, dict):
        raise DataError(f"sample={_short(sample_row)} must be a JSON object: the data row")
    task, label = _task(task, row)
    sample = replace(sample_from(task, sample_row, root), task=label)
    given = provided.standalone("score", step) if provided else None
    with _watched(task, sample), given.turn if given else nullcontext():
        services = Services(others, given.services if given else {})
        task, skipped = without_absent_parts(task, sample, answers, services)
        scored = score_group(task, sample, answers, step, services)
        rewards = _rewards([replace(s, error=given.problem) if given and s.reward is None and not s.error else s
                            for s in scored])
        result = {"rewards": rewards, "weights": task.weights_at(step), "skipped": skipped}
        if others:
            result["variants"] = {name: _rewards(score_alone(task, sample, group, step))
                                  for name, group in others.items()}
    return result


def _task(task: Task, row: Mapping[str, Any]) -> tuple[Task, str]:
    """Returns (the task that scores a row, the label of this task). The label is "" if the config has one task."""
    label = row.get("task")
    if not task.labels:
        return task, ""
    if not isinstance(label, str):
        raise DataError("the row has no 'task', and this config has several tasks: write \"task\": "
                        f"{task.labels[0]!r} or another of {', '.join(task.labels)}, or select a single task with "
                        f"task={task.labels[0]}")
    return task.of(Sample(id=str(row["sample"].get("id", ""))[:100], task=label)), label


def to_json(value: Any) -> str:
    """The value as one line of ASCII JSON; NaN and infinities become null."""
    return json.dumps(plain(value), allow_nan=False)


class _Watched(Coordinates):
    """Coordinates that convert like `given` (the coordinates of a task), and store the first conversion error in
    `error`. Scoring alone would turn such an error into a reward part of 0."""

    def __init__(self, given: Coordinates):
        self.given = given
        self.error: DataError | None = None

    @property
    def convention(self) -> str:
        return self.given.convention

    def to_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        return self._converted(self.given.to_original, sample, box)

    def from_original(self, sample: Sample, box: Sequence[float]) -> list[float]:
        return self._converted(self.given.from_original, sample, box)

    def _converted(self, convert: Callable[..., list[float]], sample: Sample, box: Sequence[float]) -> list[float]:
        try:
            return convert(sample, box)
        except DataError as error:
            self.error = self.error or error
            raise


@contextmanager
def _watched(task: Task, sample: Sample) -> Iterator[None]:
    """Context manager that, at its end, raises the DataError of a row whose coordinates could not be converted (e.g.
    without `processed_size`)."""
    given, watched = task.coordinates, _Watched(task.coordinates)
    task.coordinates = watched
    try:
        if isinstance(given, Convention) and "processed_size" not in sample.row:
            _convert_once(task, given, sample)
        yield
    finally:
        task.coordinates = given
    if watched.error:  # the row is wrong, whatever its completions say
        raise watched.error


def _convert_once(task: Task, convention: Convention, sample: Sample) -> None:
    """Has the task convert a box if the model answers in processed pixels, so that an error is found even if no
    completion of the row contains a box."""
    try:
        if convention.used(sample) == "processed":
            task.oracle(sample)
            task.cheats(sample)
    except (Exception, SystemExit):  # the coordinates have stored the conversion error
        return


def _rewards(scored: Sequence[AnswerScore]) -> list[dict[str, Any]]:
    return [{"parts": s.parts, "reward": s.reward, "parsed": s.parsed, "error": s.error} for s in scored]


def _parsed(line: bytes, first: bool) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"a row must be a JSON object, not a {type(row).__name__}")
    missing = [key for key in ("sample", "completions") if key not in row]
    _refuse_misspelt(row, _KEYS)
    if missing:
        raise DataError(f"the row has no '{missing[0]}'; a row is {{\"sample\": {{...}}, \"completions\": [...]}}")
    return row


def _answers(given: Any, name: str, step: int, opened: str) -> list[Answer]:
    if not isinstance(given, list):
        raise DataError(f"{name}={_short(given)} must be a list of strings or of objects {{\"text\", \"n_tokens\", "
                        "\"truncated\"}")
    return [_answer(item, f"{name}[{i}]", step, opened) for i, item in enumerate(given)]


def _answer(given: Any, name: str, step: int, opened: str) -> Answer:
    if isinstance(given, str):
        return parse_answer(given, step=step, opened=opened)
    if not isinstance(given, dict) or not isinstance(given.get("text"), str):
        raise DataError(f"{name}={_short(given)} must be a string, or an object with the key 'text'")
    _refuse_misspelt(given, _COMPLETION_KEYS)
    truncated = given.get("truncated") or False
    if not isinstance(truncated, bool):
        raise DataError(f"{name}: truncated={_short(truncated)} must be true or false")
    try:
        return parse_answer(given["text"], _integer(given, "n_tokens"), truncated, step, opened)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _integer(row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    if value is None:
        return 0
    if not is_number(value) or value != int(value) or not 0 <= value < 2**63:
        raise DataError(f"{key}={_short(value)} must be a whole number of at least 0")
    return int(value)


def _refuse_misspelt(row: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises DataError if a key of the row looks like a typo of a known key. Other unknown keys belong to the user and
    are ignored."""
    for key in row:
        near = "" if key in known else did_you_mean(key[:40], [k for k in known if k not in row])
        if near:
            raise DataError(f"unknown key {key[:40]!r}.{near}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
