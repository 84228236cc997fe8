"""Rules of the canonical fields of a row, whatever task reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vlrl.checks.rule import CheckedRow, Context
from vlrl.data import MEDIA_FIELDS, box_problems
from vlrl.data.row_fields import (
    cut_problem,
    label_problem,
    plan_problem,
    positive_problem,
    responses_problem,
    spans_problem,
    tracks_problem,
)
from vlrl.data.values import number, short
from vlrl.errors import DataError, did_you_mean
from vlrl.rewards.answers import one_number
from vlrl.rewards.boxes import is_number
from vlrl.rewards.chart import count
from vlrl.rewards.codes import is_code
from vlrl.rewards.driving import trajectory_problem

Row = Mapping[str, Any]
ANSWER_TYPES = ("choice", "number", "count", "text", "yes_no", "math", "chart", "ocr", "regression", "span",
                "span+choice", "track")
_NUMERIC = ("number", "count", "regression")
LATE = 0.1
"""Share of the duration by which a span may end after it: published annotations do, by up to a tenth."""
SLACK = 1.0
"""Seconds by which a told duration may differ from the file's."""
_POSITIVE = ("duration", "fps")
_TEXTS = ("question", "instruction", "expression")
_SHOWN = {"expression": "image", "boxes": "image", "box": "image", "action": "image", "label": "image",
          "plan": "image", "trajectory": "image", "spans": "video", "tracks": "video"}
"""Field -> the kind of media without which it says nothing."""


def field_problems(row: Row) -> Iterator[str]:
    """Yields each thing that is wrong with the fields that a row has; fields it has not are left to its task."""
    for name, find in _CHECKS.items():
        if row.get(name) is not None and (problem := find(row)):
            yield problem


def _text(name: str) -> Callable[[Row], str | None]:
    def find(row: Row) -> str | None:
        good = isinstance(row[name], str) and row[name].strip()
        return None if good else f"{name}={short(row[name])} must be a text that is not empty"

    return find


def unseen_problem(row: Row) -> str | None:
    """Returns what is wrong with a row that names no image or video, and has a field that needs one; None for
    nothing.
    """
    field = next((name for name in _SHOWN if row.get(name) is not None), None)
    if field is None or any(row.get(name) for name in MEDIA_FIELDS):
        return None
    return f"{field}={short(row[field])} is about {_SHOWN[field]}s, and the row names none: give it {_SHOWN[field]!r}"


def _label(row: Row) -> str | None:
    label, labels = row["label"], row.get("labels")
    several = label if isinstance(label, list) else [label]
    if not several or not all(isinstance(v, (str, int)) and not isinstance(v, bool) and str(v).strip()
                              for v in several):
        return f"label={short(label)} must be a text, or with `multi` a list of texts"
    return label_problem(several, labels)


def _answer_type(row: Row) -> str | None:
    kind = row["answer_type"]
    if kind not in ANSWER_TYPES:
        return (f"answer_type={short(kind)} is not known.{did_you_mean(str(kind), ANSWER_TYPES)} Known: "
                f"{', '.join(ANSWER_TYPES)}")
    needed = {"span": "spans", "track": "tracks"}.get(kind, "answer")
    if row.get(needed) is None and row.get("answer") is None:
        return f"answer_type={kind} needs the field {needed!r}"
    if kind in _NUMERIC and not _is_numeric(row.get("answer"), kind):
        return f"answer={short(row.get('answer'))} must be a number, as answer_type={kind} says"
    return None


def _is_numeric(value: Any, kind: str) -> bool:
    """Returns whether one of the right answers is a number of this type, or a code, which is compared as it is written.
    """
    several, read = value if isinstance(value, list) else [value], count if kind == "count" else one_number
    return any(read(str(v)) is not None or is_code(str(v)) for v in several)


def _options(row: Row) -> str | None:
    options = row["options"]
    if not isinstance(options, list) or len(options) < 2 or not all(
            isinstance(v, (str, int, float)) and str(v).strip() for v in options):
        return f"options={short(options)} must be a list of at least two texts"
    if row.get("answer") is None or row.get("answer_type", "choice") not in ("choice", "span+choice"):
        return None
    from vlrl.data.formats.choices import letter, options_of  # rows without options need none of it

    try:
        answer = row["answer"]
        letter(", ".join(map(str, answer)) if isinstance(answer, list) else answer, options_of({"options": options}))
    except DataError as error:
        return str(error)
    return None


