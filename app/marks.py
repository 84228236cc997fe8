"""Validates the marks of Task.overlay for drawing, and scores them against the target. Pure functions.

Marks come from files and may have any content; invalid marks are dropped and counted."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.rewards.boxes import iou
from vlrl.rewards.spans import union_iou

from .details import GroupView
from .html import finite, number

COLORS = ("#4c8dff", "#f58518", "#e5484d", "#a46ef5", "#0fa3b8", "#d4a106", "#e052a0", "#a9744f")
"""Colours of answers by answer index, distinguishable on light and dark backgrounds and on images. They repeat from the
ninth answer on."""
TARGET = "#22c55e"
"""Colour of the target's marks, which are also dashed."""
_FARTHEST = 1e6  # pixels or seconds
_MOST = 2_000  # shapes of a group, points of a path, boxes of a track
_NUMBERS = {"box": 4, "point": 2, "span": 2}


@dataclass(frozen=True)
class Shape:
    """A valid mark, in pixels of the original image or in seconds of the clip."""

    kind: str
    at: tuple[Any, ...]
    """The coordinates, whose form depends on `kind`:
        box    (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2
        point  (x, y)
        path   ((x, y), ...)
        span   (start, end) as written, in seconds
        track  ((seconds or None, box), ...)"""
    label: str
    rollout: int | None
    """Index of the answer; None for a mark of the target."""
    media: int = 0
    score: str = ""
    """The score of the mark against the target as text, such as "IoU 0.82"; "" if there is none."""

    @property
    def color(self) -> str:
        return TARGET if self.rollout is None else color(self.rollout)


def color(index: Any) -> str:
    """The colour in which the card, the marks and the curves of answer `index` are drawn."""
    return COLORS[index % len(COLORS)] if isinstance(index, int) else COLORS[0]


def shapes(view: GroupView) -> tuple[list[Shape], int]:
    """Validates a group's marks. Returns a list with the distinct marks of the target, followed by the marks of the
    answers with their scores; and the number of invalid marks."""
    targets: dict[str, Shape] = {}
    answers: list[Shape] = []
    bad = 0
    for index, marks in [(None, view.marks), *((r.index, r.marks or ()) for r in view.rollouts)]:
        for mark in marks:
            shape = _shape(mark, index)
            if shape is None or len(targets) + len(answers) >= _MOST:
                bad += 1
            elif shape.rollout is None:
                targets.setdefault(json.dumps([shape.kind, shape.at, shape.media]), shape)
            else:
                answers.append(shape)
    return [*targets.values(), *scored(answers, list(targets.values()))], bad


def _shape(mark: Any, index: int | None) -> Shape | None:
    if not isinstance(mark, Mapping):
        return None
    at = coordinates_of(mark.get("kind"), mark.get("at"))
    media = mark.get("media", 0)
    if at is None or not isinstance(media, int) or not 0 <= media < 1000:
        return None
    label = mark.get("label")
    return Shape(kind=mark["kind"], at=at, label=label[:80] if isinstance(label, str) else "", media=int(media),
                 rollout=None if mark.get("role") == "target" else index)


def coordinates_of(kind: Any, at: Any) -> tuple[Any, ...] | None:
    """Converts the coordinates `at` of a mark of this kind to the form of Shape.at; None if they are invalid."""
    if not isinstance(at, (list, tuple)) or not isinstance(kind, str):
        return None
    if kind in _NUMBERS:
        numbers = _numbers(at, _NUMBERS[kind])
        return ordered(numbers) if numbers and kind == "box" else numbers
    if kind == "path":
        points = [_numbers(point, 2) for point in at[:_MOST]]
        return tuple(points) if len(points) > 1 and all(points) else None
    if kind == "track":
        entries = [_track_entry(entry) for entry in at[:_MOST]]
        return tuple(entries) if entries and all(entries) else None
    return None


