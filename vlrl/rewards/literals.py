"""Structured answers: JSON or Python literals, fenced or bare, read without executing anything. Never raises."""

import json
import re
from itertools import islice
from typing import Any

from vlrl.rewards.text import between

_LONGEST = 20_000
_DEEPEST = 200  # nesting depth. Python 3.14 parses some ten thousand levels, on which later code would fail.
MOST = 1000
"""Detections of one answer that are read."""
_LARGEST = 1e9  # larger coordinates are invalid; sums and products of smaller ones stay finite
_TOKEN = re.compile(r"'([^'\\]*)'|\"[^\"\\]*\"|\b(?:None|True|False)\b|[()]")
_AS_JSON = {"None": "null", "True": "true", "False": "false", "(": "[", ")": "]"}
_DECIMAL = re.compile(r"(?<![\w.])[-+]?\d{1,9}(?:\.\d{1,20})?(?!\w)", re.ASCII)


def read_literal(text: str) -> Any:
    """The list or object that a text consists of, as JSON or a Python literal (single quotes, tuples, None); else None.

    A Python literal may have up to 20,000 characters and no backslash."""
    text = text.strip()
    if not text or text[0] not in "[{(" or text[-1] not in "]})":
        return None
    value = _json(text)
    if value is None and len(text) <= _LONGEST and "\\" not in text:  # escapes would need a parser of their own
        value = _json(_TOKEN.sub(_as_json, text))
    return value


def json_block(text: str) -> str | None:
    """The content of the last ```json ... ``` block; None without one."""
    return between(text, "```json", "```", "last")


def read_fenced(text: str) -> Any:
    """The literal in the last ```json block, or the whole text without a block; None if it is not a literal."""
    block = json_block(text)
    return read_literal(text if block is None else block)


def first_object(value: Any) -> dict[str, Any] | None:
    """A dictionary, or the first entry of a list if it is one; else None."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, dict) else None


def numbers_of(value: Any, count: int) -> list[float] | None:
    """A list of `count` usable numbers, or [[...]] of them, as floats; None for anything else."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or len(value) != count:
        return None
    usable = all(type(v) in (int, float) and -_LARGEST < v < _LARGEST for v in value)  # neither a bool nor NaN
    return [float(v) for v in value] if usable else None


def read_detections(value: Any, box_key: str = "bbox_2d") -> list[dict[str, Any]]:
    """The well-formed entries of `[{box_key: [x1, y1, x2, y2], "label": text}, ...]`, as {"box", "label", "entry"}; at
    most 1,000."""
    entries = value if isinstance(value, list) else []
    found = ({"box": box, "label": str(entry.get("label", ""))[:200], "entry": entry} for entry in entries
             if isinstance(entry, dict) and (box := numbers_of(entry.get(box_key), 4)))
    return list(islice(found, MOST))


def decimals(text: str, most: int = 64) -> list[float]:
    """The first `most` stand-alone numbers of a text ("2d" is none)."""
    return [float(match[0]) for match in islice(_DECIMAL.finditer(text), most)]


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if text.count("[") + text.count("{") <= _DEEPEST or _shallow(value) else None


def _shallow(value: Any) -> bool:
    """Whether a JSON value has at most `_DEEPEST` levels, without recursion."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [inner for outer in level if isinstance(outer, (list, dict))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return True
    return False


def _as_json(match: re.Match[str]) -> str:
    return json.dumps(match[1]) if match[1] is not None else _AS_JSON.get(match[0], match[0])
