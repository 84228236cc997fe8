"""Rules of the canonical fields of a row, whatever task reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vlrl.checks.rule import CheckedRow, Context
from vlrl.config.registry import Table
from vlrl.data import MEDIA_FIELDS, box_problems
from vlrl.data.row_fields import (
    cut_problem,
    label_problem,
    positive_problem,
    responses_problem,
    spans_problem,
    tracks_problem,
)
from vlrl.data.values import number, short
from vlrl.rewards.boxes import is_number
from vlrl.types import Record

LATE = 0.1
"""Share of the duration by which a span may end after it: published annotations do, by up to a tenth."""
SLACK = 1.0
"""Seconds by which a told duration may differ from the file's."""
_POSITIVE = ("duration", "fps")
_TEXTS = ("question", "instruction", "expression")
_SHOWN = {"expression": "image", "boxes": "image", "box": "image", "action": "image", "label": "image",
          "plan": "image", "trajectory": "image", "spans": "video", "tracks": "video"}
"""Field -> the kind of media without which it says nothing."""


def field_problems(row: Record) -> Iterator[str]:
    """Yields each thing that is wrong with the fields that a row has; fields it has not are left to its task."""
    for name in _CHECKS:
        if row.get(name) is not None and (problem := _CHECKS[name](row)):
            yield problem


def _text(name: str) -> Callable[[Record], str | None]:
    def find(row: Record) -> str | None:
        good = isinstance(row[name], str) and row[name].strip()
        return None if good else f"{name}={short(row[name])} must be a text that is not empty"

    return find


def unseen_problem(row: Record) -> str | None:
    """Returns what is wrong with a row that names no image or video, and has a field that needs one; None for
    nothing.
    """
    field = next((name for name in _SHOWN if row.get(name) is not None), None)
    if field is None or any(row.get(name) for name in MEDIA_FIELDS):
        return None
    return f"{field}={short(row[field])} is about {_SHOWN[field]}s, and the row names none: give it {_SHOWN[field]!r}"


def _label(row: Record) -> str | None:
    label, labels = row["label"], row.get("labels")
    several = label if isinstance(label, list) else [label]
    if not several or not all(isinstance(v, (str, int)) and not isinstance(v, bool) and str(v).strip()
                              for v in several):
        return f"label={short(label)} must be a text, or with `multi` a list of texts"
    return label_problem(several, labels)


def span_problem(row: Record) -> str | None:
    """Returns what is wrong with the `spans` of a row, or None."""
    spans, duration = row["spans"], number(row.get("duration"))
    if problem := spans_problem(spans):
        return problem
    for start, end in spans:
        if duration is not None and (start >= duration or end > (1 + LATE) * duration):
            return f"span {[start, end]} reaches beyond the clip of {duration:g} seconds"
    return None


def length_problem(row: Record, clip: float, name: str, start: float | None = None, end: float | None = None
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


def _tracks(row: Record) -> str | None:
    if problem := tracks_problem(row["tracks"]):
        return problem
    boxes = [{"box": box} for track in row["tracks"] for box in track["boxes"] if box is not None]
    return next(box_problems({"boxes": boxes}, (row.get("width"), row.get("height"))), None)


def _boxes(row: Record) -> str | None:
    boxes = row["boxes"]
    if isinstance(boxes, list) and all(isinstance(b, Mapping) and _is_box(b.get("box")) for b in boxes):
        return None
    return f"boxes={short(boxes)} must be a list of {{\"box\": [x1, y1, x2, y2]}}; empty when nothing is to be found"


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(is_number, value))


def _labels(row: Record) -> str | None:
    labels = row["labels"]
    if isinstance(labels, list) and all(isinstance(v, (str, int)) and not isinstance(v, bool) for v in labels):
        return None
    return f"labels={short(labels)} must be a list of texts"


_CHECKS = Table({
    **{name: _text(name) for name in _TEXTS},
    **{name: lambda row, name=name: positive_problem(name, row[name]) for name in _POSITIVE},
    "label": _label, "answer_type": "vlrl.checks.answer_fields:answer_type",
    "options": "vlrl.checks.answer_fields:options", "spans": span_problem,
    "video_end": lambda row: cut_problem(row.get("video_start") or 0, row["video_end"]), "tracks": _tracks,
    "plan": "vlrl.checks.route_fields:plan", "trajectory": "vlrl.checks.route_fields:trajectory",
    "responses": lambda row: responses_problem(row["responses"], 1 if row.get("answer") is None else row["answer"]),
    "boxes": _boxes, "labels": _labels,
    "box": lambda row: None if _is_box(row["box"]) else f"box={short(row['box'])} must be [x1, y1, x2, y2] in pixels",
})
"""Field -> what is wrong with a row that has it; only rows with such a field import what lies elsewhere."""


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
