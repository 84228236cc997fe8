"""Terminal output for commands: text without control characters, tables, and progress bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from vlrl.errors import DataError
from vlrl.progress import Progress

if TYPE_CHECKING:
    from rich.progress import TaskID


def printable(text: object, most: int = 2000) -> str:
    """Replaces unprintable characters by "?", so that the text cannot control the terminal, and cuts the text after
    `most` characters."""
    shown = str(text)
    cut = shown[:most] + ("..." if len(shown) > most else "")
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in cut)


def formatted(value: float | None, form: str = ".3f", without: str = "none") -> str:
    """Formats a number by the Python format specification `form`. Returns `without` if the number is None."""
    return without if value is None else format(value, form)


def show(line: object, style: str = "", most: int = 2000) -> None:
    """Prints one value on standard output, without markup, control characters or line wrapping."""
    from rich.console import Console
    from rich.text import Text
    Console(highlight=False).print(Text(printable(line, most), style), soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1, **options: Any) -> None:
    """Prints a table with a rule below its header. All columns except the first `left` are right-aligned. Cells are
    strings or rich Text objects."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    table = Table(box=SIMPLE_HEAD, pad_edge=False, **options)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    Console(highlight=False).print(table)


def standard_input() -> TextIO:
    """Returns the standard input stream. Raises DataError if it is closed."""
    if sys.stdin is None:
        raise DataError("standard input is closed: pass the input through a pipe or from a file, e.g. < answers.txt")
    return sys.stdin


def delayed_lines(what: str, every: float = 10.0) -> Callable[[str], None]:
    """Returns a function say(doing) that reports progress on stderr. It prints a line with `what`, `doing` and the
    elapsed time, at most once in `every` seconds."""
    begun = said = time.monotonic()

    def say(doing: str) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= every:
            said = now
            print(printable(f"{what}: {doing}, {now - begun:.0f} s"), file=sys.stderr, flush=True)

    return say


@contextmanager
def delayed_bar(what: str, after: float = 2.0) -> Iterator[Callable[[int, int | None], None]]:
    """A context manager that yields update(done, total). This function shows a progress bar labelled `what` on stderr,
    once `after` seconds have passed. `total` may be None (unknown). Nothing is shown if stderr is not a terminal."""
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


_LINE_S = 60


@contextmanager
def progress_bars(lines: bool = False, show: bool = True) -> Iterator[Progress]:
    """A context manager that yields a Progress function, which draws bars with the remaining time on standard error.
    With `show=False` the function shows nothing. If standard error is not a terminal, nothing is shown unless
    `lines` is set. Then a line is printed at the start, after each tenth, and once a minute during the work."""
    from rich import progress as rich
    from rich.console import Console

    from vlrl.monitoring.progress import duration
    console = Console(stderr=True, highlight=False)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(bar_width=30), rich.MofNCompleteColumn(),
               rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal)) as bar:
        begun: dict[str, tuple[TaskID, float, float]] = {}
        said: dict[str, tuple[float, float, float]] = {}  # tenths, done and time of the last line

        def progress(what: str, done: float, total: int) -> None:
            if what not in begun:
                begun[what] = bar.add_task(what, total=total, completed=int(done)), done, time.monotonic()
            task, first, since = begun[what]
            bar.update(task, completed=done)
            now, tenth = time.monotonic(), 10 * done // max(total, 1)
            before, last, at = said.get(what, (-1, -1, now))
            due = tenth != before or (done > last and now - at >= _LINE_S)
            if due and lines and show and not console.is_terminal:
                said[what] = tenth, done, now
                left = (now - since) / (done - first) * (total - done) if done > first else None
                console.print(f"{what} {round(done, 1):g}/{total}  ETA {duration(left)}", markup=False, soft_wrap=True)

        yield progress
