"""Worker processes in which a task proposes new prompts, for `vlrl data synthesize`. The processes load no torch.

with explorers(config, Search(candidates=64), MediaLocation.for_file(config, Path("new.jsonl"))) as explore:
    for candidate in explore(range(64)): ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.config.registry import failure
from vlrl.config.schema import Config
from vlrl.data import json_line
from vlrl.errors import ConfigError, DataError, TaskError, VlrlError
from vlrl.rewards.worker import ending_forked_copies
from vlrl.task import Task
from vlrl.task.interface import generated
from vlrl.tools.synthesis.row_export import MediaLocation, row_of
from vlrl.training.build_task import make_task
from vlrl.types import Row

_STREAM = 23
"""Second number in the keys of the random streams from which knobs (difficulty settings of a sample) are drawn."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a search for new prompts."""

    candidates: int = 64
    least: float = 0.0
    """Smallest pass rate with which a prompt is kept; `most` is the largest one. Prompts with a pass rate of 0 or 1 are
    never kept."""
    most: float = 1.0
    parents: tuple[Mapping[str, Any], ...] = ()
    """Rows that candidates are variations of, used in turn. () = the task proposes prompts by exploring."""
    variations: tuple[tuple[str, Mapping[str, Any] | None], ...] = ()
    """(kind of variation, second row) for each row in `parents`, if a generator writes the prompts. The kind is one of
    parents.VARIATIONS; the second row is only used by the kind "combined". () = the kind "similar" for all parents."""
    keep: int | None = None
    """Number of rows to keep, those with the lowest pass rates. None = all rows are kept, in their order."""

    def parent(self, number: int) -> tuple[Mapping[str, Any], str, Mapping[str, Any] | None]:
        """Returns (parent row, kind of variation, second row to combine with the parent, or None) of candidate
        `number`."""
        place = number % len(self.parents)
        variation, other = self.variations[place] if self.variations else ("similar", None)
        return self.parents[place], variation, other


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One proposed prompt, or the reason why there is none."""

    number: int
    row: Row | None = None
    reason: str = ""  # why the candidate has no row; "" if it has one


_NEAR = 0.1  # standard deviation of a variation's knobs around the knobs of its parent, as a share of each knob's range


def propose(task: Task, number: int, parents: Sequence[Mapping[str, Any]] = (), location: MediaLocation | None = None
            ) -> Candidate:
    """Makes candidate `number` with Task.propose. If the task only has knobs (difficulty settings of a sample),
    generates a sample with random knobs instead. If there are `parents`, the candidate is a variation of one of
    them. Images are written to `location`.

    Raises ConfigError if the task has neither Task.propose nor knobs, TaskError if the code of the task fails."""
    own = getattr(task.propose, "__func__", None) is not Task.propose
    if not own and not task.knobs:
        raise ConfigError(f"task '{task.name}' cannot propose prompts: implement Task.propose, or Task.knobs "
                          "and Task.generate (docs/write-a-task.md), set --endpoint to the server of a model that "
                          "writes prompts, or use a task that can propose prompts, such as web")
    parent = parents[number % len(parents)] if parents else None
    try:
        row = (task.propose(number, parent) if own else
               _generated(task, number, parent, location or MediaLocation(root=Path(), folder=Path("media"))))
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
        raise TaskError(f"task '{task.name}': propose returned a row without the string field {lacking[0]!r}")
    row = {**row, "parent": None if parent is None else str(parent["id"])}
    json_line(row)
    return Candidate(number=number, row=row)


def _generated(task: Task, number: int, parent: Mapping[str, Any] | None, location: MediaLocation) -> Row:
    """The row of sample number `number`, generated with random knobs. Without a parent, the knobs come from their full
    ranges, else from near the parent's values. Raises ConfigError for a parent without the task's knobs."""
    rng = np.random.default_rng([task.seed, _STREAM, number])
    low, high = np.array([*task.knobs.values()], float).T
    values = low + (high - low) * rng.random(len(low))
    if parent is not None:
        before = parent.get("knobs")
        if not isinstance(before, Mapping) or {*before} != {*task.knobs}:
            raise ConfigError(f"prompt {parent['id']!r} was not generated with the knobs of task '{task.name}', so it "
                              "cannot be varied. Give a run of this task whose curriculum sets these knobs, or leave "
                              "the run out")
        middle = np.array([before[name] for name in task.knobs], float)
        values = np.clip(middle + _NEAR * (high - low) * rng.standard_normal(len(low)), low, high)
    knobs = dict(zip(task.knobs, values.round(6).tolist(), strict=True))
    row = row_of(task, generated(task, number, knobs), location)
    return {**row, "generator": "vary-knobs" if parent else "knobs", "verifier": f"made by task {task.name}"}


Explore = Callable[[Sequence[int]], Iterable[Candidate]]
"""A function that takes numbers of candidates (0, 1, ...) and returns the candidates with these numbers, in the same
order."""


@contextmanager
def explorers(config: Config, search: Search, location: MediaLocation) -> Iterator[Explore]:
    """Context manager that yields a function which lets `environment.workers` processes propose candidates. At its end,
    the processes and everything that the task has started in them end, so that afterwards a model can be loaded and
    processes can be forked."""
    with ProcessPoolExecutor(config.environment.workers, get_context("spawn"), _begin,
                             (config, search, location)) as pool:
        try:
            yield lambda numbers: pool.map(_explored, numbers)
        except BrokenProcessPool:
            raise TaskError("a process that proposes candidates died, perhaps because memory ran out. Repeat the "
                            "command to continue; environment.workers=1 needs less memory") from None
        finally:
            pool.shutdown(cancel_futures=True)


_exploring: list[tuple[Task, Search, MediaLocation]] = []
"""In a worker process: a list whose only entry is (task, search, location of images)."""


def _begin(config: Config, search: Search, location: MediaLocation) -> None:
    _exploring[:] = [(make_task(config), search, location)]


def _explored(number: int) -> Candidate:
    ((task, search, location),) = _exploring
    with ending_forked_copies():
        return propose(task, number, search.parents, location)
