"""Recipes of the gui task that locate one element by a box or a point, including two for rows without labels."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlrl.rewards.boxes import box_format, centre, edge_similarity, format_box, iou, parse_box
from vlrl.rewards.literals import decimals, first_object, numbers_of, read_fenced, read_literal
from vlrl.rewards.points import distance_reward, gaussian_coverage, gaussian_point, inside
from vlrl.rewards.regions import clip_to_image, region_consistency, region_vote
from vlrl.rewards.text import answer_text, between, said, think_answer_within
from vlrl.task.recipes import Box, Recipe, in_model_units, pixels, whole_units
from vlrl.types import Answer, Parts, Sample

_POINT = re.compile(r"[\[(]\s*([-+]?\d{1,9}(?:\.\d{1,20})?)\s*,\s*([-+]?\d{1,9}(?:\.\d{1,20})?)\s*[\])]", re.ASCII)


def element(_task: Any, sample: Sample) -> list[float] | None:
    """The box of the target element: the row's `box`, else the box of its `action`; None if neither exists."""
    return sample.get("box") or (sample.get("action") or {}).get("box")


def needs_box(_task: Any, row: Mapping[str, Any]) -> str | None:
    if element(_task, Sample(id="", row=row)) is None:
        return ("the row has no box, and task.recipe scores against the box of the target element; rows without one "
                "are for task.recipe=gui_rcpo or region_vote, rows with an action for ui_r1, gui_r1, infigui_r1 or "
                "glm_v_androidworld")
    return None


def middle(place: Box) -> tuple[float, float]:
    """The centre of a box; a point is returned unchanged."""
    return (place[0], place[1]) if len(place) == 2 else centre(place)


def _write_box(task: Any, sample: Sample, boxes: Sequence[Box], whole: bool = False) -> str:
    return ", ".join(format_box(in_model_units(task, sample, box, whole)) for box in boxes)


def _oracle_box(task: Any, sample: Sample) -> str | None:
    box = element(task, sample)
    return None if box is None else task.used.write(task, sample, [box])


def _recipe(prompt: str, rewards: Mapping[str, float], read: Any, score: Any, write: Any, **other: Any) -> Recipe:
    return Recipe(prompt=prompt, rewards=rewards, read=read, score=score, write=write, **{
        "target": element, "oracle": _oracle_box, "problem": needs_box, **other})


