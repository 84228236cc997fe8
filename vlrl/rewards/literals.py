"""Parses structured answers: JSON or Python literals, fenced or bare. Nothing is executed, and no text makes a function
raise."""

import json
import re
from itertools import islice
from typing import Any

from vlrl.rewards.text import between

_LONGEST = 20_000
_DEEPEST = 200  # nesting depth. Python 3.14 parses some ten thousand levels, on which later code would fail.
MOST = 1000  # maximum number of detections that are read from one answer
_LARGEST = 1e9  # larger coordinates are invalid; sums and products of smaller ones stay finite
_TOKEN = re.compile(r"'([^'\\]*)'|\"[^\"\\]*\"|\b(?:None|True|False)\b|[()]")
_AS_JSON = {"None": "null", "True": "true", "False": "false", "(": "[", ")": "]"}
_DECIMAL = re.compile(r"(?<![\w.])[-+]?\d{1,9}(?:\.\d{1,20})?(?!\w)", re.ASCII)


def read_literal(text: str) -> Any:
    """Parses a text that is a list or object, written as JSON or as a Python literal (single quotes, tuples, None).
    None for any other text.

    A Python literal may have at most 20,000 characters and must not contain a backslash."""
    text = text.strip()
    if not text or text[0] not in "[{(" or text[-1] not in "]})":
        return None
    value = _json(text)
    if value is None and len(text) <= _LONGEST and "\\" not in text:  # escapes would need a parser of their own
        value = _json(_TOKEN.sub(_as_json, text))
    return value


def json_block(text: str) -> str | None:
    """The content of the last ```json ... ``` block in a text; None if there is no such block."""
    return between(text, "```json", "```", "last")


def read_fenced(text: str) -> Any:
    """Parses the last ```json block of a text, or the whole text if there is no such block. None if the block or text
    is not a literal."""
    block = json_block(text)
    return read_literal(text if block is None else block)


def first_object(value: Any) -> dict[str, Any] | None:
    """The value itself if it is a dict, or its first item if it is a list that starts with a dict; else None."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, dict) else None


def numbers_of(value: Any, count: int) -> list[float] | None:
    """Converts a list of exactly `count` finite numbers, or a list that contains one such list, to floats. None for any
    other value."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or len(value) != count:
        return None
    usable = all(type(v) in (int, float) and -_LARGEST < v < _LARGEST for v in value)  # neither a bool nor NaN
    return [float(v) for v in value] if usable else None


def read_detections(value: Any, box_key: str = "bbox_2d") -> list[dict[str, Any]]:
    """The well-formed entries of a list `[{box_key: [x1, y1, x2, y2], "label": text}, ...]`, as dicts with "box",
    "label" and the original "entry"; at most 1,000."""
    entries = value if isinstance(value, list) else []
    found = ({"box": box, "label": str(entry.get("label", ""))[:200], "entry": entry} for entry in entries
             if isinstance(entry, dict) and (box := numbers_of(entry.get(box_key), 4)))
    return list(islice(found, MOST))


def decimals(text: str, most: int = 64) -> list[float]:
    """The first `most` stand-alone numbers in a text (the 2 in "2d" is not one)."""
    return [float(match[0]) for match in islice(_DECIMAL.finditer(text), most)]


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if text.count("[") + text.count("{") <= _DEEPEST or _shallow(value) else None


def _shallow(value: Any) -> bool:
    """Whether a JSON value is nested at most `_DEEPEST` levels deep; computed without recursion."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [inner for outer in level if isinstance(outer, (list, dict))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return True
    return False


def _as_json(match: re.Match[str]) -> str:
    return json.dumps(match[1]) if match[1] is not None else _AS_JSON.get(match[0], match[0])
