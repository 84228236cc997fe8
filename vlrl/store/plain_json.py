"""Converts any value to strict JSON: valid UTF-8, no NaN, no infinities. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def utf8(text: str) -> str:
    """Makes a string valid UTF-8. A lone surrogate becomes its escape sequence, which means the same character in JSON.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def json_text(value: Any) -> str:
    """Returns a value as one line of strict JSON; see `plain`."""
    return utf8(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def plain(value: Any, depth: int = 0) -> Any:
    """Converts a value to a value that JSON can represent. NaN and infinities become null, arrays become lists, and
    values of unknown types become strings. Anything nested deeper than 50 levels becomes "…"."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist(), depth)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= 50:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    return str(value)
