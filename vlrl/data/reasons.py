"""Reasons why rows are bad, in few lines: reasons that differ in their values alone become one line with a count."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ROW = re.compile(r"row (?:'[^'\n]*'|\"[^\"\n]*\"): ")
_FILE = re.compile(r"(?<=media file ).+?(?= (?:does not|cannot|is|has|lasts)\b)")
_VALUE = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|\[[^\]\n]*\]|\{[^}\n]*\}"  # quoted, listed
                    r"|\S*/\S*|[^\s(]*\.[A-Za-z]\w{1,4}\b|[^\s(]*\d[^\s);,]*")  # paths, files, numbers


def shape(reason: str) -> str:
    """A reason without the parts that differ between rows: numbers, paths, quoted and bracketed text."""
    plain = _VALUE.sub("#", _FILE.sub("#", without_row(reason)))
    return re.sub(r"#(?:[\s,]*#)*", "#", plain)


def without_row(reason: str) -> str:
    """A reason without the row name at its beginning."""
    return _ROW.sub("", reason, count=1) if _ROW.match(reason) else reason


def counted(line: str, rows: int) -> str:
    """A line about the first of `rows` rows, with the number of the others."""
    return line + (f" (and {rows - 1:,} rows more)" if rows > 1 else "")


def reason_lines(bad: Iterable[tuple[str, str]]) -> list[str]:
    """One line per shape of reason of (where, reason) pairs: the first such reason and the number of others."""
    same: dict[str, list[str]] = {}
    for whose, reason in bad:
        row = _ROW.match(reason)
        same.setdefault(shape(reason), []).append(f"{whose}{': ' + row[0][:-2] if row else ''}: {without_row(reason)}")
    return [counted(lines[0], len(lines)) for lines in same.values()]
