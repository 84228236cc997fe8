"""Recipes of the gui task whose answer is an action: its type, its position, and its text or direction."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vlrl.rewards.boxes import centre, iou, is_number
from vlrl.rewards.literals import decimals, first_object, numbers_of, read_literal
from vlrl.rewards.points import inside
from vlrl.rewards.text import answer_tag, answer_text, between, think_answer_format, token_f1
from vlrl.task.recipes import Box, Recipe, in_model_units, pixels, whole_units
from vlrl.types import Answer, Parts, Sample

from ._gui import element, middle, write_point
from ._shared import think_answer

CLICKS = ("click", "tap", "left_click", "long_press")
_GUI_R1_TEXTS = ("type", "input_text", "select", "scroll")
_TEXTS = (*_GUI_R1_TEXTS, "open_app")
_DIRECTIONS = ("up", "down", "left", "right")
_TEXT_KEYS = ("text", "input_text", "direction", "app_name")
_NO_TEXT = "no input text"
_POINT_RADIUS = 140
_GLM_FORM = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL | re.IGNORECASE)
_GLM_KEYS = {"type": "action_type", "box": "box_2d", "bbox_2d": "box_2d"}
_GLM_TEXTS = {"open_app": "app_name", "scroll": "direction", "input_text": "text", "type": "text"}
_POINT_SHARE = 0.01
_BOX_START, _BOX_END = "<|begin_of_box|>", "<|end_of_box|>"


def wanted(_task: Any, sample: Sample) -> dict[str, Any]:
    """The right action of a row: its type, and its box, point and text where the row has them. For a row with only a
    box, the action is a click on that box."""
    action = sample.get("action") or {"type": "click"}
    point = next((action[k] for k in ("point", "coordinate") if action.get(k)), None)
    if point is None and is_number(action.get("x")) and is_number(action.get("y")):
        point = [action["x"], action["y"]]
    text = next((action[k] for k in _TEXT_KEYS if action.get(k)), None)
    fields = {"type": str(action["type"]), "box": element(_task, sample), "point": point,
              "text": None if text is None else str(text)}
    return {name: value for name, value in fields.items() if value is not None}


def action_problem(task: Any, row: Mapping[str, Any]) -> str | None:
    """Describes what a row lacks for a recipe whose answer is an action; None if it lacks nothing."""
    if row.get("action") is None and row.get("box") is None:
        return "the row has neither an action nor a box, so there is nothing to predict"
    right = wanted(task, Sample(id="", row=row))
    if right["type"] in CLICKS and "box" not in right and "point" not in right:
        return f"action type={right['type']!r} needs the row's box, or a point in the action"
    return None


def _lower(value: Any) -> str:
    return str(value).strip().casefold()


def _is_hit(right: Mapping[str, Any], point: Sequence[float] | None, strict: bool = False) -> bool:
    """Whether a point lies in the target's box; with `strict`, the box's edge does not count. For a row without a box:
    whether the point is less than 140 units (pixels or thousandths of the screen) away from the target's point."""
    if point is None:
        return False
    if "box" in right:
        return inside(point, right["box"], strict)
    x, y = right["point"]
    return (point[0] - x) ** 2 + (point[1] - y) ** 2 < _POINT_RADIUS ** 2


def step_success(task: Any, right: Mapping[str, Any], given: Mapping[str, Any] | None, strict: bool = False,
                 texts: Sequence[str] = _TEXTS) -> bool:
    """Whether a parsed action (`given`) has the type and argument of the right action (`right`). A click must lie in
    the target; with `strict`, the target's edge does not count. The text of an action whose type is in `texts` must
    have a word F1 of at least .5."""
    if given is None or _lower(given["type"]) != _lower(right["type"]):
        return False
    if right["type"] in CLICKS:
        return _is_hit(right, given.get("point"), strict)
    if right["type"] in texts and right.get("text"):
        return bool(given.get("text")) and token_f1(
            given["text"], right["text"], contained=task.word_rule == "contained") >= 0.5
    return True


def _read_list(point_key: str, task: Any, sample: Sample, answer: Answer) -> dict[str, Any] | None:
    return _action_of(task, sample, read_literal(answer_tag(answer.text) or ""), (point_key,))


