"""Reads the boxes of an answer: JSON lists and objects, sentences, and the special tokens of Qwen-VL and InternVL.

    boxes_of('[{"bbox_2d": [1, 2, 30, 40], "label": "mug"}]')   # [{"box": [1, 2, 30, 40], "label": "mug"}]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlrl.data.sources.fields import pick
from vlrl.data.values import number, unpacked
from vlrl.types import Row

LISTS_OF_BOXES = ("map", "od_ap", "od_ap50", "odlength", "weighted_sum")
"""Values of accu_reward_method with which the answer "None" finds no objects."""
_FENCE = re.compile(r"^```\w*\s*(.*?)\s*```$", re.DOTALL)
_TOKENS = re.compile(r"<box>|<\|box_start\|>")
_TOKEN_BOX = re.compile(r"(?:<box>|<\|box_start\|>)([^<>]{1,400})(?:</box>|<\|box_end\|>)")
_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"
_QUADRUPLE = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}(?:\)\s*,\s*\(|,){_NUMBER},{_NUMBER}[\])]")
"""Matches [x1, y1, x2, y2] and (x1,y1),(x2,y2)."""
_REF = re.compile(r"(?:<ref>|<\|object_ref_start\|>)([^<>]{1,400})(?:</ref>|<\|object_ref_end\|>)")
_ASKS_BOX = re.compile(r"bound(?:ing)?[ -]?box|\bbbox|\bcoordinates?\b|框|坐标", re.IGNORECASE)
_LONGEST = 300
"""Maximum length of a sentence in which boxes are searched."""


def boxes_of(answer: str, method: str = "", question: str = "") -> list[Row] | None:
    """Returns the boxes of an answer, {"box", "label" if given} each; [] for an answer that finds no objects; None if
    the answer does not consist of boxes.

    `method`, the record's accu_reward_method, decides whether the answer "None" finds no objects. If `question` asks
    for a box, the boxes inside a sentence are the answer."""
    if answer == "[]" or (method in LISTS_OF_BOXES and answer.lower() in ("none", "")):
        return []
    if has_box_tokens(answer):
        return _token_boxes(answer)
    parsed = unpacked(_FENCE.sub(r"\1", answer))
    if isinstance(parsed, str):
        found = _QUADRUPLE.findall(parsed) if len(parsed) <= _LONGEST and _ASKS_BOX.search(question) else []
        return [{"box": [number(v) for v in values]} for values in found] or None
    is_box = isinstance(parsed, list) and len(parsed) == 4 and all(map(is_plain_number, parsed))
    entries = parsed if isinstance(parsed, list) and not is_box else [parsed]
    boxes = [_box_said(entry) for entry in entries]
    return boxes if boxes and None not in boxes else None  # pyright: ignore[reportReturnType]


def has_box_tokens(answer: str) -> bool:
    """Whether an answer has the box tokens of Qwen-VL, Qwen2-VL or InternVL."""
    return bool(_TOKENS.search(answer))


def _token_boxes(answer: str) -> list[Row] | None:
    boxes: list[Row] = []
    label = ""
    for mark in re.finditer(rf"{_REF.pattern}|{_TOKEN_BOX.pattern}", answer):
        if mark[1] is not None:
            label = mark[1].strip()
            continue
        found = _QUADRUPLE.findall(mark[2].strip().removeprefix("[").removesuffix("]") if mark[2].strip()[:2] == "[["
                                   else mark[2])
        boxes += [{"box": [number(v) for v in values], **({"label": label} if label else {})} for values in found]
    return boxes if len(boxes) >= len(_TOKENS.findall(answer)) else None


def _box_said(entry: Any) -> dict[str, Any] | None:
    """Converts [x1, y1, x2, y2], {"bbox_2d": [...], "label": ...} or {"any name": [...]} to {"box": ..., "label": ...
    if given}; None for anything else."""
    label = entry.get("label") if isinstance(entry, Mapping) else None
    if isinstance(entry, Mapping):
        entry = pick(entry, "bbox_2d", "bbox", "box") or next((v for v in entry.values() if isinstance(v, list)), None)
    if not (isinstance(entry, list) and len(entry) == 4 and all(map(is_plain_number, entry))):
        return None
    return {"box": entry, "label": label} if isinstance(label, str) else {"box": entry}


def is_plain_number(value: Any) -> bool:
    """Whether a value is a finite number and not a text."""
    return isinstance(value, (int, float)) and number(value) is not None
