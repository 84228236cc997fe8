"""Writes rows as JSON files, and parses lines of JSON: limits their length and rejects repeated keys."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlrl.data.values import short
from vlrl.errors import DataError, RunError
from vlrl.store.files import write_text

MOST_LINE = 16 << 20
"""Maximum length of a line of a .jsonl file."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows atomically as .jsonl (one object per line) or .json (a list). Raises DataError for another suffix, a
    number that JSON cannot represent, and a path that cannot be written."""
    check_suffix(path)
    lines = [json_line(row) for row in rows]
    text = "".join(f"{line}\n" for line in lines) if path.suffix == ".jsonl" else "[" + ",\n ".join(lines) + "]\n"
    try:
        write_text(path, text)
    except RunError as error:
        cause = error.__cause__
        raise DataError(f"cannot write {path}: {getattr(cause, 'strerror', None) or cause}. Give another path, or "
                        "free space on the disk.") from None


def json_line(row: Mapping[str, Any]) -> str:
    """Returns a row as one line of JSON. Raises DataError for NaN, infinity, invalid Unicode, and too long rows."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        line.encode()
    except (ValueError, TypeError) as error:  # tables can hold dates, bytes ...
        raise DataError(f"row {row.get('id')!r} cannot be written as JSON: {error}") from None
    if len(line) > MOST_LINE:
        raise DataError(f"row {row.get('id')!r} has {len(line)} characters, more than the {MOST_LINE} that are "
                        "allowed: shorten the row")
    return line


def check_suffix(path: Path) -> None:
    """Raises DataError unless the file name ends in .jsonl or .json."""
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(f"{path}: rows are written as .jsonl (one object per line) or .json (a list of objects)")


def parse_line(text: str, most: int = MOST_LINE) -> Any:
    """Returns the value of a line of JSON. For an invalid line, or one of more than `most` characters, returns (does
    not raise) a DataError."""
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
