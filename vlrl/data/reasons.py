"""Why rows are bad, as few lines: those that differ from row to row in values alone are one line with a count."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ROW = re.compile(r"row (?:'[^'\n]*'|\"[^\"\n]*\"): ")
_FILE = re.compile(r"(?<=media file ).+?(?= (?:does not|cannot|is|has|lasts)\b)")
_VALUE = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|\[[^\]\n]*\]|\{[^}\n]*\}"  # quoted, listed
                    r"|\S*/\S*|[^\s(]*\.[A-Za-z]\w{1,4}\b|[^\s(]*\d[^\s);,]*")  # paths, files, numbers


def shape(reason: str) -> str:
    """Returns a reason without what differs from row to row: numbers, paths, and what is in quotes or brackets."""
    plain = _VALUE.sub("#", _FILE.sub("#", without_row(reason)))
    return re.sub(r"#(?:[\s,]*#)*", "#", plain)


def without_row(reason: str) -> str:
    """Returns a reason without the name of its row at its beginning."""
    return _ROW.sub("", reason, count=1) if _ROW.match(reason) else reason


def counted(line: str, rows: int) -> str:
    """Returns a line about the first of `rows` rows, with the number of the others."""
    return line + (f" (and {rows - 1:,} rows more)" if rows > 1 else "")


def reason_lines(bad: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each shape of reason of (whose it is, reason) pairs: the first, and how many more have it."""
    same: dict[str, list[str]] = {}
    for whose, reason in bad:
        row = _ROW.match(reason)
        same.setdefault(shape(reason), []).append(f"{whose}{': ' + row[0][:-2] if row else ''}: {without_row(reason)}")
    return [counted(lines[0], len(lines)) for lines in same.values()]
