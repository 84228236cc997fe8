"""Recipes of the video task that follow an object, and functions for both spans and tracks: checks of rows,
placeholders, metrics, cheating answers, and marks for the inspector.

Rows have `tracks` [{"label", "boxes": [box or null per frame], "times": [seconds per box]}], and the `width` and
`height` of the frames. The prompt asks for the first track."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.row_fields import tracks_problem
from vlrl.rewards.boxes import format_box, is_number
from vlrl.rewards.spans import format_time
from vlrl.rewards.text import answer_tag, think_answer_format
from vlrl.rewards.tracks import got10k, mean_overlap, read_track, success_rate
from vlrl.task.recipes import in_model_units, pixels
from vlrl.types import Answer, Parts, Sample

from . import _video_time as times
from ._shared import means

_MOST_FRAMES = 1000
_COUNTS = {8: "eight"}


def track_of(sample: Sample) -> dict[str, Any]:
    return (sample.get("tracks") or [{}])[0]


def boxes_of(_task: Any, sample: Sample) -> dict[str, Any]:
    return {"boxes": [box and list(box) for box in track_of(sample).get("boxes", [])]}


def frame_names(sample: Sample) -> list[str]:
    """The name of each frame: its time in seconds, or its number counted from 1 if the row has no times."""
    track = track_of(sample)
    return [format_time(t) for t in track.get("times") or range(1, len(track.get("boxes", [])) + 1)]


def needs_track(_task: Any, row: Mapping[str, Any]) -> str | None:
    return None if row.get("tracks") else 'tracks is missing: [{"boxes": [[x1, y1, x2, y2] or null per frame]}]'


# --- VideoChat-R1 -----------------------------------------------------------------------------------------------------


def _read_boxes(task: Any, sample: Sample, answer: Answer) -> dict[str, Any] | None:
    boxes = read_track(answer_tag(answer.text) or "", len(track_of(sample).get("boxes", [])))
    return None if boxes is None else {"boxes": [pixels(task, sample, box) for box in boxes]}


def _track(task: Any, sample: Sample, answer: Answer) -> Parts:
    track = _read_boxes(task, sample, answer)
    if track is None:
        return {"iou": 0.0, "format": 0.0}
    return {"iou": mean_overlap(track["boxes"], track_of(sample)["boxes"]), "format": think_answer_format(answer.text)}


def _say_boxes(task: Any, sample: Sample, track: Mapping[str, Any]) -> str:
    texts = ["null" if box is None else format_box(in_model_units(task, sample, box)) for box in track["boxes"]]
    return times.thinking(f"[{', '.join(texts)}]")


VIDEOCHAT_R1_TRACK = times.TimeRecipe(
    prompt='Track the "{object}" in the video based on its initial coordinates "{first_box}". The output should be a '
           "list containing {count} sublists. Each sublist includes four normalized coordinates [x0, y0, x1, y1] "
           "representing the bounding box of the object at specific time intervals.\n\nOutput your thought process "
           "within the <think> </think> tags.\n\nProvide your answer within the <answer> </answer> tags as a list of "
           "{count} sublists, where each sublist contains the normalized coordinates [x0, y0, x1, y1]. For example: "
           "<answer>[[0.1, 0.5, 0.3, 0.55], [0.72, 0.25, 0.84, 0.43], ...]</answer>.",
    rewards={"iou": 1.0, "format": 1.0}, read=_read_boxes, score=_track, target=boxes_of, oracle=times.say_oracle,
    say=_say_boxes, problem=needs_track)


def problem(row: Mapping[str, Any]) -> str | None:
    """Describes what is wrong with the times and tracks of a row; None if they are valid."""
    error, tracks = times.span_problem(row), row.get("tracks")
    if error or tracks in (None, []):  # each recipe checks its own fields
        return error
    for side in ("width", "height"):
        if not is_number(row.get(side)) or row[side] <= 0:
            return f"{side}={str(row.get(side))[:200]} must be the picture's {side} in pixels, the unit of boxes"
    if wrong := tracks_problem(tracks):
        return wrong
    most = max(len(track["boxes"]) for track in tracks)
    return f"a track has {most} frames, more than the largest number, {_MOST_FRAMES}" if most > _MOST_FRAMES else None


def placeholders(task: Any, row: Mapping[str, Any]) -> dict[str, str]:
    """Values for the placeholders of prompts: those of times.span_placeholders and, for a track, `object`, `first_box`
    and `count`."""
    sample = Sample(id=str(row.get("id", "")), row=row)
    values, track = times.span_placeholders(row), track_of(sample)
    if not track.get("boxes"):
        return values
    first = next(box for box in track["boxes"] if box)
    place = any("{first_box}" in template for template in task.templates)  # other recipes may lack it
    return values | {"object": str(track.get("label") or row.get("question", "")),
                     "count": _COUNTS.get(len(track["boxes"]), str(len(track["boxes"]))),
                     "first_box": format_box(in_model_units(task, sample, first)) if place else ""}


def measures(task: Any, sample: Sample, parsed: Any) -> dict[str, float]:
    """The metrics of one answer; {} for a row without spans and tracks. For spans, the metrics of times.span_measures.
    For a track, `overlap` and `sr@0.5` over all frames (counting the first frame, as in VideoChat-R1, 2504.06958), and
    `ao` and `sr` as in GOT-10k."""
    if not isinstance(task.used, times.TimeRecipe):
        return {}
    target = task.used.target(task, sample)
    if isinstance(target, str):
        return {}
    if isinstance(target, dict) and "boxes" in target:
        boxes = parsed["boxes"] if parsed else []
        return {"overlap": mean_overlap(boxes, target["boxes"]), "sr@0.5": success_rate(boxes, target["boxes"]),
                **got10k(boxes, target["boxes"], (sample["width"], sample["height"]))}
    return times.span_measures(target, parsed)


_BY_CATEGORY = ("miou", "miop", "r1@0.3", "r1@0.5", "r1@0.7", "gqa_acc", "overlap", "sr@0.5", "ao", "sr")


def summaries(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each metric of `measures` by category, e.g. `miou/indoor`. For tracks also `ao/frames` and
    `sr/frames`, the means over all frames, which GOT-10k's toolkit reports for a whole data set (1810.11981)."""
    by_category = means((f"{name}/{category}", r["metrics"][name]) for r in records
                        if (category := r["sample"].get("category")) for name in _BY_CATEGORY if name in r["metrics"])
    followed = [(sum(box is not None for box in r["target"]["boxes"][1:]), r["metrics"]) for r in records
                if "ao" in r["metrics"]]
    frames = sum(count for count, _ in followed)
    return by_category | {f"{name}/frames": sum(count * metrics[name] for count, metrics in followed) / frames
                    for name in ("ao", "sr") if frames}