def span_problem(row: Row) -> str | None:
    """Returns what is wrong with the `spans` of a row, or None."""
    spans, duration = row["spans"], number(row.get("duration"))
    if problem := spans_problem(spans):
        return problem
    for start, end in spans:
        if duration is not None and (start >= duration or end > (1 + LATE) * duration):
            return f"span {[start, end]} reaches beyond the clip of {duration:g} seconds"
    return None


def length_problem(row: Row, clip: float, name: str, start: float | None = None, end: float | None = None
                   ) -> str | None:
    """Returns what the end of a clip, its `duration` or, where none is told, the `spans` of a row say against what is
    shown: `clip` seconds of the file, cut from `start` to `end`.
    """
    duration, start = number(row.get("duration")), start or 0.0
    if end is not None and end - start > clip + max(SLACK, LATE * clip):
        return f"video_end={end:g} lies after the end of {name}, which lasts {start + clip:.3g} seconds"
    if duration is None:
        return span_problem({**row, "duration": clip}) if row.get("spans") is not None and clip > 0 else None
    if abs(duration - clip) > max(SLACK, LATE * clip):
        return f"duration says {duration:g} seconds, {name} lasts {clip:.3g}"
    return None


def _tracks(row: Row) -> str | None:
    if problem := tracks_problem(row["tracks"]):
        return problem
    boxes = [{"box": box} for track in row["tracks"] for box in track["boxes"] if box is not None]
    return next(box_problems({"boxes": boxes}, (row.get("width"), row.get("height"))), None)


def _trajectory(row: Row) -> str | None:
    problem = trajectory_problem(row["trajectory"])
    return f"trajectory={short(row['trajectory'])}: {problem}" if problem else None


def _boxes(row: Row) -> str | None:
    boxes = row["boxes"]
    if isinstance(boxes, list) and all(isinstance(b, Mapping) and _is_box(b.get("box")) for b in boxes):
        return None
    return f"boxes={short(boxes)} must be a list of {{\"box\": [x1, y1, x2, y2]}}; empty when nothing is to be found"


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(is_number, value))


def _labels(row: Row) -> str | None:
    labels = row["labels"]
    if isinstance(labels, list) and all(isinstance(v, (str, int)) and not isinstance(v, bool) for v in labels):
        return None
    return f"labels={short(labels)} must be a list of texts"


_CHECKS: dict[str, Callable[[Row], str | None]] = {
    **{name: _text(name) for name in _TEXTS},
    **{name: lambda row, name=name: positive_problem(name, row[name]) for name in _POSITIVE},
    "label": _label, "answer_type": _answer_type, "options": _options, "spans": span_problem,
    "video_end": lambda row: cut_problem(row.get("video_start") or 0, row["video_end"]), "tracks": _tracks,
    "plan": lambda row: plan_problem(row["plan"]), "trajectory": _trajectory,
    "responses": lambda row: responses_problem(row["responses"], 1 if row.get("answer") is None else row["answer"]),
    "boxes": _boxes, "labels": _labels,
    "box": lambda row: None if _is_box(row["box"]) else f"box={short(row['box'])} must be [x1, y1, x2, y2] in pixels",
}
"""Field -> what is wrong with a row that has it."""


def _rule(name: str) -> Callable[[CheckedRow, Context], Iterator[str]]:
    def find(row: CheckedRow, context: Context) -> Iterator[str]:
        if context.canonical and row.sample and row.sample.row.get(name) is not None:
            problem = _CHECKS[name](row.sample.row)
            if problem:
                yield problem

    return find


def _unseen(row: CheckedRow, context: Context) -> Iterator[str]:
    sample = row.sample
    problem = unseen_problem(sample.row) if context.canonical and sample and not sample.media else None
    if problem:
        yield problem


RULES: dict[str, Callable[[CheckedRow, Context], Iterator[str]]] = {
    "unseen": _unseen, **{name: _rule(name) for name in _CHECKS}}
"""Field -> the rule of rows that have it."""
