"""Tracks: one box per frame, or None where the object is not visible. How similar two are, and how to read one.

Boxes are `[x1, y1, x2, y2]`, both tracks in the same unit. Reading never raises, whatever the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlrl.rewards.boxes import iou
from vlrl.rewards.literals import numbers_of, read_literal

Track = Sequence[Sequence[float] | None]


def overlaps(track: Track, truth: Track) -> list[float]:
    """IoU of each frame in which the object is visible; 0 for a missing box, and for all if the number of frames
    differs."""
    if len(track) != len(truth):
        track = [None] * len(truth)
    return [0.0 if box is None else iou(box, true) for box, true in zip(track, truth, strict=True) if true is not None]


def mean_overlap(track: Track, truth: Track) -> float:
    """Mean IoU over the frames in which the object is visible (average overlap, AO), in [0, 1]; 0 without such a
    frame."""
    values = overlaps(track, truth)
    return sum(values) / len(values) if values else 0.0


def success_rate(track: Track, truth: Track, above: float = 0.5) -> float:
    """Share of those frames with an IoU above a threshold (SR of GOT-10k, 1810.11981), in [0, 1]."""
    values = overlaps(track, truth)
    return sum(v > above for v in values) / len(values) if values else 0.0


def got10k(track: Track, truth: Track, size: tuple[float, float]) -> dict[str, float]:
    """`ao` and `sr` of a track as in GOT-10k's toolkit (1810.11981): mean IoU and share of frames above .5, without the
    first frame, whose box is given, and with boxes clipped to the image of `size`; {} if no frame is left.

    A box that starts beyond the left or upper edge is moved to it, as in the toolkit, not clipped."""
    truths = truth[1:]
    boxes = [None if box is None else _within(box, size) for box in track[1:]] if len(track) == len(truth) else []
    values = overlaps(boxes, truths)
    return {"ao": mean_overlap(boxes, truths), "sr": success_rate(boxes, truths)} if values else {}


def _within(box: Sequence[float], size: tuple[float, float]) -> list[float]:
    corner = [min(max(box[i], 0.0), size[i]) for i in (0, 1)]
    return corner + [corner[i] + min(max(box[i + 2] - box[i], 0.0), size[i] - corner[i]) for i in (0, 1)]


def read_track(text: str, count: int) -> list[list[float] | None] | None:
    """The track of a text that is a list of `count` boxes (or null) and nothing else; None for any other text."""
    entries = read_literal(text)
    if not isinstance(entries, list) or len(entries) != count:
        return None
    boxes = [_box(entry) for entry in entries]
    readable = all(box or entry is None for entry, box in zip(entries, boxes, strict=True))
    return boxes if readable else None


def read_keyed_boxes(entries: Any) -> dict[str, list[float]] | None:
    """`{"1": [x1, y1, x2, y2], ...}` with four numbers for each key; None for anything else. At most 1,000 keys."""
    if not isinstance(entries, dict) or len(entries) > 1000:
        return None
    boxes = {key: box for key, entry in entries.items() if (box := _box(entry))}
    return boxes if len(boxes) == len(entries) else None


def _box(entry: Any) -> list[float] | None:
    return numbers_of(entry, 4) if isinstance(entry, list) and len(entry) == 4 else None
