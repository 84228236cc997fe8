"""Values of rows: shortening them for messages, and parsing numbers and JSON from strings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LONGEST = 40
"""Maximum length of a string that is parsed as a number."""
DIGITS = 9
"""Decimals to which numbers are rounded; enough for coordinates given as fractions of an image."""


def short(value: Any) -> str:
    """Returns the `repr` of a value for a message, cut off after 200 characters."""
    text = str(value) if isinstance(value, Path) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def unpacked(value: Any) -> Any:
    """Parses a string that holds a JSON list or object; returns any other value unchanged."""
    if isinstance(value, str) and value[:1] in "[{" and value.strip()[-1:] in ("]", "}"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def number(value: Any) -> float | None:
    """Converts a finite number or a numeric string to int or float; returns None for anything else."""
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
    """Rounds a number to `digits` decimals; returns an int if the result is whole. Pixels need at most 3 decimals."""
    value = round(value, digits) if isinstance(value, float) else value
    return int(value) if value == int(value) else value
