"""Converts records of GUI data to canonical rows: ScreenSpot (v1, v2, Pro, GUI-RCPO), GUI-G1, GUI-G2, AndroidControl,
GUI-R1, Android in the Wild.

A row has either the box of the target element, or the action of one step with its point. Coordinates are original
pixels."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from vlrl.data.sources.fields import (
    IMAGE,
    RecordSource,
    base_fields,
    has,
    meta,
    numbers,
    optional,
    pick,
    row_size,
    text,
)
from vlrl.data.sources.reading import Placed
from vlrl.data.values import are_shares, number, pixels, scaled, short, tidy, unpacked
from vlrl.errors import DataError
from vlrl.types import Record, Row

_PLATFORMS = {"ios": "mobile", "android": "mobile", "mobile": "mobile", "windows": "desktop", "macos": "desktop",
              "linux": "desktop", "desktop": "desktop", "pc": "desktop", "web": "web", "forum": "web", "gitlab": "web",
              "shop": "web", "tool": "web"}
_ENOUGH = 5  # boxes with x2 > x1 and y2 > y1 throughout a file of this many: these cannot be sides
_NO_TEXT = ("", "no input text", "none", "null")


def screenspot_pro(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of ScreenSpot-Pro (2504.07981): `bbox` is [x1, y1, x2, y2] in pixels. All rows of one
    `application` stay in the same split."""
    return _element(record, source, corners=True)