def _action_of(task: Any, sample: Sample, value: Any, point_keys: Sequence[str]) -> dict[str, Any] | None:
    entry = first_object(value)
    if entry is None or not isinstance(entry.get("action"), str):
        return None
    text = next((entry[k] for k in _TEXT_KEYS if isinstance(entry.get(k), str)), "")
    point = next((entry[k] for k in point_keys if k in entry), None)
    fields = {"type": entry["action"][:100], "point": pixels(task, sample, numbers_of(point, 2)),
              "text": "" if text == _NO_TEXT else text[:1000]}
    return {name: part for name, part in fields.items() if part}


def _write_list(point_key: str, task: Any, sample: Sample, boxes: Sequence[Box]) -> str:
    return _tagged(f"[{{'action': 'click', '{point_key}': {write_point(task, sample, boxes)}, 'input_text': "
                   f"'{_NO_TEXT}'}}]")


def _oracle_list(point_key: str, task: Any, sample: Sample) -> str:
    right = wanted(task, sample)
    place = right.get("box") or right.get("point")
    written = in_model_units(task, sample, middle(place)) if place else [-100, -100]
    point = [int(v) if whole_units(task, sample) or not place else v for v in written]
    return _tagged(json.dumps([{"action": right["type"], point_key: point, "input_text": right.get("text", _NO_TEXT)}]))


def _list_format(point_key: str) -> dict[str, Any]:
    return {"read": partial(_read_list, point_key), "oracle": partial(_oracle_list, point_key),
            "write": partial(_write_list, point_key), "target": wanted, "problem": action_problem}


def _tagged(answer: str) -> str:
    return think_answer(answer, "I look at the screen.")


def step_metrics(task: Any, sample: Sample, given: Any) -> dict[str, float]:
    """The metrics of an answer: `type_acc` and `step_success` for a row with an action, `click_acc` for a row with only
    an element. If the row has a point and no box, a click within 14 % of the screen size of that point is right, as
    OS-Atlas (2410.23218) and GUI-R1 (2504.10458) evaluate AndroidControl."""
    right, action = wanted(task, sample), in_pixels(task, sample, given)
    if isinstance(action, list):  # a bare place
        return {"click_acc": float(_is_hit(right, middle(action)))}
    if not sample.get("action"):
        hit = action is not None and action["type"] in CLICKS and _is_hit(right, action.get("point"))
        return {"click_acc": float(hit)}
    same = action is not None and _lower(action["type"]) == _lower(right["type"])
    if action is not None and "box" not in right:
        right, action = _in_thousandths(sample, right), _in_thousandths(sample, action)
    return {"type_acc": float(same), "step_success": float(step_success(task, right, action))}


def _in_thousandths(sample: Sample, action: Mapping[str, Any]) -> dict[str, Any]:
    """The action with its point in thousandths of the screen's width and height. In this unit 14 % of the screen is
    _POINT_RADIUS."""
    point = action.get("point")
    return dict(action) if not point else {
        **action, "point": [1000 * point[0] / sample["width"], 1000 * point[1] / sample["height"]]}


def in_pixels(task: Any, sample: Sample, given: Any) -> Any:
    """Returns the parsed answer `given` with positions in pixels. An action in GLM's format is converted to {"type",
    "text"}; if it has a box, "box" and the centre of the box, "point", are added. Any other answer is in pixels
    already and is returned unchanged."""
    if not isinstance(given, dict) or "type" in given:
        return given
    box = pixels(task, sample, numbers_of(given.get("box_2d"), 4))
    text = next((given[k] for k in _TEXT_KEYS if isinstance(given.get(k), str)), "")
    place = {"box": box, "point": list(centre(box))} if box else {}
    return {"type": str(given.get("action_type", ""))[:100], "text": text, **place}


# --- UI-R1, GUI-R1 ----------------------------------------------------------------------------------------------------