def cheats(task: Any, sample: Sample) -> dict[str, str]:
    """Name -> an answer given without looking at the clip; {} for recipes whose answers are not spans or tracks."""
    if not isinstance(task.used, times.TimeRecipe):
        return {}
    target = task.used.target(task, sample)
    if isinstance(target, str):
        return {}
    if not isinstance(target, dict) or "spans" in target:
        return times.span_cheats(task, sample)
    width, height, count = sample["width"], sample["height"], len(target["boxes"])
    boxes = {"whole picture in each frame": [0.0, 0.0, float(width), float(height)],
             "tiny box in each frame": [0.0, 0.0, width / 50, height / 50]}
    return {name: task.used.say(task, sample, {"boxes": [box] * count}) for name, box in boxes.items()}


def marks(sample: Sample, parsed: Any, role: str) -> list[dict[str, Any]]:
    """The marks that the inspector draws for `parsed`, a track or spans; [] for any other value. `role`, which every
    mark contains, says where `parsed` comes from: "answer" or "target"."""
    boxes, spans = (parsed.get("boxes"), parsed.get("spans")) if isinstance(parsed, dict) else (None, parsed)
    if isinstance(boxes, list):
        track = track_of(sample)
        seconds = track.get("times") or [None] * len(boxes)
        at = [[t, [*box]] for t, box in zip(seconds, boxes, strict=False) if box]
        return [{"kind": "track", "at": at, "label": str(track.get("label") or "object"), "role": role}] if at else []
    spans = [s for s in spans if isinstance(s, (list, tuple)) and len(s) == 2] if isinstance(spans, list) else []
    return [{"kind": "span", "at": [*span], "label": "span", "role": role} for span in spans]
