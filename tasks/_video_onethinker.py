"""OneThinker's recipe of the video task: one prompt and one reward for all answer types (2512.03043)."""

import json
from collections.abc import Mapping
from typing import Any

from vlrl.rewards.answers import exact, free_text, ocr
from vlrl.rewards.boxes import format_box
from vlrl.rewards.literals import numbers_of, read_literal
from vlrl.rewards.numbers import read_number
from vlrl.rewards.spans import temporal_iou
from vlrl.rewards.text import answer_text, think_answer_format
from vlrl.rewards.tracks import mean_overlap, read_keyed_boxes
from vlrl.task.recipes import in_model_units, pixels
from vlrl.types import Answer, Parts, Sample

from . import _video as typed
from ._video_time import TimeRecipe, needs_one_span, say_oracle, spans_of, thinking
from ._video_tracks import boxes_of, frame_names, needs_track, track_of

_LONGEST = 20_000
_WITHIN = " within the <answer>...</answer> tags"
_EXAMPLES = {
    "choice": ("single option letter (e.g., A, B, C, D, etc.)", "A"), "number": ("numerical value", "3.14"),
    "ocr": ("transcribed text", "Hello World"), "text": ("text answer", "The capital of France is Paris."),
    "regression": ("numerical value", "42.7"), "span": ("time span in seconds as JSON", '{"time": [12.3, 25.7]}')}
_FORMS = {kind: f"Please provide only the {what}{_WITHIN}.\nExample:\n<answer>{example}</answer>"
          for kind, (what, example) in _EXAMPLES.items()}
_FORMS["track"] = ("Please track the target object throughout the video and provide one bounding box for each of these "
                   f"seconds{_WITHIN}: {{seconds}}.\nExample:\n"
                   '<answer>{"boxes": {"1": [405, 230, 654, 463], "2": [435, 223, 678, 446], ...}}</answer>')


def _kind(row: Mapping[str, Any]) -> str:
    return str(row.get("answer_type", ""))


def placeholders(row: Mapping[str, Any]) -> dict[str, str]:
    """The placeholder `as_type` of the prompt: the answer format for the row's type."""
    seconds = ", ".join(frame_names(Sample(id="", row=row)))
    return {"as_type": _FORMS.get(_kind(row), "").replace("{seconds}", seconds)}


def _object(answer: Answer) -> dict[str, Any]:
    value = read_literal(answer_text(answer.text))
    return value if isinstance(value, dict) else {}


def _read_one(task: Any, sample: Sample, answer: Answer) -> Any:
    kind = _kind(sample.row)
    if kind == "span":
        span = numbers_of(_object(answer).get("time"), 2)
        return [span] if span else None
    if kind == "track":
        boxes = read_keyed_boxes(_object(answer).get("boxes"))
        names = frame_names(sample)
        return None if boxes is None else {"boxes": [pixels(task, sample, boxes.get(name)) for name in names]}
    return answer_text(answer.text)[:_LONGEST]


def _one_target(task: Any, sample: Sample) -> Any:
    reader = {"span": spans_of, "track": boxes_of}.get(_kind(sample.row))
    return reader(task, sample) if reader else typed.truth(sample)


def _say_one(task: Any, sample: Sample, value: Any) -> str:
    kind = _kind(sample.row)
    if kind == "span":
        return thinking(json.dumps({"time": [round(float(t), 12) for t in value[0]]}))
    if kind == "track":
        entries = [f'"{key}": {format_box(in_model_units(task, sample, box))}'
                   for key, box in zip(frame_names(sample), value["boxes"], strict=True) if box]
        return thinking(f'{{"boxes": {{{", ".join(entries)}}}}}')
    return thinking(value)


def _one(task: Any, sample: Sample, answer: Answer) -> Parts:
    """OneThinker's reward parts: `accuracy` by the row's answer type; `format`; and `structure`, up to .5 for an answer
    in the format of this type (see `_structure`)."""
    parsed, framed = _read_one(task, sample, answer), think_answer_format(answer.text)
    return {"accuracy": _accuracy(task, sample, parsed), "format": framed,
            "structure": framed and _structure(sample, answer, parsed)}


def _accuracy(task: Any, sample: Sample, parsed: Any) -> float:
    kind, truth = _kind(sample.row), _one_target(task, sample)
    if kind == "span":
        return temporal_iou(parsed[0], truth[0]) if parsed else 0.0
    if kind == "track":
        return mean_overlap(parsed["boxes"], truth["boxes"]) if parsed else 0.0
    return {"choice": exact, "number": _same_number, "ocr": ocr, "text": free_text,
            "regression": relative_accuracy}[kind](parsed, truth)


def _structure(sample: Sample, answer: Answer, parsed: Any) -> float:
    """The part `structure`: 0 for an answer in the wrong format, else .5. A track in the right format gets .25 instead,
    plus .25 times the share of frames with a box in the answer, among the frames that show the object."""
    if parsed is None:
        return 0.0
    if _kind(sample.row) != "track":
        return 0.5
    frames = {key for key, box in zip(frame_names(sample), track_of(sample)["boxes"], strict=True) if box}
    return 0.25 + 0.25 * len(frames & set(_object(answer)["boxes"])) / len(frames)


def relative_accuracy(given: str, truth: str) -> float:
    """The mean relative accuracy (MRA, VSI-Bench, 2412.14171) of an answered number, in [0, 1]: the share of the
    thresholds .5, .55, ... .95 that 1 - relative error exceeds. 0 if one of the two texts is not a number."""
    a, b = read_number(given), read_number(truth)
    if a is None or b is None or a == b:
        return float(a is not None and a == b)
    return sum(20 * abs(a - b) < step * abs(b) for step in range(1, 11)) / 10


def _same_number(given: str, truth: str) -> float:
    a, b = read_number(given), read_number(truth)
    return float(a is not None and b is not None and round(a, 2) == round(b, 2))


ONETHINKER = TimeRecipe(
    prompt="{question}{choices}\nPlease answer this question based on the visual content. Provide your thinking "
           "process between the <think> and </think> tags, and then give your final answer between the <answer> and "
           "</answer> tags. {as_type}",
    rewards={"accuracy": 0.9, "format": 0.1, "structure": 1.0}, best_parts={"structure": 0.5},
    read=_read_one, score=_one, target=_one_target,
    oracle=say_oracle, say=_say_one, problem=lambda task, row: {
        "span": needs_one_span, "track": needs_track}.get(_kind(row), typed.typed_problem)(task, row))