def screenspot(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of ScreenSpot (2401.10935) or ScreenSpot-v2 (2410.23218).

    The record's `bbox` is read as [x, y, width, height] in pixels, or as [x1, y1, x2, y2] in fractions of the image if
    no number is above 1 (GUI-RCPO and the copies on the Hub). A bbox in pixels is also copied to the row's `meta`, so
    that `corners_or_sides` can correct a whole file with [x1, y1, x2, y2] in pixels."""
    return _element(record, source, corners=False)


def corners_or_sides(rows: Placed) -> Placed:
    """Corrects the boxes of a ScreenSpot file if its bboxes seem to be [x1, y1, x2, y2] in pixels, as in some copies.
    Returns the rows of any other file unchanged.

    A file is corrected if all bboxes are valid as [x1, y1, x2, y2], and if the file also has at least _ENOUGH bboxes,
    or a bbox that does not fit into its image as [x, y, width, height]."""
    boxes = [None if isinstance(row, DataError) else row.get("meta", {}).get("bbox") for _, _, row in rows]
    pixels = [(b, row) for b, (_, _, row) in zip(boxes, rows, strict=True) if b and not isinstance(row, DataError)]
    corners = all(b[2] > b[0] and b[3] > b[1] and _inside(b, row) for b, row in pixels)
    if not (corners and (len(pixels) >= _ENOUGH or not all(_inside(row["box"], row) for _, row in pixels))):
        return rows
    return [(n, where, {**row, "box": b} if b and not isinstance(row, DataError) else row)
            for b, (n, where, row) in zip(boxes, rows, strict=True)]


def _inside(box: list[float], row: Record) -> bool:
    return "width" not in row or (box[2] <= row["width"] + 1 and box[3] <= row["height"] + 1)


def _element(record: Record, source: RecordSource, corners: bool) -> list[Row]:
    row = base_fields(record, source)
    values = numbers(record["bbox"], (4,), "bbox")
    original = {}
    if are_shares(values) and not source.scaled_later:
        box = scaled(values, row_size(row), 1, "bbox")
    elif corners:
        box = values
    else:
        box, original = source.corners(values), {} if source.form.unit or source.form.layout else {"bbox": values}
    kind = str(pick(record, "ui_type", "data_type") or "").lower()
    fields = {"element_type": kind if kind in ("icon", "text") else None, "platform": _platform(record, row),
              "category": record.get("group"), "group_key": record.get("application")}
    rest = meta({**record, "bbox": None, **original}, "instruction", "ui_type", "group")
    return [{**row, "instruction": text(record, "instruction"), "box": box,
             **{k: v for k, v in fields.items() if v is not None}, **rest}]


def _platform(record: Record, row: Record) -> str | None:
    """Returns mobile, desktop or web, as given by the record's data source or by the beginning of the image's file
    name. If neither gives a known platform, returns the data source; None if the record states none."""
    named = str(pick(record, "data_source", "platform") or "").lower()
    start = re.match(r"(?:.*/)?([a-z]+)_", str(row.get("image")))
    return _PLATFORMS.get(named) or (_PLATFORMS.get(start[1]) if start else None) or named or None


_ANSWERS = tuple("question answer answer_type plan responses label labels boxes box action bbox gt gt_action video "
                 "expression solution conversations messages".split())
_LIKE_ANSWER = re.compile(r"action|answer|operation|click|touch|bbox|ground_?truth|(?:^|_)(?:point|gt|coords?|"
                          r"coordinates?|label|solution)(?:_|s?$)", re.IGNORECASE)
_OF_SCREENSPOT = ("data_type", "data_source")


def is_unlabelled(record: Record) -> bool:
    return has(record, "instruction") and has(record, *IMAGE) and not has(record, *_ANSWERS)


def unlabelled(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record with an instruction and no answer, as used for region consistency (GUI-RCPO). The other fields
    of the record are kept. Raises DataError if one of these seems to hold the answer."""
    if field := next((name for name in record if _LIKE_ANSWER.search(name) and has(record, name)), None):
        raise DataError(f"the row has an instruction, but no box or action in a field with a known name. {field}="
                        f"{short(record[field])} seems to be the answer: map this field with --columns (data.columns) "
                        f"bbox={field} or action={field}, or remove the field")
    row = base_fields(record, source)
    others = {k: v for k, v in record.items() if k not in (*IMAGE, *_OF_SCREENSPOT, "image_size", "img_size")}
    rest = {k: record[k] for k in _OF_SCREENSPOT if k in record}
    others |= {"meta": {**rest, **(record.get("meta") or {})}} if rest else {}
    kind = str(record.get("data_type") or "").lower()
    fields = {"element_type": kind if kind in ("icon", "text") else None, "platform": _platform(record, row)}
    return [{**{k: v for k, v in fields.items() if v}, **others, **row, "instruction": text(record, "instruction")}]


def gui_g1(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of GUI-G1 (2505.15810): `solution` is [x1, y1, x2, y2] in pixels, and `rate` is the weight of
    the row in the loss."""
    rate = number(record["rate"])
    if rate is None or rate < 0:
        raise DataError(f"rate={short(record['rate'])} must be a finite number of at least 0")
    match = re.search(r"instruction is:\s*(.+?)\.?\s*Report the bbox", text(record, "problem"), re.DOTALL)
    return [{**base_fields(record, source), "instruction": match[1] if match else text(record, "problem"),
             "box": source.pixels(numbers(record["solution"], (4,), "solution"), "solution"), "weight": rate,
             **meta(record, "problem", "solution", "rate")}]


def gui_g2(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of GUI-G2 (2507.15846). The box [x1, y1, x2, y2] is `abs_box` in pixels, or `rela_box` as
    fractions of the image."""
    row = base_fields(record, source)
    if has(record, "abs_box"):
        box = source.pixels(numbers(record["abs_box"], (4,), "abs_box"), "abs_box")
    else:
        box = scaled(numbers(record["rela_box"], (4,), "rela_box"), row_size(row), 1, "rela_box")
    fields = optional(record, platform="platform", element_type="data_type")
    return [{**row, "instruction": text(record, "instruction"), "box": box, **fields,
             **meta(record, "instruction", "abs_box", "rela_box", *fields)}]


def is_android_step(record: Record) -> bool:
    gt = pick(record, "gt", "action", "ground_truth", "gt_action")
    return isinstance(gt, Mapping) and has(gt, "action_type") and has(record, *IMAGE)


def android_step(record: Record, source: RecordSource) -> list[Row]:
    """Converts one step of AndroidControl (2406.03679) in the format of UI-R1 (2503.21620): `gt` has action_type and x,
    y, text, direction or app_name.

    Steps whose screenshots are named after the same episode get the same `group_key`."""
    row = base_fields(record, source)
    gt = pick(record, "gt", "action", "ground_truth", "gt_action")
    task = text(record, "task", "instruction", "step_instruction", "goal")
    box = next((numbers(r[name], (4,), name) for r in (record, gt) for name in ("bbox", "gt_bbox", "box")
                if has(r, name)), None)
    episode = re.search(r"episode_\w+?(?=-|_screenshot|/|\.)", str(row.get("image")))
    fields = {**optional(record, history="history", difficulty="difficulty"), "platform": "mobile"}
    return [{**row, "instruction": task, "action": _action(gt), **({"box": box} if box else {}),
             **({"group_key": episode[0]} if episode else {}), **fields,
             **meta(record, *"gt action ground_truth gt_action task instruction bbox gt_bbox box".split(), *fields)}]


def _action(gt: Record) -> dict[str, Any]:
    """Returns the row's action {"type", "point", "text", "direction"}; "text" is the text to type or the app to open.
    Keys for which `gt` has no value are left out."""
    action: dict[str, Any] = {"type": text(gt, "action_type", "type").lower()}
    if has(gt, "x", "y"):
        action["point"] = pixels(numbers([gt.get("x"), gt.get("y")], (2,), "x, y"), "x, y")
    elif has(gt, "coordinate", "point"):
        action["point"] = numbers(pick(gt, "coordinate", "point"), (2,), "coordinate or point")
    words = pick(gt, "text", "app_name", "app", "input_text")
    if words is not None:
        action["text"] = str(gt.get("text") or words) if not isinstance(words, str) else words
    if has(gt, "direction"):
        action["direction"] = text(gt, "direction").lower()
    return action


def android_episode(record: Record, source: RecordSource) -> list[Row]:
    """Converts an episode of AndroidControl to one row per action; the instructions of earlier steps become the row's
    `history`. The instruction of a row comes from `step_instructions`; the episode's `goal` is stored in `meta`."""
    episode = record.get("episode_id", source.id)
    said = pick(record, "step_instructions") or []
    shots = pick(record, "screenshots", "images") or []
    rows = []
    for n, action in enumerate(map(unpacked, record["actions"])):  # JSON strings in the released episodes
        if not isinstance(action, Mapping):
            raise DataError(f"{short(action)} in actions must be an object with action_type")
        image = shots[n] if n < len(shots) else f"episode_{episode}-screenshot_{n}.png"
        sides = {side: record[f"screenshot_{side}s"][n] for side in ("width", "height")
                 if isinstance(record.get(f"screenshot_{side}s"), list) and n < len(record[f"screenshot_{side}s"])}
        step = said[n] if n < len(said) else text(record, "goal")
        (row,) = android_step({"id": f"{episode}-{n}", "image": image, "gt": action, "task": step, **sides}, source)
        rows.append({**row, "history": list(said[:n]), "group_key": f"episode_{episode}",
                     **({"meta": {"goal": record["goal"]}} if has(record, "goal") else {})})
    return rows


def gui_r1(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of GUI-R1 (2504.10458): `gt_bbox` is a box or a point as fractions of the image. A `gt_bbox`
    with a negative number means that the step has no position."""
    row = base_fields(record, source)
    action: dict[str, Any] = {"type": text(record, "gt_action").lower()}
    where = numbers(record["gt_bbox"], (2, 4), "gt_bbox") if has(record, "gt_bbox") else []
    where = [] if any(v < 0 for v in where) else where
    if where and are_shares(where):
        where = scaled(where, row_size(row), 1, "gt_bbox")
    if len(where) == 4:
        action["point"] = [tidy((where[0] + where[2]) / 2), tidy((where[1] + where[3]) / 2)]
    elif where:
        action["point"] = where
    words = record.get("gt_input_text")
    if isinstance(words, str) and words.strip().lower() not in _NO_TEXT:
        action["direction" if action["type"] == "scroll" else "text"] = words
    history = record.get("history")
    fields = {**optional(record, category="task_type", platform="platform"),
              **({"history": history} if history not in (None, "", "None") else {}),
              **({"box": where} if len(where) == 4 else {})}
    return [{**row, "instruction": text(record, "instruction"), "action": action, **fields,
             **meta(record, "gt_action", "gt_bbox", "gt_input_text", "instruction", "history", "task_type", *fields)}]


_TAP = 0.04  # a shorter gesture, as a fraction of the screen, is a tap; others scroll in the direction of the finger
_GESTURE = 4
_AITW_TYPES = {3: "type", 5: "press_back", 6: "press_home", 7: "press_enter", 10: "complete", 11: "impossible"}
"""Maps result_action_type to the type of the row's action. _GESTURE, a tap or a scroll, is handled separately."""
_AITW_NAMES = {"type": 3, "dual_point": 4, "press_back": 5, "press_home": 6, "press_enter": 7,
               "status_task_complete": 10, "status_task_impossible": 11}
"""Maps the names of action types in AITW to their numbers."""
_USED = ("instruction", "goal", "result_action_type", "result_action_text", "result_touch_yx", "result_lift_yx",
         "result_action", "episode_id")


def aitw(record: Record, source: RecordSource) -> list[Row]:
    """Converts a step of Android in the Wild (AITW, 2307.10088) or AITZ (2403.02713) to a row with an instruction and
    an action. All steps of an episode stay in one split. Points are [y, x] as fractions of the screen."""
    row = base_fields(record, source)
    episode = {"group_key": f"episode_{record['episode_id']}"} if has(record, "episode_id") else {}
    return [{**row, "instruction": text(record, "instruction", "goal"), "action": _aitw_action(record, row),
             "platform": "mobile", **episode, **meta(record, *_USED)}]


def steps_before(rows: Placed) -> Placed:
    """Adds `history` to each row: the texts (`coat_action_desc`) of the earlier steps of the row's episode. Rows of
    files without this field stay unchanged."""
    episodes: dict[str, list[tuple[float, str]]] = {}
    for _, _, row in rows:
        done = None if isinstance(row, DataError) else row.get("meta", {}).get("coat_action_desc")
        if isinstance(row, dict) and isinstance(done, str) and "group_key" in row:
            episodes.setdefault(row["group_key"], []).append((_aitw_step(row), done))
    return [(n, where, row if isinstance(row, DataError) else _with_history(row, episodes)) for n, where, row in rows]


def _with_history(row: dict[str, Any], episodes: Mapping[str, list[tuple[float, str]]]) -> dict[str, Any]:
    meta = {k: v for k, v in row.get("meta", {}).items() if k != "coat_action_desc"}
    rest = {k: v for k, v in row.items() if k != "meta"}
    before = sorted(entry for entry in episodes.get(str(row.get("group_key")), ()) if entry[0] < _aitw_step(row))
    history = {"history": [done for _, done in before]} if before else {}
    return {**rest, **history, **({"meta": meta} if meta else {})}


def _aitw_step(row: Record) -> float:
    return number(row.get("meta", {}).get("step_id")) or 0.0


def _aitw_action(record: Record, row: Record) -> dict[str, Any]:
    given, words = record.get("result_action_type"), record.get("result_action_text")
    if given is None:  # [type, text]
        both = record["result_action"]
        given, words = (*both, None, None)[:2] if isinstance(both, list) else (both, None)
    kind = _AITW_NAMES.get(str(given).lower(), number(given))
    if kind == _GESTURE:
        return _gesture(record, row)
    if kind not in _AITW_TYPES:
        raise DataError(f"result_action_type={short(given)} is not an action of Android in the Wild; known: "
                        f"{', '.join(map(str, (_GESTURE, *_AITW_TYPES)))}")
    typed = {"text": str(words)} if kind == _AITW_NAMES["type"] else {}
    return {"type": _AITW_TYPES[int(kind)], **typed}


def _gesture(record: Record, row: Record) -> dict[str, Any]:
    touch, lift = (numbers(record.get(f"result_{name}_yx"), (2,), f"result_{name}_yx") for name in ("touch", "lift"))
    down, right = lift[0] - touch[0], lift[1] - touch[1]
    if math.hypot(down, right) <= _TAP:
        return {"type": "click", "point": scaled([touch[1], touch[0]], row_size(row), 1, "result_touch_yx")}
    along, names = (down, ("up", "down")) if abs(down) >= abs(right) else (right, ("left", "right"))
    return {"type": "scroll", "direction": names[along > 0]}
