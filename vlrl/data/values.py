"""Values in rows: how a message shows one, numbers and JSON that are written as text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LONGEST = 40
"""Characters that a number may have as text."""
DIGITS = 9
"""After the point, of numbers that may be shares of an image."""


def short(value: Any) -> str:
    """Returns a value as it may stand in a message."""
    text = str(value) if isinstance(value, Path) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def unpacked(value: Any) -> Any:
    """Returns a list or object that was written as JSON text; anything else as it is."""
    if isinstance(value, str) and value[:1] in "[{" and value.strip()[-1:] in ("]", "}"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def number(value: Any) -> float | None:
    """Returns a finite number, also one written as text; None for anything else."""
    if isinstance(value, str) and len(value) <= LONGEST:
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return tidy(value, DIGITS) if math.isfinite(value) else None
    except OverflowError:  # an int like 10**400
        return None


def tidy(value: float, digits: int = 3) -> float:
    """Returns a number without digits that only rounding made, whole ones as int. Pixels need no more than 3."""
    value = round(value, digits) if isinstance(value, float) else value
    return int(value) if value == int(value) else value
