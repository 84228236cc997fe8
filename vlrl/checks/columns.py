"""Rules of what a file says and nothing reads, and of boxes that seem to be others than they are taken for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlrl.checks.rule import CheckedRow, Context, Found
from vlrl.config.registry import Table
from vlrl.data import FIELDS, MEDIA_FIELDS
from vlrl.data.row_media import media_names
from vlrl.rewards.text import parse_answer
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.interface import task_messages, task_oracle
from vlrl.types import Sample

_ELSEWHERE = frozenset((*MEDIA_FIELDS, *(
    "id original_id split source category difficulty weight group_key meta solution hints system_prompt turns tools "
    "environment processed_size coordinates width height duration fps frames frame_times video_start video_end "
    "answer_type element_type platform knobs mask_rle pass_at_k reward_mean answers_scored difficulty_given generator "
    "parent verifier opened").split()))
"""Fields that samplers, splits, the loop or `vlrl sft` read, or that say how others are meant."""
_PLACED = frozenset(("boxes", "box", "points", "action"))
"""Fields that hold boxes and points."""
_SOURCES = Table({"doubt": "vlrl.data.sources.box_forms:box_doubt",
                  "is_bookkeeping": "vlrl.data.sources.unread:is_bookkeeping"})
_PROBED = 8
"""Rows of a task of which it is seen what is read."""
_LISTED = 8
_LONGEST = 60
_PLACE = re.compile(r"\{(\w+)\}")


def unread(rows: Sequence[CheckedRow], context: Context) -> Iterator[Found]:
    """Yields the columns that no prompt and no reward reads, in one line with an example each."""
    for task, places in _by_task(rows, context.task):
        columns = [_columns(rows[n]) for n in places]
        names = dict.fromkeys(name for given in columns for name in given)
        if not names or (task and has_environment(task)):
            continue
        read = _read(task, [rows[n] for n in places], names) if task else FIELDS
        left = {name: [given[name] for given in columns if name in given] for name in names if name not in read}
        if content := _content(left):
            first = next(n for n, given in zip(places, columns, strict=True) if content.keys() & given.keys())
            yield Found(_said(content, [*(left.keys() - content.keys())], len(places), task), row=first)


def box_units(rows: Sequence[CheckedRow], context: Context) -> Iterator[Found]:
    """Yields why boxes and points seem to be no corners in pixels, where nobody said what they are."""
    form = context.boxes or getattr(getattr(context.task, "data", None), "boxes", "auto")
    placed = form == "auto" and context.canonical and any(not _PLACED.isdisjoint(row.row) for row in rows)
    if placed and (found := _SOURCES["doubt"]([row.row for row in rows])):
        yield Found(found.message, row=found.row, level="error" if found.sure else None)


def _content(left: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Returns the columns that are not obviously bookkeeping."""
    return {name: values for name, values in left.items() if not _SOURCES["is_bookkeeping"](name, values[0])}


def _said(content: Mapping[str, Sequence[Any]], brief: Sequence[str], count: int, task: Task | None) -> str:
    listed = [f"'{name}' ({len(values):,} of {count:,} rows, e.g. {_short(values[0])})"
              for name, values in list(content.items())[:_LISTED]]
    more = len(content) - len(listed)
    rest = f", and {more} more" if more > 0 else ""
    numbers = f"; nor what seems to be bookkeeping: {', '.join(sorted(brief)[:_LISTED])}" if brief else ""
    whose = f"no prompt and no reward of task '{task.name}' reads" if task else "no field of the rows is made of"
    first = next(iter(content))
    return (f"{whose} {', '.join(listed)}{rest}{numbers}. If it belongs to what is asked, write {{{first}}} into "
            f"task.prompt, or say what it stands for (--columns NAME={first}, data.columns); else leave it out")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def _by_task(rows: Sequence[CheckedRow], task: Task | None) -> list[tuple[Task | None, list[int]]]:
    """Returns each task with the numbers of its rows, those that could be read."""
    groups: dict[int, tuple[Task | None, list[int]]] = {}
    for n, row in enumerate(rows):
        if row.row and not (task and row.sample is None):
            own = task.of(row.sample) if task and row.sample else task
            groups.setdefault(id(own), (own, []))[1].append(n)
    return list(groups.values())


def _columns(row: CheckedRow) -> dict[str, Any]:
    """Returns the columns of a row that have a value, those of its `meta` too."""
    meta = row.row.get("meta")
    both = {**(meta if isinstance(meta, Mapping) else {}), **row.row}
    return {str(k): v for k, v in both.items() if k not in _ELSEWHERE and v not in (None, "", [], {})
            and not any(media_names(str(k), v, row.root))}  # of media that are not shown another rule tells


# --- what a task reads ------------------------------------------------------------------------------------------------


class _Watched(dict[str, Any]):
    """A row that notes which of its fields are asked for by name."""

    def __init__(self, row: Mapping[str, Any], asked: set[str]):
        super().__init__(row)
        self.asked = asked
        if isinstance(row.get("meta"), Mapping):
            super().__setitem__("meta", _Watched(row["meta"], asked))

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def _read(task: Task, rows: Sequence[CheckedRow], names: Collection[str]) -> set[str]:
    """Returns the columns that a task asks rows for: for the prompt, the perfect answer and its score."""
    asked: set[str] = {name for text in map(str, vars(task).values()) for name in _PLACE.findall(text)}
    missing = [next(row for row in rows if name in _columns(row)) for name in names]
    for row in list({id(row): row for row in [*rows[:2], *missing]}.values())[:_PROBED]:
        if row.sample is not None:
            _watch(task, row.sample, row, asked)
    return asked


def _watch(task: Task, sample: Sample, row: CheckedRow, asked: set[str]) -> None:
    seen = replace(sample, row=_Watched(sample.row, asked))
    text = ""

    def score() -> None:
        task.score(seen, parse_answer(text))

    def answer() -> None:
        nonlocal text
        text = task_oracle(task, seen) or ""

    for look in (lambda: task.sample_from_row(_Watched(row.row, asked), row.root), lambda: task_messages(task, seen),
                 answer, lambda: task.target(seen), score, lambda: task.guidance(seen, ())):
        try:
            look()
        except (Exception, SystemExit):  # other rules say what is wrong with it
            continue
