"""`vlrl train --settings [WORD ...]`: the settings in the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

import typer

from vlrl.config import describe
from vlrl.config.descriptions import FIRST, format_value, summary
from vlrl.config.schema import resumable
from vlrl.errors import ConfigError, did_you_mean

Row = tuple[str, str, object, str]


def print_settings(words: Sequence[str] = ()) -> None:
    """Prints settings. Without words: the important ones, then all by section, each with the first sentence of its
    description. With words: those whose name or description contains each of them, in full. Raises ConfigError if no
    setting does."""
    rows = list(describe())
    lines = _found(rows, words) if words else _all(rows)
    for text, bold in lines:
        typer.secho(text, bold=bold)


def _all(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    yield "Settings that a new run sets first", True
    by_name = {row[0]: row for row in rows}
    for name in FIRST:
        yield _line(by_name[name]), False
    for section, group in groupby(rows, key=lambda row: row[0].partition(".")[0] if "." in row[0] else ""):
        yield f"\n{section or 'The run as a whole'}", True
        for row in group:
            yield _line(row), False
    yield "\nDetails, types and bounds: vlrl train --settings WORD, e.g. --settings lora", False


def _line(row: Row) -> str:
    name, _, default, text = row
    return _wrapped(f"{name} = {format_value(default)}", summary(text))


def _found(rows: Sequence[Row], words: Sequence[str]) -> Iterator[tuple[str, bool]]:
    wanted = [word.partition("=")[0].lower() for word in words]
    named = [row for row in rows if _has(row[0], wanted)]
    told = [row for row in rows if row not in named and _has(f"{row[0]} {row[3]}", wanted)]
    if not named and not told:
        near = did_you_mean(wanted[-1], [part for row in rows for part in (row[0], row[0].rpartition(".")[2])])
        raise ConfigError(f"--settings {' '.join(words)}: no setting has this in its name or description.{near} "
                          "vlrl train --settings lists all")
    for name, kind, default, text in [*named, *told]:
        resume = "; may change on resume" if resumable(name) else ""
        yield _wrapped(f"{name} = {format_value(default)}   ({kind}{resume})", text), False


def _has(text: str, words: Sequence[str]) -> bool:
    """Whether each of the lower-case `words` begins a word of the text."""
    return all(re.search(f"(?<![a-z0-9]){re.escape(word)}", text.lower()) for word in words)


def _wrapped(head: str, text: str) -> str:
    width = max(40, min(100, shutil.get_terminal_size().columns - 1))
    return f"  {head}\n" + textwrap.fill(text, width, initial_indent="      ", subsequent_indent="      ")
