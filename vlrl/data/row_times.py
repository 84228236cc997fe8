"""Times and tracks of a row: what is wrong with their form, for readers, tasks and the rules of vlrl.checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlrl.data.formats.fields import short
from vlrl.rewards.boxes import is_number


def positive_problem(name: str, value: Any) -> str | None:
    """Returns what is wrong with a length or rate, or None."""
    return None if is_number(value) and value > 0 else f"{name}={short(value)} must be a number above 0"


def cut_problem(start: Any, end: Any) -> str | None:
    """Returns what is wrong with the order of `video_start` and `video_end`, where both are numbers, or None."""
    if is_number(start) and is_number(end) and not start < end:
        return f"video_start={short(start)} must be before video_end={short(end)}"
    return None


def spans_problem(spans: Any) -> str | None:
    """Returns what is wrong with `spans`, or None."""
    if not isinstance(spans, list) or not all(isinstance(s, list) and len(s) == 2 and all(map(is_number, s))
                                              for s in spans):
        return f"spans={short(spans)} must be a list of [start, end] in seconds from the start of the clip"
    wrong = next((span for span in spans if not 0 <= span[0] < span[1]), None)
    return wrong and f"span {wrong} must start at 0 or later and end after its start"


def tracks_problem(tracks: Any) -> str | None:
    """Returns what is wrong with `tracks`, wherever their boxes lie, or None."""
    if not isinstance(tracks, list) or not tracks or not all(
            isinstance(t, Mapping) and isinstance(t.get("boxes"), list) and t["boxes"] for t in tracks):
        return f"tracks={short(tracks)} must be a list of {{\"boxes\": [[x1, y1, x2, y2] or null, ...]}}"
    return next((problem for track in tracks if (problem := _track_problem(track["boxes"], track.get("times")))), None)


def _track_problem(boxes: list[Any], times: Any) -> str | None:
    if all(box is None for box in boxes):
        return f"a track of {len(boxes)} frames needs a box in one at least"
    for box in boxes:
        if box is not None and not (isinstance(box, list) and len(box) == 4 and all(map(is_number, box))
                                    and box[0] < box[2] and box[1] < box[3]):
            return f"box {short(box)} of a track must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2, or null"
    if times is not None and not (isinstance(times, list) and len(times) == len(boxes) and all(map(is_number, times))
                                  and times[0] >= 0 and sorted(set(times)) == times):
        return f"times={short(times)} of a track must be one rising second for each box, from 0 on"
    return None
