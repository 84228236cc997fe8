"""Tracks: one box per frame, or None where the object is not seen. How alike two are, and how to read one.

Boxes are `[x1, y1, x2, y2]`, both tracks in the same unit. Reading never raises, whatever the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlrl.rewards.boxes import iou
from vlrl.rewards.literals import numbers_of, read_literal

Track = Sequence[Sequence[float] | None]


def overlaps(track: Track, truth: Track) -> list[float]:
    """IoU of every frame in which the object is seen; a missing box is 0, all are with another number of frames."""
    if len(track) != len(truth):
        track = [None] * len(truth)
    return [0.0 if box is None else iou(box, true) for box, true in zip(track, truth, strict=True) if true is not None]


def mean_overlap(track: Track, truth: Track) -> float:
    """Returns the mean IoU over the frames in which the object is seen (average overlap, AO), in [0, 1]; 0 without such
    a frame.
    """
    values = overlaps(track, truth)
    return sum(values) / len(values) if values else 0.0


def success_rate(track: Track, truth: Track, above: float = 0.5) -> float:
    """Returns the share of those frames whose IoU lies above a threshold (SR of GOT-10k, 1810.11981), in [0, 1]."""
    values = overlaps(track, truth)
    return sum(v > above for v in values) / len(values) if values else 0.0


def got10k(track: Track, truth: Track, size: tuple[float, float]) -> dict[str, float]:
    """Returns `ao` and `sr` of a track as GOT-10k's toolkit (1810.11981) has them: mean IoU and share of frames above
    .5, without the first frame, whose box is given, and with boxes cut at the picture of `size`; {} where no frame is
    left.

    A box that begins beyond the left or upper edge is moved to it, as there, not cut.
    """
    truths = truth[1:]
    boxes = [None if box is None else _within(box, size) for box in track[1:]] if len(track) == len(truth) else []
    values = overlaps(boxes, truths)
    return {"ao": mean_overlap(boxes, truths), "sr": success_rate(boxes, truths)} if values else {}


def _within(box: Sequence[float], size: tuple[float, float]) -> list[float]:
    corner = [min(max(box[i], 0.0), size[i]) for i in (0, 1)]
    return corner + [corner[i] + min(max(box[i + 2] - box[i], 0.0), size[i] - corner[i]) for i in (0, 1)]


def read_track(text: str, count: int) -> list[list[float] | None] | None:
    """Returns the track of a text that is a list of `count` boxes (or null) and nothing else; None for any other
    text.
    """
    entries = read_literal(text)
    if not isinstance(entries, list) or len(entries) != count:
        return None
    boxes = [_box(entry) for entry in entries]
    return None if any(entry is not None and box is None for entry, box in zip(entries, boxes, strict=True)) else boxes


def read_keyed_boxes(entries: Any) -> dict[str, list[float]] | None:
    """`{"1": [x1, y1, x2, y2], ...}` with four numbers to every key; None for anything else. At most 1,000 keys."""
    if not isinstance(entries, dict) or len(entries) > 1000:
        return None
    boxes = {key: box for key, entry in entries.items() if (box := _box(entry))}
    return boxes if len(boxes) == len(entries) else None


def _box(entry: Any) -> list[float] | None:
    return numbers_of(entry, 4) if isinstance(entry, list) and len(entry) == 4 else None
