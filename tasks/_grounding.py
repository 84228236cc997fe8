"""Recipes of the grounding task whose answers are boxes: referring expressions and detection."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from vlrl.rewards.boxes import box_format, format_box, giou, iou, is_number, parse_box, parse_integer_box
from vlrl.rewards.detection import (
    Detection,
    average_precision,
    calibration,
    clipped,
    greedy_matches,
    length_penalty,
    match_quality,
    mean_matched,
    weighted_sum,
)
from vlrl.rewards.literals import MOST, json_block, read_detections, read_fenced, read_literal
from vlrl.rewards.text import (
    answer_tag,
    answer_text,
    says_none,
    think_answer_format,
    think_answer_within,
)
from vlrl.task.recipes import Box, Recipe, in_model_units, pixels, whole_units
from vlrl.types import Answer, Parts, Sample

from ._shared import think_answer

_THINK = ("First output the thinking process in <think> </think> tags and then output the final answer in <answer> "
          "</answer> tags.")
_PAIR = re.compile(r"\(([-+]?\d{1,9}(?:\.\d{1,20})?),\s?([-+]?\d{1,9}(?:\.\d{1,20})?)\)", re.ASCII)
_MARKED = re.compile(r"<\|box_start\|>(.{1,100}?)<\|box_end\|>")
_THOUSAND = re.compile(r"\[(1000|\d{1,3}),\s?(1000|\d{1,3}),\s?(1000|\d{1,3}),\s?(1000|\d{1,3})\]", re.ASCII)


def name_of(row: Mapping[str, Any]) -> str:
    """The name of what a row asks for: its expression, else its labels, else its question."""
    return row.get("expression") or ", ".join(row.get("labels") or ()) or row.get("question") or ""


def first_box(_task: Any, sample: Sample) -> list[float] | None:
    """The target of a recipe with one box: the first box of the row; None if the object is absent."""
    return sample["boxes"][0]["box"] if sample.get("boxes") else None


def truths(task: Any, sample: Sample) -> list[dict[str, Any]]:
    """All boxes of a row with their labels, as detections without a score."""
    return labelled(task, sample.get("boxes") or (), name_of(sample.row))


def labelled(task: Any, entries: Sequence[Mapping[str, Any]], name: str = "") -> list[dict[str, Any]]:
    """Converts boxes of a row to detections without a score, [{"box", "label"}]. A box without a label gets the label
    `name`."""
    return [{"box": entry["box"], "label": label_of(task, entry.get("label") or name)} for entry in entries]


def label_of(task: Any, text: Any) -> str:
    """Normalizes a label for comparisons: to lower case with single spaces, unless task.label_case=kept."""
    return str(text) if task.label_case == "kept" else " ".join(str(text).casefold().split())


def _one_box_recipe(prompt: str, asked: str, read: Any, score: Any, write: Any, none: str = "None",
                    **other: Any) -> Recipe:
    def oracle(task: Any, sample: Sample) -> str:
        box = first_box(task, sample)
        return write(task, sample, [box]) if box else think_answer(none)
    return Recipe(prompt=prompt, asked=asked, read=read, score=score, write=write, target=first_box, **{
        "rewards": {"accuracy": 1.0, "format": 1.0}, "oracle": oracle, **other})


def _all_boxes_recipe(prompt: str, asked: str, read: Any, score: Any, write: Any, none: str = "",
                      **other: Any) -> Recipe:
    return Recipe(prompt=prompt, asked=asked, read=read, score=score, write=write, target=truths,
                  oracle=lambda task, sample: write(task, sample, [t["box"] for t in truths(task, sample)]) or none,
                  **{"rewards": {"accuracy": 1.0, "format": 1.0}, **other})


def _one_box(task: Any, sample: Sample, boxes: Sequence[Box], whole: bool = True) -> str:
    return ", ".join(format_box(in_model_units(task, sample, box, whole)) for box in boxes)


# --- one box ----------------------------------------------------------------------------------------------------------


def _soft_iou(task: Any, sample: Sample, answer: Answer) -> Parts:
    truth = first_box(task, sample)
    if truth is None:
        none = float(says_none(answer.final))
        return {"iou": none, "format": none}
    box = _read_first(task, sample, answer)
    return {"iou": iou(box, truth) if box else 0.0, "format": box_format(answer.final)}


def _read_first(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    return pixels(task, sample, parse_box(answer.final))


SOFT_IOU = _one_box_recipe(
    "Locate the {expression}. Answer with its box as [x1, y1, x2, y2].",
    "{question} Answer with the box as [x1, y1, x2, y2].", _read_first, _soft_iou,
    lambda task, sample, boxes: _one_box(task, sample, boxes, whole=False), rewards={"iou": 1.0, "format": 0.0},
    oracle=lambda task, sample: (
        _one_box(task, sample, [truth], whole=False) if (truth := first_box(task, sample)) else "none"))


def _read_rec(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    given = answer_tag(answer.text)
    if given is None:
        return None
    box = parse_integer_box(given)
    if box is None and not whole_units(task, sample):
        box = parse_box(given)
    return pixels(task, sample, box)


def _rec(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of VLM-R1 REC: `accuracy`, the IoU of the first box in the first <answer> tag, and `format`. If
    the object is absent, `accuracy` is 1 for an answer that says so, else 0."""
    truth = first_box(task, sample)
    if truth is None:
        return {"accuracy": float(says_none(answer_tag(answer.text) or "")),
                "format": think_answer_within(answer.text)}
    box = _read_rec(task, sample, answer)
    return {"accuracy": iou(box, truth) if box else 0.0,
            "format": think_answer_within(answer.text, lambda text: _braced(task, sample, text))}


