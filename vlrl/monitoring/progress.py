"""Shows the progress of a run: a bar with the reward, in a notebook also the reward curve, elsewhere lines of text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.console import Group as Lines
from rich.panel import Panel
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from vlrl.config.registry import Table
from vlrl.monitoring import LEAST_WIDTH
from vlrl.types import Group

_NOTEBOOK = Table({"cell": "vlrl.monitoring.notebook:Cell", "page": "vlrl.monitoring.notebook:page"})
_MOST = 2000  # characters printed of one string
_NOT_PARTS = {"mean", "std", "min", "max"}


class Progress:
    """A progress bar over the steps `start`..`total`. With `enabled=False`, as on every rank but 0, it shows nothing.

    A notebook cell gets the bar and the reward curve. If the output is neither a terminal nor a notebook, one plain
    line is printed every `every` steps (default: 20 lines per run).

        with Progress(cfg.steps, start, enabled=rank == 0) as progress:
            progress.update(step + 1, metrics)"""

    def __init__(self, total: int, start: int = 0, enabled: bool = True, every: int | None = None,
                 console: Console | None = None):
        self.total, self.done, self.start, self.enabled = total, start, start, enabled
        self.every = every or max(1, (total - start) // 20)
        self.console = console or terminal()
        self._began = time.monotonic()
        self._bar = Bar(TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=24),
                        TimeElapsedColumn(), TextColumn("{task.fields[line]}", markup=False), console=self.console,
                        disable=not (enabled and self.console.is_terminal))
        self._task = self._bar.add_task("", total=total, completed=start, line="")
        self._cell = _NOTEBOOK["cell"]() if enabled and self.console.is_jupyter else None
        self._points: list[tuple[float, float]] = []

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def eta_s(self) -> float | None:
        """Expected seconds to the end, at the mean speed of this process; None before its first step."""
        done = self.done - self.start
        return (time.monotonic() - self._began) / done * (self.total - self.done) if done else None

    def update(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Shows that `done` steps are completed, with the last step's reward, reward parts and speed."""
        self.done = done
        line = f"{describe(metrics)}  ETA {duration(self.eta_s)}"
        self._bar.update(self._task, completed=done, line=line)
        if self._cell:
            value = metrics.get("reward/mean", metrics.get("loss"))
            self._points += [] if value is None else [(float(done), float(value))]
            self._cell.show(_NOTEBOOK["page"](done, self.total, line, self._points), now=done == self.total)
        elif not self.console.is_terminal and (done % self.every == 0 or done == self.total):
            self.print(f"step {done}/{self.total}  {line}")

    def busy(self, what: str, done: float, total: int) -> None:
        """Shows the progress of work inside a step in the bar. what: name of the work, such as an evaluation."""
        self._bar.update(self._task, line=f"{what} {done}/{total}")

    def print(self, message: Any) -> None:
        """Prints a message above the bar: a string as plain text without markup, or any rich object."""
        if self.enabled:
            plain = isinstance(message, str)
            self.console.print(self._text(message) if plain else message, soft_wrap=plain)

    def sample_answer(self, group: Group, index: int = 0) -> None:
        """Prints rollout `index` of a group: prompt, completion, parsed answer and target, reward and reward parts."""
        rollout = group.rollouts[index]
        parts = "  ".join(f"{name} {_figure(value)}" for name, value in rollout.parts.items())
        reward = f"{_figure(rollout.reward)}  ({parts})"
        lines = {"prompt": group.prompt.text, "answer": rollout.completion.text, "parsed": rollout.parsed,
                 "target": group.target, "reward": reward, "error": rollout.error}
        body = Lines(*(Text.assemble((f"{name:<7}", "bold cyan"), self._text(value))
                       for name, value in lines.items() if value is not None))
        self.print(Panel(body, title=self._text(f"sample {group.sample.id}"), title_align="left", border_style="dim"))

    def _text(self, value: Any) -> Text:
        text = "".join(c if c in "\n\t" or c.isprintable() else "?" for c in str(value)[:_MOST + 1])
        text = text[:_MOST] + "..." if len(text) > _MOST else text
        return Text(text.encode(self.console.encoding, "replace").decode(self.console.encoding))


def terminal() -> Console:
    """A console for the terminal whose lines have at least LEAST_WIDTH columns."""
    console = Console(highlight=False)
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH  # fixed from now on; else it follows the window
    return console


def describe(metrics: Mapping[str, Any]) -> str:
    """A step's metrics as one line of text, such as `reward 0.412 iou 0.400 format 0.900 1,234 tokens/s`. Without a
    reward, the line has the loss."""
    head = {"reward/mean": "reward"} if "reward/mean" in metrics else {"loss": "loss"}
    words = [f"{name} {_figure(metrics[key])}" for key, name in head.items() if key in metrics]
    for key, value in metrics.items():
        name = key.removeprefix("reward/")
        if name != key and name not in _NOT_PARTS:
            words.append(f"{name} {_figure(value)}")
    if metrics.get("tokens_per_s") is not None:
        words.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    return "  ".join(words)


def duration(seconds: float | None) -> str:
    """Seconds formatted as h:mm:ss; "?" if unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