def _ui_r1(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of UI-R1: `type`, 1 for exactly the right type; `coordinate`, 1 for a click in the target and
    for any other action of the right type; and `format`."""
    right, given = wanted(task, sample), task.used.read(task, sample, answer)
    same = given is not None and given["type"].strip() == right["type"].strip()
    point = given.get("point") if given else None
    hit = same and (right["type"] not in CLICKS or _is_hit(right, point and [int(v) for v in point]))
    return {"type": float(same), "coordinate": float(hit), "format": think_answer_format(answer.text)}


UI_R1 = Recipe(
    prompt="In this UI screenshot, I want to perform the command '{instruction}'. Please provide the action to perform "
           "(enumerate in ['click', 'scroll', 'open_app', 'navigate_back', 'input_text']) and the coordinate where the "
           "cursor is moved to (integer) if click is performed. Output the thinking process in <think> </think> and "
           "final answer in <answer> </answer> tags. The output answer format should be as follows:\n<think> ... "
           "</think> <answer>[{'action': enum['click', 'scroll', 'open_app', 'navigate_back', 'input_text'], "
           "'coordinate': [x, y]}]</answer>\nPlease strictly follow the format.",
    rewards={"type": 1.0, "coordinate": 1.0, "format": 1.0}, score=_ui_r1,
    outcome={"type": 0.5, "coordinate": 0.5}, **_list_format("coordinate"))


def _gui_r1(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of GUI-R1: `accuracy` of the action, and `format`. The name of an opened app is not compared."""
    given = task.used.read(task, sample, answer)
    return {"accuracy": float(step_success(task, wanted(task, sample), given, strict=True, texts=_GUI_R1_TEXTS)),
            "format": float(bool(think_answer_format(answer.text)) and _gui_r1_form(task, sample, answer))}


def _gui_r1_form(task: Any, sample: Sample, answer: Answer) -> bool:
    entries = read_literal(answer_tag(answer.text) or "")
    return isinstance(entries, list) and bool(entries) and all(_is_gui_r1_action(task, sample, e) for e in entries)


def _is_gui_r1_action(task: Any, sample: Sample, entry: Any) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("action", "input_text")):
        return False
    point, action, text = numbers_of(entry.get("point"), 2), _lower(entry["action"]), _lower(entry["input_text"])
    if point is None or not (all(isinstance(v, int) for v in entry["point"]) or not whole_units(task, sample)):
        return False
    if action in ("type", "select", "open_app"):
        return text not in ("", _NO_TEXT)
    return action != "scroll" or text in _DIRECTIONS


_GUI_R1_ACTIONS = ("['complete', 'close/delete', 'press_home', 'click', 'press_back', 'type', 'select', 'scroll', "
                   "'enter']")
GUI_R1 = Recipe(
    prompt="You are GUI-R1, a reasoning GUI Agent Assistant. In this UI screenshot, I want you to continue executing "
           "the command '{instruction}', with the action history being '{history}'.\nPlease provide the action to "
           f"perform (enumerate from {_GUI_R1_ACTIONS}), the point where the cursor is moved to (integer) if a click "
           "is performed, and any input text required to complete the action.\nOutput the thinking process in <think> "
           "</think> tags, and the final answer in <answer> </answer> tags as follows:\n<think> ... </think> <answer>"
           f"[{{'action': enum{_GUI_R1_ACTIONS}, 'point': [x, y], 'input_text': 'no input text [default]'}}]</answer>",
    rewards={"accuracy": 0.8, "format": 0.2}, score=_gui_r1, **_list_format("point"))


# --- InfiGUI-R1 -------------------------------------------------------------------------------------------------------


def _read_infigui(task: Any, sample: Sample, answer: Answer) -> Any:
    """The parsed answer: an action if the row has an action, else a box or point in pixels."""
    text = answer_text(answer.text)
    call = between(text, "<tool_call>", "</tool_call>")
    value = read_literal(text if call is None else call)
    entry = first_object(value)
    if entry and isinstance(entry.get("arguments"), dict):
        value = entry = entry["arguments"]
    if sample.get("action"):
        return _action_of(task, sample, value, ("coordinate", "point"))
    if entry:
        value = next((entry[k] for k in ("point_2d", "coordinate", "bbox_2d") if k in entry), None)
    place = numbers_of(value, 2) or numbers_of(value, 4)
    if place is None and not entry:
        numbers = decimals(text, most=5)
        place = numbers if len(numbers) in (2, 4) else None
    return pixels(task, sample, place)


