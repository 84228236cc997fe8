"""Structured answers: JSON or Python-like literals, fenced or bare, read without running anything. Never raises."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from vlrl.rewards.text import between

_LONGEST = 20_000
_DEEPEST = 200
"""Lists and objects within one another. Python 3.14 reads some ten thousand, on which what comes after would fail."""
MOST = 1000
"""Detections of one answer that are looked at."""
_NUMBERS = (int, float)
_LARGEST = 1e9
"""Coordinates beyond are no coordinates; sums and products of those below stay finite."""
_TOKEN = re.compile(r"'([^'\\]*)'|\"[^\"\\]*\"|\b(?:None|True|False)\b|[()]")
_AS_JSON = {"None": "null", "True": "true", "False": "false", "(": "[", ")": "]"}
_DECIMAL = re.compile(r"(?<![\w.])[-+]?\d{1,9}(?:\.\d{1,20})?(?!\w)", re.ASCII)


def read_literal(text: str) -> Any:
    """Returns the list or object that a text is, as JSON or as a Python literal (single quotes, tuples, None); else
    None.

    A Python literal may be up to 20,000 characters long and has no backslash.
    """
    text = text.strip()
    if not text or text[0] not in "[{(" or text[-1] not in "]})":
        return None
    value = _json(text)
    if value is None and len(text) <= _LONGEST and "\\" not in text:  # escapes would need a parser of their own
        value = _json(_TOKEN.sub(_as_json, text))
    return value


def json_block(text: str) -> str | None:
    """Returns the content of the last ```json ... ``` block; None without one."""
    return between(text, "```json", "```", "last")


def read_fenced(text: str) -> Any:
    """Returns the literal in the last ```json block, or that the whole text is where it has none; None when it is
    none.
    """
    block = json_block(text)
    return read_literal(text if block is None else block)


def first_object(value: Any) -> dict[str, Any] | None:
    """Returns an object, or the first entry of a list when that is one; else None."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, dict) else None


def numbers_of(value: Any, count: int) -> list[float] | None:
    """Returns a list of so many usable numbers as floats, [[...]] likewise; None for anything else."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if not isinstance(value, list) or len(value) != count:
        return None
    for v in value:
        if type(v) not in _NUMBERS or not -_LARGEST < v < _LARGEST:  # neither a bool nor NaN
            return None
    return [float(v) for v in value]


def read_detections(value: Any, box_key: str = "bbox_2d") -> list[dict[str, Any]]:
    """Returns the well-formed entries of `[{box_key: [x1, y1, x2, y2], "label": text}, ...]`, as {"box", "label",
    "entry"}; at most 1,000.
    """
    return list(islice(_detections(value if isinstance(value, list) else [], box_key), MOST))


def _detections(entries: Sequence[Any], box_key: str) -> Iterator[dict[str, Any]]:
    for entry in entries:
        box = numbers_of(entry.get(box_key), 4) if isinstance(entry, dict) else None
        if box:
            yield {"box": box, "label": str(entry.get("label", ""))[:200], "entry": entry}


def decimals(text: str, most: int = 64) -> list[float]:
    """Returns the first numbers of a text that stand alone ("2d" is none), up to `most` of them."""
    out: list[float] = []
    for match in _DECIMAL.finditer(text):
        out.append(float(match[0]))
        if len(out) == most:
            break
    return out


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if text.count("[") + text.count("{") <= _DEEPEST or _shallow(value) else None


def _shallow(value: Any) -> bool:
    """Returns whether a value of JSON has at most `_DEEPEST` levels, without recursion."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [inner for outer in level if isinstance(outer, (list, dict))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return True
    return False


def _as_json(match: re.Match[str]) -> str:
    return json.dumps(match[1]) if match[1] is not None else _AS_JSON.get(match[0], match[0])
