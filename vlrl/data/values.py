"""Values in rows: how messages show them, and numbers and JSON written as text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LONGEST = 40
"""Maximum length of a number as text."""
DIGITS = 9
"""Decimals of numbers that may be fractions of an image."""


def short(value: Any) -> str:
    """A value as messages show it, cut after 200 characters."""
    text = str(value) if isinstance(value, Path) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def unpacked(value: Any) -> Any:
    """The list or object in a JSON string; any other value unchanged."""
    if isinstance(value, str) and value[:1] in "[{" and value.strip()[-1:] in ("]", "}"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def number(value: Any) -> float | None:
    """A finite number, also from a string; None for anything else."""
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
    """A number without digits due to rounding, integers as int. Pixels need at most 3 decimals."""
    value = round(value, digits) if isinstance(value, float) else value
    return int(value) if value == int(value) else value
