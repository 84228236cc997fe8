"""Processes in which a task proposes new prompts, for `vlrl data synthesize`. They load no torch.

    with explorers(config, Search(candidates=64)) as explore:
        for candidate in explore(range(64)): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from vlrl.config.registry import failure
from vlrl.config.schema import Config
from vlrl.data import json_line
from vlrl.errors import ConfigError, DataError, TaskError, VlrlError
from vlrl.task import Task
from vlrl.training.build_task import make_task

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is looked for."""

    candidates: int = 64
    """How often the task is asked for a prompt."""
    least: float = 0.0
    """A prompt is kept where its pass rate is above 0, below 1, and from `least` ..."""
    most: float = 1.0
    """... to `most`."""
    parents: tuple[Mapping[str, Any], ...] = ()
    """Rows that are varied, in turn; () = the task explores."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One proposal."""

    number: int
    row: Row | None = None
    reason: str = ""
    """Why there is no row."""


def propose(task: Task, number: int, parents: Sequence[Mapping[str, Any]] = ()) -> Candidate:
    """Returns what a task proposes for a number. Raises ConfigError for a task without proposals, TaskError for one
    that fails."""
    if getattr(task.propose, "__func__", None) is Task.propose:
        raise ConfigError(f"task '{task.name}' proposes no prompts: write Task.propose (docs/write-a-task.md), or take "
                          "a task that has it, such as web")
    parent = parents[number % len(parents)] if parents else None
    try:
        row = task.propose(number, parent)
    except DataError as error:
        return Candidate(number=number, reason=str(error))
    except VlrlError:
        raise
    except Exception as error:
        raise TaskError(f"task '{task.name}': propose({number}) failed: {failure(error)}") from error
    if row is None:
        return Candidate(number=number, reason="nothing found")
    lacking = [name for name in ("id", "generator", "verifier") if not isinstance(row.get(name), str)]
    if lacking:
        raise TaskError(f"task '{task.name}': propose gave a row without the text {lacking[0]!r}")
    row = {**row, "parent": None if parent is None else str(parent["id"])}
    json_line(row)
    return Candidate(number=number, row=row)


Explore = Callable[[Sequence[int]], Iterable[Candidate]]
"""The candidates of these numbers, in order."""


@contextmanager
def explorers(config: Config, search: Search) -> Iterator[Explore]:
    """Yields what has `environment.workers` processes propose candidates. They have ended afterwards, with all that the
    task has started in them: a model can be loaded, and processes forked.
    """
    with ProcessPoolExecutor(config.environment.workers, get_context("spawn"), _begin, (config, search)) as pool:
        try:
            yield lambda numbers: pool.map(_explored, numbers)
        except BrokenProcessPool:
            raise TaskError("a process that looks for candidates has ended by itself, perhaps for want of memory: the "
                            "same command goes on where it was; environment.workers=1 needs less") from None
        finally:
            pool.shutdown(cancel_futures=True)


_exploring: list[tuple[Task, Search]] = []
"""Of a process that proposes: its task, and what is looked for."""


def _begin(config: Config, search: Search) -> None:
    _exploring[:] = [(make_task(config), search)]


def _explored(number: int) -> Candidate:
    ((task, search),) = _exploring
    return propose(task, number, search.parents)
