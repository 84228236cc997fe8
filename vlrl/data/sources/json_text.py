"""Parses a line of JSON; limits its length and rejects repeated keys."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from vlrl.data.values import short
from vlrl.errors import DataError

MOST_LINE = 16 << 20
"""Maximum length of a line of a .jsonl file."""


def parse_line(text: str, most: int = MOST_LINE) -> Any:
    """Returns the value of a line of JSON; for an invalid line returns (does not raise) a DataError."""
    if len(text) > most:
        return DataError(f"the line has {len(text)} characters, more than the {most} that one row may have")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        return DataError(f"not JSON: {error}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {short(name)} occurs twice in one object")
    return unique