def _read_place(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    box = parse_box(answer.final)
    if box is None and (match := _POINT.search(answer.final)):
        box = [float(v) for v in match.groups()]
    return pixels(task, sample, box)


def _element(task: Any, sample: Sample, answer: Answer) -> Parts:
    place, truth = _read_place(task, sample, answer), element(task, sample)
    if place is None or truth is None:
        return {"hit": 0.0, "iou": 0.0, "format": 0.0}
    return {"hit": float(inside(middle(place), truth)), "iou": iou(place, truth), "format": box_format(answer.final)}


ELEMENT = _recipe("Locate the element: {instruction}. Answer with its box as [x1, y1, x2, y2].",
                  {"hit": 1.0, "iou": 1.0, "format": 0.0}, _read_place, _element, _write_box)


def write_point(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    """The centre of the first box, written as `[x, y]`."""
    return format_box(in_model_units(task, sample, middle(boxes[0])))


CLICK = _recipe("Where to click: {instruction}. Answer with the point as [x, y].", {"hit": 1.0, "format": 0.1},
                _read_place, lambda task, sample, answer: {
                    "hit": _element(task, sample, answer)["hit"],
                    "format": float(_POINT.fullmatch(answer.final.strip()) is not None)}, write_point)


# --- GUI-G1, GUI-G2, SE-GUI -------------------------------------------------------------------------------------------


def _read_g1(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    entry = first_object(read_fenced(answer_text(answer.text)))
    return pixels(task, sample, numbers_of(entry.get("bbox_2d"), 4)) if entry else None


def _g1(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of GUI-G1: `hit`, 1 if the centre of the box lies in the target, else 0; `iou`; and `box`, how
    close the four sides are to the target's. GUI-G1's difficulty weight of a row scales only the loss, not these
    parts."""
    box, truth = _read_g1(task, sample, answer), element(task, sample)
    if box is None or truth is None:
        return {"hit": 0.0, "iou": 0.0, "box": 0.0}
    return {"hit": float(inside(centre(box), truth)), "iou": iou(box, truth),
            "box": edge_similarity(box, truth, sample["width"], sample["height"])}


def _write_g1(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    entries = [f'{{"bbox_2d": {format_box(in_model_units(task, sample, box))}, "label": "element"}}' for box in boxes]
    return f"```json\n[{', '.join(entries)}]\n```"


GUI_G1 = _recipe("Grounding instruction is: {instruction}. Report the bbox coordinates in JSON format.",
                 {"hit": 1.0, "iou": 0.25, "box": 0.125}, _read_g1, _g1, _write_g1)


def _read_g2(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    return pixels(task, sample, parse_box(answer_text(answer.text)))


def _g2(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of GUI-G2: the Gaussian terms `point` and `coverage`, rounded to three digits, and `format`, 1
    if the answer is only a box of integers."""
    box, truth = _read_g2(task, sample, answer), element(task, sample)
    framed = box_format(said(answer), integers=whole_units(task, sample))
    if box is None or truth is None:
        return {"point": 0.0, "coverage": 0.0, "format": framed}
    return {"point": round(gaussian_point(box, truth), 3), "coverage": round(gaussian_coverage(box, truth), 3),
            "format": framed}


GUI_G2 = _recipe(
    "Outline the position corresponding to the instruction: {instruction}. The output should be only [x1,y1,x2,y2].",
    {"point": 1.0, "coverage": 1.0, "format": 1.0}, _read_g2, _g2, partial(_write_box, whole=True))


def _read_tool_call(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    text = answer_text(answer.text)
    call = between(text, "<tool_call>", "</tool_call>")
    call = first_object(read_literal(text[text.find("{"):text.rfind("}") + 1] if call is None else call))
    given = call.get("arguments") if call else None
    return pixels(task, sample, numbers_of(given.get("coordinate"), 2)) if isinstance(given, dict) else None


def _se_gui(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of SE-GUI: `point` and `format`. `point` is a term that decreases with the squared distance to
    the target's centre, plus 1 if the point lies in the target."""
    point, truth = _read_tool_call(task, sample, answer), element(task, sample)
    paid = distance_reward(point, truth, sample["width"], sample["height"]) if point and truth else 0.0
    return {"point": paid, "format": max(think_answer_within(answer.text), _one_call(said(answer)))}


def _one_call(text: str) -> float:
    once = text.count("<tool_call>") == text.count("</tool_call>") == 1
    call = between(text, "<tool_call>", "</tool_call>") if once else None
    return float(call is not None and isinstance(read_literal(call), dict) and _POINT.search(call) is not None)


def _write_tool_call(task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    return ('<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": '
            f"{write_point(task, sample, boxes)}}}}}</tool_call>")


SE_GUI = _recipe(
    'Click on the element for this instruction: {instruction}. Answer with <tool_call>{"name": "computer_use", '
    '"arguments": {"action": "left_click", "coordinate": [x, y]}}</tool_call>.', {"point": 1.0, "format": 1.0},
    _read_tool_call, _se_gui, _write_tool_call, outcome={"point": 1.0})


# --- without labels ---------------------------------------------------------------------------------------------------


def _read_region(task: Any, sample: Sample, answer: Answer) -> list[float] | None:
    """The region of the image that an answer votes for, in pixels: a box if the answer has four numbers, the square
    around a point if it has two. None for any other count of numbers, and for a region outside the image."""
    place = pixels(task, sample, decimals(answer_text(answer.text), most=5))
    if place is None or len(place) not in (2, 4):
        return None
    if len(place) == 2:
        x, y, reach = *place, task.point_reach
        place = [x - reach, y - reach, x + reach, y + reach]
    region = clip_to_image(place, sample["width"], sample["height"])
    return [float(v) for v in region] if region else None


def _vote(task: Any, sample: Sample, answers: Sequence[Answer], _services: Any) -> list[Parts]:
    """The part `vote` of each answer in a group (GUI-RC as a reward). Each answer votes for a region of the image. The
    part is 1 if the centre of the answer's region lies in the area with the most votes, else 0."""
    regions = [_read_region(task, sample, answer) for answer in answers]
    agreed = region_vote([r for r in regions if r])
    return [{"vote": float(bool(r and agreed and inside(centre(r), agreed)))} for r in regions]


def _unlabelled(part: str, group: Any) -> Recipe:
    return _recipe(
        "Locate the element that this instruction is about: {instruction}. Output its box as [x1, y1, x2, y2].",
        {part: 1.0}, _read_region, lambda _task, _sample, _answer: {}, _write_box,
        oracle=lambda _task, _sample: None, problem=None, group=group)


GUI_RCPO = _unlabelled("consensus", lambda task, sample, answers, _services: [
    {"consensus": value}  # the mean vote over a region, as a share of the largest vote of the group
    for value in region_consistency([_read_region(task, sample, answer) for answer in answers])])
REGION_VOTE = _unlabelled("vote", _vote)
