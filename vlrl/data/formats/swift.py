"""Grounding placeholders of ms-swift: turns contain `<ref-object>` and `<bbox>`; `objects` holds the names and boxes.

    {"messages": [{"role": "user", "content": "<image>Find <ref-object>."}, {"role": "assistant", "content": "<bbox>"}],
     "images": ["a.png"], "objects": {"ref": ["the mug"], "bbox": [[10, 20, 30, 40]]}}

`objects.bbox_type` is the unit of the coordinates: `real` (the default, pixels of the image), `norm1000` or `norm1`. A
box of two numbers is a point."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlrl.data.sources.fields import IMAGE, RecordSource, numbers, pick, row_size
from vlrl.data.values import scaled, short, unpacked
from vlrl.errors import DataError
from vlrl.types import Record

_MARK = re.compile(r"<(bbox|ref-object)>")
_FULL = {"real": 1.0, "none": 1.0, "norm1": 1.0, "norm1000": 1000.0}
"""Maps bbox_type to the coordinate of the image's right and lower edges. Coordinates in pixels are not scaled, so their
entry is 1."""


@dataclass(frozen=True)
class GroundingMarks:
    """The unit of the boxes in a record's answer, and which of these boxes are points. `fill_marks` returns it."""

    stated: str = ""
    """objects.bbox_type; empty if the record does not state it."""
    points: tuple[list[float], ...] = ()

    def scale(self, source: RecordSource) -> float:
        """Returns the coordinate of the image's right and lower edges: 1000 for norm1000; 1 for norm1 and pixels.
        Raises DataError if data.boxes contradicts objects.bbox_type."""
        unit = "pixels" if self.stated == "real" else self.stated
        if unit in ("pixels", "norm1", "norm1000") and source.form.unit not in ("", unit):
            raise DataError(f"objects.bbox_type={self.stated!r} and data.boxes={source.boxes!r} contradict each other: "
                            "remove one of the two")
        return _FULL[self.stated or "real"]


def fill_marks(record: Record) -> tuple[Record, GroundingMarks | None]:
    """Fills a record's placeholders: names replace `<ref-object>`, and a list of boxes becomes the answer.

    Returns (new record, GroundingMarks); (the unchanged record, None) if it has no placeholders. Raises DataError if
    placeholders and `objects` do not match."""
    name = next((n for n in ("messages", "conversations") if isinstance(pick(record, n), list)), "")
    objects = unpacked(record.get("objects"))
    if not name or not isinstance(objects, Mapping) or not isinstance(objects.get("bbox"), list):
        return record, None
    boxes = [numbers(box, (2, 4), "objects.bbox") for box in objects["bbox"]]
    names, turns = [str(ref) for ref in objects.get("ref") or ()], pick(record, name)
    kind = objects.get("bbox_type") or ""
    if kind and kind not in _FULL:
        raise DataError(f"objects.bbox_type={short(kind)} is not known; known: {', '.join(_FULL)}")
    words = [str(turn.get("content", turn.get("value")) or "") if isinstance(turn, Mapping) else "" for turn in turns]
    last = turns[-1] if turns else None
    answers = isinstance(last, Mapping) and (last.get("role") or last.get("from")) in ("assistant", "gpt")
    asked, answer = (words[:-1], words[-1]) if answers else (words, "<bbox>" * len(boxes))
    if any("<bbox>" in text for text in asked):
        raise DataError(f"the question {short(asked[-1])} contains <bbox>, a box whose numbers depend on the model: "
                        "name the object in words")
    if not _MARK.search("".join(words)) and answers:
        return record, None
    asked = [_MARK.sub(lambda mark: _next(names, "ref"), text) for text in asked]
    said, label = [], None
    for mark in _MARK.finditer(answer):
        if mark[1] == "bbox":
            said.append({"bbox_2d": _next(boxes, "bbox"), **({"label": label} if label else {})})
        else:
            label = _next(names, "ref")
    if boxes or names:
        raise DataError(f"{len(boxes)} boxes and {len(names)} names in objects have no placeholder in a turn: "
                        "add <bbox> or <ref-object>, or remove these boxes and names from objects")
    images = pick(record, *IMAGE)
    if isinstance(images, list) and len(images) > 1 and said:
        raise DataError(f"the boxes belong to several of the {len(images)} images (objects.image_id), but a row can "
                        "have boxes in only one image")
    return _filled(record, name, turns, asked, said, answers), GroundingMarks(kind, tuple(
        one["bbox_2d"] for one in said if len(one["bbox_2d"]) == 2))


def points_in_pixels(marks: GroundingMarks, row: Record, source: RecordSource) -> dict[str, Any]:
    """Returns {"points": ...} with the points in `marks`, converted to pixels of the row's image unless data.boxes
    names their unit."""
    full = marks.scale(source)
    scale = (marks.stated == "norm1" or full != 1) and not source.scaled_later
    return {"points": [scaled(p, row_size(row), full, "objects.bbox") if scale else p for p in marks.points]}


def _filled(record: Record, name: str, turns: list[Any], texts: list[str], boxes: list[Any], has_answer: bool
            ) -> Record:
    """Returns the record with filled placeholders. Its field `name` holds `turns`. The turns before the answer get the
    contents `texts`, and the answer becomes the JSON of `boxes` (boxes or points). If not `has_answer`, a turn with
    the answer is added."""
    texts = [*texts, *([json.dumps(boxes)] if has_answer else [])]
    new = [{**{k: v for k, v in turn.items() if k not in ("content", "value")}, "content": text}
           for turn, text in zip(turns, texts, strict=True)]
    role = {"role": "assistant"} if "role" in turns[0] else {"from": "gpt"}
    return {**record, name: new if has_answer else [*new, {**role, "content": json.dumps(boxes)}]}


def _next(values: list[Any], what: str) -> Any:
    if not values:
        raise DataError(f"the turns have more placeholders for {what} than objects.{what} has entries")
    return values.pop(0)