def _track_entry(entry: Any) -> tuple[float | None, tuple[float, ...]] | None:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        return None
    box, seconds = _numbers(entry[1], 4), finite(entry[0])
    if box is None or (seconds is None and entry[0] is not None) or (seconds or 0.0) > _FARTHEST:
        return None
    return seconds, ordered(box)


def _numbers(values: Any, count: int) -> tuple[float, ...] | None:
    if not isinstance(values, (list, tuple)) or len(values) != count:
        return None
    numbers = [finite(value) for value in values]
    return tuple(v for v in numbers if v is not None) if all(
        v is not None and abs(v) <= _FARTHEST for v in numbers) else None


def ordered(box: Sequence[float]) -> tuple[float, ...]:
    """The box with its corners ordered: x1 <= x2 and y1 <= y2."""
    x1, y1, x2, y2 = box
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def scored(answers: Iterable[Shape], targets: Sequence[Shape]) -> list[Shape]:
    """Returns the marks of answers with their scores against the targets on the same image. A box gets the best IoU
    with a target box. A span gets the IoU of all spans of its answer with the target's spans. A track gets the mean IoU
    over the target's boxes. A point gets the distance to the nearest target point, or whether it is in a target box."""
    answers = list(answers)
    return [Shape(a.kind, a.at, a.label, a.rollout, a.media,
                  _score(a, answers, [t for t in targets if t.media == a.media])) for a in answers]


def _score(shape: Shape, answers: Sequence[Shape], targets: Sequence[Shape]) -> str:
    same = [t.at for t in targets if t.kind == shape.kind]
    boxes = [t.at for t in targets if t.kind == "box"]
    if shape.kind == "point" and boxes:
        hit = any(b[0] <= shape.at[0] <= b[2] and b[1] <= shape.at[1] <= b[3] for b in boxes)
        return "inside" if hit else "outside"
    if not same:
        return ""
    if shape.kind == "point":
        away = min(((shape.at[0] - x) ** 2 + (shape.at[1] - y) ** 2) ** 0.5 for x, y in same)
        return f"{number(away, '.0f')} px off"
    if shape.kind == "box":
        return _iou(max(iou(shape.at, box) for box in same))
    if shape.kind == "span":
        mine = [a.at for a in answers if a.kind == "span" and a.rollout == shape.rollout and a.media == shape.media]
        return _iou(union_iou(mine, same))
    return _iou(max(track_iou(shape.at, track) for track in same)) if shape.kind == "track" else ""


def _iou(value: float) -> str:
    return f"IoU {value:.2f}"


def track_iou(track: Sequence[Any], truth: Sequence[Any]) -> float:
    """Mean IoU of a track over the boxes of `truth` [(seconds or None, box), ...]; a box missing from `track` counts as
    0. Boxes are matched by time, or by their position in the list if they have no time."""
    if not truth:
        return 0.0
    own = {round(t, 3) if t is not None else i: box for i, (t, box) in enumerate(track)}
    boxes = [own.get(round(t, 3) if t is not None else i) for i, (t, _) in enumerate(truth)]
    return sum(iou(box, true) for box, (_, true) in zip(boxes, truth, strict=True) if box is not None) / len(truth)


def at_frame(track: Sequence[Any], frame: int, times: Sequence[float]) -> tuple[float, ...] | None:
    """The box of a track (see Shape.at) at the frame with index `frame`; None if the track has no box at that time.
    `times` are the times of all frames. A box with a time matches a frame within half the interval between two
    frames. Boxes without times are spread evenly over the frames."""
    if all(t is None for t, _ in track):
        place = round(frame * (len(track) - 1) / max(len(times) - 1, 1))
        return track[place][1]
    gap = (times[-1] - times[0]) / max(len(times) - 1, 1) or 1.0
    near = min(((abs(t - times[frame]), box) for t, box in track if t is not None), key=lambda candidate: candidate[0])
    return near[1] if near[0] <= gap / 2 + 1e-6 else None
