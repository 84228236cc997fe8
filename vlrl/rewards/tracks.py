"""Object tracks, i.e. lists with one box per frame, or None for a frame in which the object is not visible: similarity
of two tracks, and parsing of a track in an answer.

Boxes are `[x1, y1, x2, y2]`; both tracks must use the same unit. Parsing never raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlrl.rewards.boxes import iou
from vlrl.rewards.literals import numbers_of, read_literal

Track = Sequence[Sequence[float] | None]


def overlaps(track: Track, truth: Track) -> list[float]:
    """The IoU of two tracks in each frame in which the object is visible, i.e. in which `truth` has a box. A missing
    box in `track` gives 0. If the two tracks differ in their number of frames, all values are 0."""
    if len(track) != len(truth):
        track = [None] * len(truth)
    return [0.0 if box is None else iou(box, true) for box, true in zip(track, truth, strict=True) if true is not None]


def mean_overlap(track: Track, truth: Track) -> float:
    """The mean IoU over the frames in which the object is visible (average overlap, AO), in [0, 1]; 0 if it is visible
    in none."""
    values = overlaps(track, truth)
    return sum(values) / len(values) if values else 0.0


def success_rate(track: Track, truth: Track, above: float = 0.5) -> float:
    """Of the frames in which the object is visible, the share with an IoU above the threshold `above` (success rate SR
    of GOT-10k, 1810.11981)."""
    values = overlaps(track, truth)
    return sum(v > above for v in values) / len(values) if values else 0.0


def got10k(track: Track, truth: Track, size: tuple[float, float]) -> dict[str, float]:
    """Scores a track as GOT-10k's toolkit does (1810.11981): `ao` is the mean IoU, `sr` the share of frames with an IoU
    above .5. {} if there are no frames to score.

    The first frame is left out, because its box is part of the prompt. Boxes are clipped to the image of `size`. A box
    that starts beyond the left or upper edge is shifted to the edge instead of clipped, as in the toolkit."""
    truths = truth[1:]
    boxes = [None if box is None else _within(box, size) for box in track[1:]] if len(track) == len(truth) else []
    values = overlaps(boxes, truths)
    return {"ao": mean_overlap(boxes, truths), "sr": success_rate(boxes, truths)} if values else {}


def _within(box: Sequence[float], size: tuple[float, float]) -> list[float]:
    corner = [min(max(box[i], 0.0), size[i]) for i in (0, 1)]
    return corner + [corner[i] + min(max(box[i + 2] - box[i], 0.0), size[i] - corner[i]) for i in (0, 1)]


def read_track(text: str, count: int) -> list[list[float] | None] | None:
    """The track in a text that is a list of exactly `count` boxes (or null) and nothing else; None for other texts."""
    entries = read_literal(text)
    if not isinstance(entries, list) or len(entries) != count:
        return None
    boxes = [_box(entry) for entry in entries]
    readable = all(box or entry is None for entry, box in zip(entries, boxes, strict=True))
    return boxes if readable else None


def read_keyed_boxes(entries: Any) -> dict[str, list[float]] | None:
    """Converts `{"1": [x1, y1, x2, y2], ...}` to a dict of boxes of floats. None if the value is not a dict, an entry
    is not four numbers, or there are more than 1,000 keys."""
    if not isinstance(entries, dict) or len(entries) > 1000:
        return None
    boxes = {key: box for key, entry in entries.items() if (box := _box(entry))}
    return boxes if len(boxes) == len(entries) else None


def _box(entry: Any) -> list[float] | None:
    return numbers_of(entry, 4) if isinstance(entry, list) and len(entry) == 4 else None
