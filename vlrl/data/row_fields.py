"""Checks of single row fields, shared by readers, tasks and vlrl.checks. Each function returns an error message, or
None if the value is valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.values import short
from vlrl.errors import did_you_mean
from vlrl.rewards.boxes import is_number
from vlrl.rewards.text import clean_label

_TRUTHS = ("ground_truth", "answer", "solution", "label")


def ground_truth(row: Mapping[str, Any]) -> Any:
    """The ground truth of a row: its column ground_truth, answer, solution or label, or that of verl's reward_model."""
    nested = row.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    return next((row[name] for name in _TRUTHS if row.get(name) is not None), None)


def positive_problem(name: str, value: Any) -> str | None:
    """Returns an error message unless the field `name`, a length or a rate, is a number above 0."""
    return None if is_number(value) and value > 0 else f"{name}={short(value)} must be a number above 0"


def cut_problem(start: Any, end: Any) -> str | None:
    """Returns an error message if `video_start` and `video_end` are numbers, but the start is not before the end."""
    if is_number(start) and is_number(end) and not start < end:
        return f"video_start={short(start)} must be before video_end={short(end)}"
    return None


def label_problem(correct: Sequence[Any], labels: Any) -> str | None:
    """Returns an error message if a label in `correct` is not among the row's `labels`, because then no allowed answer
    could be right.

    Labels are normalised as in scoring."""
    offered = [str(name) for name in labels] if isinstance(labels, list) else []
    known = set(map(clean_label, offered))
    missing = next((str(name) for name in correct if known and clean_label(str(name)) not in known), None)
    return missing and f"label={short(missing)} is not among labels={short(labels)}.{did_you_mean(missing, offered)}"


def responses_problem(pair: Any, answer: Any) -> str | None:
    """Returns an error message unless `pair`, the field `responses`, holds two different strings, and `answer` is the
    number of the better response, 1 or 2."""
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(r, str) and r.strip() for r in pair)):
        return f"responses={short(pair)} must be two non-empty strings"
    if pair[0] == pair[1]:
        return f"both responses are {short(pair[0])}, so neither can be better"
    if isinstance(answer, bool) or answer not in (1, 2):
        return f"answer={short(answer)} must say which response is better: 1 or 2"
    return None


def spans_problem(spans: Any) -> str | None:
    """Returns an error message unless `spans` is a list of [start, end] in seconds with 0 <= start < end."""
    if not isinstance(spans, list) or not all(isinstance(s, list) and len(s) == 2 and all(map(is_number, s))
                                              for s in spans):
        return f"spans={short(spans)} must be a list of [start, end] in seconds from the start of the clip"
    wrong = next((span for span in spans if not 0 <= span[0] < span[1]), None)
    return wrong and f"span {wrong} must start at 0 or later and end after its start"


def tracks_problem(tracks: Any) -> str | None:
    """Returns an error message unless `tracks` is a list of tracks with valid boxes and, optionally, ascending times.
    Boxes may lie outside the frames."""
    if not isinstance(tracks, list) or not tracks or not all(
            isinstance(t, Mapping) and isinstance(t.get("boxes"), list) and t["boxes"] for t in tracks):
        return f"tracks={short(tracks)} must be a list of {{\"boxes\": [[x1, y1, x2, y2] or null, ...]}}"
    return next((problem for track in tracks if (problem := _track_problem(track["boxes"], track.get("times")))), None)


def _track_problem(boxes: list[Any], times: Any) -> str | None:
    if all(box is None for box in boxes):
        return f"a track of {len(boxes)} frames needs a box in at least one of them"
    for box in boxes:
        if box is not None and not (isinstance(box, list) and len(box) == 4 and all(map(is_number, box))
                                    and box[0] < box[2] and box[1] < box[3]):
            return f"box {short(box)} of a track must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2, or null"
    if times is not None and not (isinstance(times, list) and len(times) == len(boxes) and all(map(is_number, times))
                                  and times[0] >= 0 and sorted(set(times)) == times):
        return f"times={short(times)} of a track must be ascending times in seconds, one per box, from 0 or later"
    return None