def _braced(task: Any, sample: Sample, text: str) -> bool:
    between = text[text.find("{") + 1:text.rfind("}")] if "{" in text else ""
    return parse_integer_box(between) is not None or (
        "." in between and not whole_units(task, sample) and parse_box(between) is not None)


def _write_rec(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    return think_answer(f'{{"bbox_2d": {_one_box(task, sample, boxes)}}}')


VLM_R1_REC = _one_box_recipe(
    "Please provide the bounding box coordinate of the region this sentence describes: {expression}. "
    f"{_THINK} Output the final answer in JSON format.",
    f"{{question}} {_THINK} Output the final answer in JSON format.", _read_rec, _rec, _write_rec)


def _open(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of stage 3 of Curr-ReFT: `accuracy`, 1 if the first box in the answer has an IoU above .5, and
    `format`. If the object is absent, `accuracy` is 1 for an answer that says so, else 0."""
    truth = first_box(task, sample)
    if truth is None:
        return {"accuracy": float(says_none(answer_text(answer.text))), "format": think_answer_format(answer.text)}
    box = _read_open(task, sample, answer)
    framed = think_answer_format(answer.text) and _braced(task, sample, answer_text(answer.text))
    return {"accuracy": float(box is not None and iou(box, truth) > 0.5), "format": float(framed)}


def _read_open(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    return pixels(task, sample, parse_box(answer_text(answer.text)))


CURR_REFT_OPEN = replace(VLM_R1_REC, read=_read_open, score=_open)


# --- detection --------------------------------------------------------------------------------------------------------


def _detections(task: Any, sample: Sample, text: str | None) -> list[dict[str, Any]]:
    """The boxes (`bbox_2d`) and labels of the list in a text, a Python or JSON literal. The boxes are converted to
    pixels of the original image. [] if there is no such list."""
    detections = read_detections(read_literal(text)) if text is not None else []
    return [{"box": pixels(task, sample, d["box"]), "label": label_of(task, d["label"])} for d in detections]


def _read_ovd(task: Any, sample: Sample, answer: Answer) -> list[dict[str, Any]]:
    given = answer_tag(answer.text, "last")
    return _detections(task, sample, json_block(given) if given is not None else None)


OVD: Mapping[str, Callable[[Sequence[Detection], Sequence[Detection]], float]] = {
    "odLength": lambda detections, wanted: (
        average_precision(detections, wanted) * length_penalty(len(detections), len(wanted))),
    "od_ap": average_precision, "map": average_precision, "weighted_sum": weighted_sum,
    "od_ap50": lambda detections, wanted: average_precision(detections, wanted, (0.5,))}
"""VLM-R1's name of a reward (the value of accu_reward_method in its rows) -> function that rewards a list of boxes."""


def _ovd_method(task: Any, row: Mapping[str, Any]) -> str:
    """The name, in `OVD`, of the reward for a row: task.ovd_reward. With task.ovd_reward=row it is the row's
    accu_reward_method, or odLength if that field is missing or "default"."""
    meta = row.get("meta")
    method = row.get("accu_reward_method") or (meta.get("accu_reward_method") if isinstance(meta, Mapping) else None)
    if task.ovd_reward != "row" or method in (None, "default"):
        return "odLength" if task.ovd_reward == "row" else task.ovd_reward
    return str(method)


def _ovd_problem(task: Any, row: Mapping[str, Any]) -> str | None:
    method = _ovd_method(task, row)
    return None if method in OVD else (
        f"accu_reward_method={method[:80]!r} is not a reward for boxes ({', '.join(OVD)}): score such rows with "
        "task.name=qa, or choose one reward for all rows with task.ovd_reward")


def _ovd(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of VLM-R1 OVD: `accuracy`, the reward that `_ovd_method` chooses, and `format`. If the row has
    no boxes, the right answer is "None" or an empty list."""
    wanted, given = truths(task, sample), answer_tag(answer.text, "last")
    boxes = _read_ovd(task, sample, answer)
    if not wanted:  # an unparsable answer does not claim that nothing is there
        score = float(not boxes and given is not None and (says_none(given) or read_fenced(given) == []))
    else:
        score = OVD[_ovd_method(task, sample.row)](boxes, wanted)
    return {"accuracy": score, "format": think_answer_format(answer.text)}


def _as_json(task: Any, sample: Sample, boxes: Sequence[Box], labels: Sequence[str]) -> str:
    entries = [f'{{"bbox_2d": {_one_box(task, sample, [box])}, "label": "{label}"}}'
               for box, label in zip(boxes, labels, strict=True)]
    return f"```json\n[{', '.join(entries)}]\n```"


def _named(task: Any, sample: Sample, boxes: Sequence[Box]) -> list[str]:
    names = [t["label"] for t in truths(task, sample)] or [label_of(task, name_of(sample.row))]
    return [names[i % len(names)].replace('"', "'") for i in range(len(boxes))]


def _write_ovd(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    return think_answer(_as_json(task, sample, boxes, _named(task, sample, boxes)) if boxes else "None")


_OVD_FORM = ("Output each detected target's bbox coordinates in JSON format, as ```json\n"
             '[{"bbox_2d": [x1, y1, x2, y2], "label": "target name"}]\n```. If there are no such targets in the image, '
             f"simply respond with None. {_THINK}")
VLM_R1_OVD = _all_boxes_recipe(
    "Please carefully check the image and detect the following objects: [{categories}]. " + _OVD_FORM,
    "{question} " + _OVD_FORM, _read_ovd, _ovd, _write_ovd, problem=_ovd_problem)


def _read_griffon(task: Any, sample: Sample, answer: Answer) -> list[dict[str, Any]]:
    """The boxes of the JSON list in an answer; if there is no list, the boxes written as four numbers 0..1000. Boxes
    with exchanged corners are dropped."""
    text = answer_text(answer.text)
    detections = _detections(task, sample, json_block(text) or text)
    if not detections:
        detections = [{"box": pixels(task, sample, [float(v) for v in plain.groups()]), "label": ""}
                      for plain in islice(_THOUSAND.finditer(text), MOST)]
    labels = [label_of(task, name) for name in sample.get("labels") or ()]
    known = dict.fromkeys([*labels, *(t["label"] for t in truths(task, sample))])
    first = next(iter(known), "")
    return [{"box": d["box"], "label": d["label"] if d["label"] in known else first} for d in detections
            if d["box"][0] < d["box"][2] and d["box"][1] < d["box"][3]]


def _griffon(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of Vision-R1: `precision`, the mean quality of the matched boxes; `recall`, the share of objects
    found; and `format`. If the image does not contain the requested object, or if the answer has no box, `precision`
    and `recall` are both 1 if the answer rightly says that there is no such object, else 0."""
    wanted, boxes = truths(task, sample), _read_griffon(task, sample, answer)
    if not wanted or not boxes:
        text = answer_text(answer.text)
        silent = not answer.text.strip()  # an empty answer means no boxes; thinking without an answer does not
        empty = float(not wanted and not boxes and (silent or says_none(text) or read_fenced(text) == []))
        return {"precision": empty, "recall": empty,
                "format": empty if not wanted else _griffon_format(answer_text(answer.text))}
    low, high, least, outer = _bars(task, answer.step)
    quality = match_quality(boxes, wanted)
    recalled = sum(clipped(q, least, least) for q in quality) / len(wanted)
    return {"precision": sum(clipped(q, low, high) for q in quality) / len(quality),
            "recall": clipped(recalled, *outer), "format": _griffon_format(answer_text(answer.text))}


def _bars(task: Any, step: int) -> tuple[float, float, float, tuple[float, float]]:
    """The thresholds of Vision-R1 at a training step, as (low, high, least, (lowest, highest)). For the part
    `precision`, the quality of a box counts as 0 below `low` and as 1 above `high`. For the part `recall`, only boxes
    of at least the quality `least` count; a recall below `lowest` counts as 0, and above `highest` as 1."""
    if not task.progressive:
        return 0.0, 1.0, 0.5, (0.0, 1.0)
    return (0.5, 0.75, 0.5, (0.5, 0.75)) if step < task.switch_step else (0.75, 0.9, 0.75, (0.5, 0.75))


def _griffon_format(text: str) -> float:
    given = read_fenced(text)
    return float(isinstance(given, list) and bool(given) and len(read_detections(given)) == len(given))


def _write_griffon(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    return _as_json(task, sample, boxes, _named(task, sample, boxes))


VISION_R1_GRIFFON = _all_boxes_recipe(
    "Locate every item from the category list in the image and output the coordinates in JSON format. The category "
    "set includes {categories}.", "{question} Output the coordinates in JSON format.", _read_griffon, _griffon,
    _write_griffon, rewards={"precision": 1.0, "recall": 1.0, "format": 1.0},
    outcome={"precision": 0.5, "recall": 0.5})


def _read_positions(task: Any, sample: Sample, answer: Answer) -> list[dict[str, Any]]:
    out: dict[tuple[float, ...], dict[str, Any]] = {}
    for d in read_detections(read_literal(answer_tag(answer.text) or ""), "Position"):
        score = d["entry"].get("Confidence")
        if is_number(score):
            box, score = pixels(task, sample, d["box"]) or [], min(max(float(score), 0.0), 1.0)
            out.setdefault((*box, score), {"box": box, "label": label_of(task, name_of(sample.row)), "score": score})
    return list(out.values())


def _visual_rft(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of Visual-RFT detection: `iou`, `confidence` and `format`. `iou` is the sum of IoUs divided by
    the larger of the numbers of boxes and objects; `confidence` is the calibration of the stated confidences."""
    wanted, boxes = truths(task, sample), _read_positions(task, sample, answer)
    framed = think_answer_format(answer.text)
    if not boxes:
        none = float(not wanted and says_none(answer_tag(answer.text) or ""))
        return {"iou": none, "confidence": none, "format": framed}
    matched = greedy_matches(boxes, wanted)
    return {"iou": sum(matched) / max(len(wanted), len(boxes)), "confidence": calibration(boxes, matched),
            "format": framed}


def _write_positions(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    entries = [f"{{'Position': {_one_box(task, sample, [box])}, 'Confidence': 1.0}}" for box in boxes]
    return think_answer(f"[{', '.join(entries)}]" if boxes else "No Objects")


VISUAL_RFT_DETECTION = _all_boxes_recipe(
    asked="{question} Provide the bounding boxes (between 0 and 1000, integer) and confidence (between 0 and 1, with "
          "two decimal places); where there is no such object, return 'No Objects'. Output the thinking process in "
          "<think> </think> and the final answer in <answer> </answer> tags, as [{'Position': [x1, y1, x2, y2], "
          "'Confidence': number}, ...].",
    prompt="Detect all objects belonging to the category '{categories}' in the image, and provide the bounding boxes "
           "(between 0 and 1000, integer) and confidence (between 0 and 1, with two decimal places).\nIf no object "
           "belonging to the category '{categories}' in the image, return 'No Objects'.\nOutput the thinking process "
           "in <think> </think> and final answer in <answer> </answer> tags. The output answer format should be as "
           "follows:\n<think> ... </think> <answer>[{'Position': [x1, y1, x2, y2], 'Confidence': number}, ...]"
           "</answer>\nPlease strictly follow the format.",
    rewards={"iou": 1.0, "confidence": 1.0, "format": 1.0}, read=_read_positions, score=_visual_rft,
    write=_write_positions)


def _read_marked(task: Any, sample: Sample, answer: Answer) -> list[dict[str, Any]]:
    label = label_of(task, name_of(sample.row))
    boxes = [_corners(m[1]) for m in islice(_MARKED.finditer(answer_text(answer.text)), MOST)]
    return [{"box": pixels(task, sample, box), "label": label} for box in boxes if box]


def _corners(text: str) -> list[float] | None:
    pairs = _PAIR.findall(text)
    return [float(v) for pair in pairs for v in pair] if len(pairs) == 2 else None


def _perception(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of Perception-R1: `accuracy`, the squared IoU, and `format`. With several objects or boxes,
    `accuracy` is the sum of the squared IoUs of the best assignment, divided by the larger of the numbers of objects
    and boxes."""
    wanted, boxes = truths(task, sample), _read_marked(task, sample, answer)
    squared = [[iou(d["box"], t["box"]) ** 2 for t in wanted] for d in boxes]
    if not wanted:
        none = float(not boxes and says_none(answer_text(answer.text)))
        return {"accuracy": none, "format": none}
    text = answer_text(answer.text)
    return {"accuracy": mean_matched(squared, len(boxes), len(wanted)),
            "format": float(bool(boxes) and not _MARKED.sub("", text).strip(" \n,"))}


def _write_marked(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    written = [[format_box([v])[1:-1] for v in in_model_units(task, sample, box, whole=True)] for box in boxes]
    return ", ".join(f"<|box_start|>({a},{b}),({c},{d})<|box_end|>" for a, b, c, d in written)


PERCEPTION_R1 = _all_boxes_recipe(
    "Output the bounding box of the {categories} in the image.", "{question}", _read_marked, _perception,
    _write_marked, none="none", outcome={"accuracy": 0.25})  # squared IoU


def _read_lisa(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    return pixels(task, sample, _corners(answer_tag(answer.text) or "") or parse_box(answer_tag(answer.text) or ""))


def _lisa(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of Visual-RFT's reasoning grounding: `accuracy`, the GIoU of the box, and `format`. A negative
    GIoU counts as 0, so that an answer without a box never earns more than an attempt."""
    truth, box = first_box(task, sample), _read_lisa(task, sample, answer)
    if truth is None:
        score = float(says_none(answer_tag(answer.text) or ""))
    else:
        score = max(0.0, giou(box, truth)) if box else 0.0
    return {"accuracy": score, "format": think_answer_format(answer.text)}


REASONING = _one_box_recipe(
    f"{{expression}}\n{_THINK} Output the final answer as the box [x1, y1, x2, y2].",
    f"{{question}}\n{_THINK} Output the final answer as the box [x1, y1, x2, y2].", _read_lisa, _lisa,
    lambda task, sample, boxes: think_answer(_one_box(task, sample, boxes)), none="none")
