"""Groups the error messages of bad rows: messages that differ only in their values become one line with a count."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ROW = re.compile(r"row (?:'[^'\n]*'|\"[^\"\n]*\"): ")
_FILE = re.compile(r"(?<=media file ).+?(?= (?:does not|cannot|is|has|lasts)\b)")
_VALUE = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|\[[^\]\n]*\]|\{[^}\n]*\}"  # quoted, listed
                    r"|\S*/\S*|[^\s(]*\.[A-Za-z]\w{1,4}\b|[^\s(]*\d[^\s);,]*")  # paths, files, numbers


def shape(reason: str) -> str:
    """Returns an error message in which row-specific parts (numbers, paths, quoted and bracketed text) are replaced by
    "#"."""
    plain = _VALUE.sub("#", _FILE.sub("#", without_row(reason)))
    return re.sub(r"#(?:[\s,]*#)*", "#", plain)


def without_row(reason: str) -> str:
    """Returns an error message without the "row ...: " at its beginning."""
    return _ROW.sub("", reason, count=1) if _ROW.match(reason) else reason


def counted(line: str, rows: int) -> str:
    """Appends " (and N rows more)" to a line about the first of `rows` rows; the line is unchanged if `rows` is 1."""
    return line + (f" (and {rows - 1:,} rows more)" if rows > 1 else "")


def reason_lines(bad: Iterable[tuple[str, str]]) -> list[str]:
    """Groups pairs (location, error message) by the shape of the message; returns one line per group.

    A line shows the group's first message and the number of further rows."""
    same: dict[str, list[str]] = {}
    for whose, reason in bad:
        row = _ROW.match(reason)
        same.setdefault(shape(reason), []).append(f"{whose}{': ' + row[0][:-2] if row else ''}: {without_row(reason)}")
    return [counted(lines[0], len(lines)) for lines in same.values()]
