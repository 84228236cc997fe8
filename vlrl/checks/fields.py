"""Rules of the canonical fields of a row. They apply to every task."""

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

Row = Mapping[str, Any]
LATE = 0.1
"""A span may end after the video by this fraction of the duration: spans in published annotations exceed the duration
by up to a tenth."""
SLACK = 1.0  # seconds by which a row's `duration` may differ from that of the file
_SHOWN_IN = {"expression": "image", "boxes": "image", "box": "image", "action": "image", "label": "image",
             "plan": "image", "trajectory": "image", "spans": "video", "tracks": "video"}
"""Maps each field that refers to media to the kind of these media, image or video."""


def field_problems(row: Row) -> Iterator[str]:
    """Yields a message for each fault in the fields of a row. Missing fields are reported by the task."""
    for name in _CHECKS:
        if row.get(name) is not None and (problem := _CHECKS[name](row)):
            yield problem


def _text_check(name: str) -> Callable[[Row], str | None]:
    def check(row: Row) -> str | None:
        good = isinstance(row[name], str) and row[name].strip()
        return None if good else f"{name}={short(row[name])} must be a non-empty string"

    return check


def unseen_problem(row: Row) -> str | None:
    """A message if a field of the row refers to media, but the row has no image or video; None if the row is
    consistent."""
    field = next((name for name in _SHOWN_IN if row.get(name) is not None), None)
    if field is None or any(row.get(name) for name in MEDIA_FIELDS):
        return None
    kind = _SHOWN_IN[field]
    return f"{field}={short(row[field])} refers to media, but the row has no {kind}: add the field {kind!r}"


def _is_label(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _label(row: Row) -> str | None:
    label = row["label"]
    several = label if isinstance(label, list) else [label]
    if not several or not all(_is_label(v) and str(v).strip() for v in several):
        return f"label={short(label)} must be a string, or with `multi` a list of strings"
    return label_problem(several, row.get("labels"))


def _labels(row: Row) -> str | None:
    labels = row["labels"]
    good = isinstance(labels, list) and all(map(_is_label, labels))
    return None if good else f"labels={short(labels)} must be a list of strings"


def span_problem(row: Row) -> str | None:
    """A message about what is wrong with the `spans` of a row; None if they are valid."""
    spans, duration = row["spans"], number(row.get("duration"))
    if problem := spans_problem(spans):
        return problem
    for start, end in spans:
        if duration is not None and (start >= duration or end > (1 + LATE) * duration):
            return f"span {[start, end]} reaches beyond the clip of {duration:g} seconds"
    return None


def length_problem(row: Row, clip: float, name: str, start: float | None = None, end: float | None = None
                   ) -> str | None:
    """Returns a message if the row's `video_end`, `duration` or (without a duration) `spans` contradict the video file;
    None if they agree.

    name: the video file. start, end: the part of the file that the row selects, in seconds. clip: the length of this
    part in seconds."""
    duration, start = number(row.get("duration")), start or 0.0
    if end is not None and end - start > clip + max(SLACK, LATE * clip):
        return f"video_end={end:g} lies after the end of {name}, which lasts {start + clip:.3g} seconds"
    if duration is None:
        return span_problem({**row, "duration": clip}) if row.get("spans") is not None and clip > 0 else None
    if abs(duration - clip) > max(SLACK, LATE * clip):
        return f"duration is {duration:g} seconds, but {name} lasts {clip:.3g}"
    return None


def _tracks(row: Row) -> str | None:
    if problem := tracks_problem(row["tracks"]):
        return problem
    boxes = [{"box": box} for track in row["tracks"] for box in track["boxes"] if box is not None]
    return next(box_problems({"boxes": boxes}, (row.get("width"), row.get("height"))), None)


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(is_number, value))


def _boxes(row: Row) -> str | None:
    boxes = row["boxes"]
    if isinstance(boxes, list) and all(isinstance(b, Mapping) and _is_box(b.get("box")) for b in boxes):
        return None
    return (f"boxes={short(boxes)} must be a list of {{\"box\": [x1, y1, x2, y2]}}; an empty list if there is nothing "
            "to find")


_CHECKS = Table({
    **{name: _text_check(name) for name in ("question", "instruction", "expression")},
    **{name: lambda row, name=name: positive_problem(name, row[name]) for name in ("duration", "fps")},
    "label": _label, "answer_type": "vlrl.checks.target_fields:answer_type_problem",
    "options": "vlrl.checks.target_fields:options_problem", "spans": span_problem,
    "video_end": lambda row: cut_problem(row.get("video_start") or 0, row["video_end"]), "tracks": _tracks,
    "plan": "vlrl.checks.target_fields:plan_problem",
    "trajectory": "vlrl.checks.target_fields:trajectory_field_problem",
    "responses": lambda row: responses_problem(row["responses"], 1 if row.get("answer") is None else row["answer"]),
    "boxes": _boxes, "labels": _labels,
    "box": lambda row: None if _is_box(row["box"]) else f"box={short(row['box'])} must be [x1, y1, x2, y2] in pixels",
})
"""Field -> function of a row that returns what is wrong with the field, or None. Modules named by a string are imported
only for rows with such a field."""


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
"""Field -> the rule that checks this field of a row."""
