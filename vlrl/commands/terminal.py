"""What commands show in a terminal: hostile text without its control characters, and a bar for what takes longer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from vlrl.errors import DataError


def printable(text: object, most: int = 2000) -> str:
    """Text that cannot steer the terminal: what is not printable becomes "?"; cut after `most` characters."""
    shown = str(text)
    cut = shown[:most] + ("..." if len(shown) > most else "")
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in cut)


def standard_input() -> TextIO:
    """sys.stdin; DataError where the caller has closed it."""
    if sys.stdin is None:
        raise DataError("standard input is closed")
    return sys.stdin


@contextmanager
def late_bar(what: str, after: float = 2.0) -> Iterator[Callable[[int, int | None], None]]:
    """Gives `update(done, total)`; a bar with `what` appears on stderr once `after` seconds have passed.

    `total` is None where the end is not known. Nothing is shown where stderr is no terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   console=console, transient=True)
    task, began = bar.add_task(what, total=None), time.monotonic()

    def update(done: int, total: int | None) -> None:
        if not console.is_terminal or time.monotonic() - began < after:
            return
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()