def _infigui(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of InfiGUI-R1: `format`, and `accuracy`, which is 0 unless the format is right. The paper's
    judge of sub-goals is not implemented."""
    framed = _thinks_first(answer.text)
    given = _read_infigui(task, sample, answer) if framed else None
    return {"accuracy": _infigui_accuracy(task, sample, given) if given else 0.0, "format": float(framed)}


def _infigui_accuracy(task: Any, sample: Sample, given: Any) -> float:
    right = wanted(task, sample)
    if not sample.get("action"):
        return float(_is_hit(right, given)) if len(given) == 2 else min(1.0, iou(given, right["box"]) / task.iou_full)
    if _lower(given["type"]) != _lower(right["type"]):
        return 0.0
    if right["type"] in CLICKS:
        exact = _is_hit(right, given.get("point"))
    else:
        exact = _lower(given.get("text", "")) == _lower(right.get("text", ""))
    return 0.2 + 0.8 * exact


def _thinks_first(text: str) -> bool:
    if "<answer>" in text or "</answer>" in text:
        return bool(think_answer_format(text))
    head, closed, rest = text.strip().partition("</think>")
    return bool(closed and rest.strip()) and head.startswith("<think>") and text.count("<think>") == 1 \
        and "</think>" not in rest


def _infigui_oracle(task: Any, sample: Sample) -> str:
    right = wanted(task, sample)
    place = right.get("box") or right.get("point")
    point = in_model_units(task, sample, middle(place)) if place else None
    if not sample.get("action"):
        return _tagged(json.dumps(point))
    action = {"action": right["type"], "coordinate": point, "text": right.get("text")}
    return _tagged(json.dumps({name: value for name, value in action.items() if value is not None}))


INFIGUI_R1 = Recipe(
    prompt="The instruction: {instruction}\nThe steps so far: {history}\nThink first in <think> </think> tags. Then "
           "answer in <answer> </answer> tags: for an action {'action': type, 'coordinate': [x, y], 'text': text}, for "
           "an element alone its point [x, y].",
    rewards={"format": 0.1, "accuracy": 0.9}, read=_read_infigui, score=_infigui, target=wanted,
    oracle=_infigui_oracle, problem=action_problem,
    write=lambda task, sample, boxes: (
        _tagged(f"{{'action': 'click', 'coordinate': {write_point(task, sample, boxes)}}}") if sample.get("action")
        else _tagged(write_point(task, sample, boxes))))


# --- GLM-4.5V, AndroidWorld -------------------------------------------------------------------------------------------


def _glm_answer(text: str) -> str | None:
    r"""The text between GLM's box tags in an answer; None if the answer has the wrong format. The answer must have its
    thinking in <think>, followed by an <answer> with exactly one pair of box tags. Nested tags and \boxed are not
    allowed."""
    match = _GLM_FORM.fullmatch(text)
    if not match or text.lower().count("<think>") != 1 or text.lower().count("<answer>") != 1 or "\\boxed{" in match[2]:
        return None
    answer = match[2]
    if text.lower().count("</think>") != 1 or text.lower().count("</answer>") != 1 or not (
            answer.count(_BOX_START) == answer.count(_BOX_END) == 1):
        return None
    return between(answer, _BOX_START, _BOX_END)


def _read_glm(_task: Any, _sample: Sample, answer: Answer) -> dict[str, Any] | None:
    given = read_literal(_glm_answer(answer.text) or "")
    if not isinstance(given, dict):
        return None
    entries: dict[str, Any] = given
    return {_GLM_KEYS.get(name, name[:100]): _tame(value) for name, value in entries.items()}


def _tame(value: Any) -> Any:
    if isinstance(value, str):
        return value[:10_000]
    return value if is_number(value) or numbers_of(value, 4) else None


def _glm_right(task: Any, sample: Sample) -> dict[str, Any]:
    """The right action in the format of GLM's prompt: `action_type`, `box_2d`, the text under the key that the prompt
    defines for this action type, and the other fields of the row's action."""
    action = dict(sample.get("action") or {"type": "click"})
    kind = action.pop("type")
    for place in ("box", "point", "coordinate", "x", "y"):
        action.pop(place, None)
    name = _GLM_TEXTS.get(str(kind).lower())
    if name and (text := action.get(name) or wanted(task, sample).get("text")):
        action = {**{key: value for key, value in action.items() if key not in _TEXT_KEYS}, name: text}
    box = _glm_box(task, sample)
    placed = {"box_2d": [in_model_units(task, sample, box, whole=True)]} if box else {}
    return {"action_type": kind, **action, **placed}


def _glm_box(task: Any, sample: Sample) -> Box | None:
    """The visible part of the target's box. For a click without a box: a square around the click's point that extends a
    hundredth of the screen's longer side in each direction. None for any other action without a box."""
    right, (width, height) = wanted(task, sample), (sample["width"], sample["height"])
    box = right.get("box")
    if box is None and right["type"] in CLICKS:
        (x, y), reach = right["point"], max(2.0, _POINT_SHARE * max(width, height))
        box = [x - reach, y - reach, x + reach, y + reach]
    return box and [max(0, box[0]), max(0, box[1]), min(width, box[2]), min(height, box[3])]


def _glm(task: Any, sample: Sample, answer: Answer) -> Parts:
    """GLM-4.5V's AndroidWorld reward, as the part `accuracy`. It is 0 if the keys of the answer are not exactly the
    right keys, else the product of the scores of the values."""
    given, right = _read_glm(task, sample, answer), _glm_right(task, sample)
    if given is None or given.keys() != right.keys():
        return {"accuracy": 0.0}
    product = 1.0
    for key, value in right.items():
        product *= _glm_value(task, sample, key, given[key], value)
    return {"accuracy": product}


def _glm_value(task: Any, sample: Sample, key: str, given: Any, right: Any) -> float:
    if key == "box_2d":
        return _glm_place(task, sample, numbers_of(given, 4))
    if given == right:
        return 1.0
    if key == "text" and isinstance(given, str) and isinstance(right, str):
        from rapidfuzz.distance import LCSseq
        return LCSseq.normalized_similarity(given, right)
    return 0.0


def _glm_place(task: Any, sample: Sample, box: Sequence[float] | None) -> float:
    """The score of an answered box: its IoU with the target's box. If the row has only a point, the score is 1 if the
    centre of the answered box lies within 140 pixels of the point, else 0 (a rule of this project, not of GLM). A
    box scores 0 unless its coordinates are integers (0..999 in GLM's convention) with ordered corners on the screen."""
    if box is None or (whole_units(task, sample) and not all(v.is_integer() for v in box)):
        return 0.0
    right, last = wanted(task, sample), task.coordinates.from_original(sample, [sample["width"], sample["height"]])
    if not (0 <= box[0] < box[2] <= last[0] and 0 <= box[1] < box[3] <= last[1]):
        return 0.0
    own_box = pixels(task, sample, box) or []
    return iou(own_box, _glm_box(task, sample) or []) if "box" in right else float(_is_hit(right, centre(own_box)))


def _write_glm(action: Mapping[str, Any]) -> str:
    return _tagged(f"{_BOX_START}{json.dumps(action)}{_BOX_END}")


GLM_V_ANDROIDWORLD = Recipe(
    prompt="You are an agent who can operate an Android phone. The user's task: {instruction}\nThe steps so far: "
           "{history}\nThink in <think> </think> tags, then answer with one action as JSON: <answer><|begin_of_box|>"
           '{"action_type": "click", "box_2d": [[x1, y1, x2, y2]]}<|end_of_box|></answer>. Further types: '
           '{"action_type": "input_text", "text": ...}, {"action_type": "scroll", "direction": ...}, '
           '{"action_type": "open_app", "app_name": ...}, {"action_type": "navigate_back"}, '
           '{"action_type": "navigate_home"}, {"action_type": "wait"}, {"action_type": "long_press", "box_2d": ...}.',
    rewards={"accuracy": 1.0}, read=_read_glm, score=_glm, target=_glm_right, problem=action_problem,
    oracle=lambda task, sample: _write_glm(_glm_right(task, sample)),
    write=lambda task, sample, boxes: _write_glm({
        "action_type": "click", "box_2d": [in_model_units(task, sample, box, whole=True) for box in boxes]}))
