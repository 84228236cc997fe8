"""Rules of columns that nothing reads, and of boxes that do not seem to be in the assumed format."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from vlrl.checks.finding import Finding
from vlrl.checks.rule import CheckedRow, Context
from vlrl.checks.tasks import prompt_text
from vlrl.config.registry import Table
from vlrl.data import FIELDS, MEDIA_FIELDS
from vlrl.data.row_media import media_names
from vlrl.rewards.text import parse_answer
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.interface import task_messages, task_oracle
from vlrl.types import Sample

_READ_ELSEWHERE = frozenset((*MEDIA_FIELDS, *(
    "id original_id split source category difficulty weight group_key meta solution hints system_prompt turns tools "
    "environment processed_size coordinates width height duration fps frames frame_times video_start video_end "
    "answer_type element_type platform knobs mask_rle pass_at_k reward_mean answers_scored difficulty_given generator "
    "parent verifier opened").split()))
"""Fields that are never reported as unused: samplers, splits, the training loop or `vlrl sft` read them, or they
describe other fields."""
_BOX_FIELDS = frozenset(("boxes", "box", "points", "action"))
_SOURCES = Table({"doubt": "vlrl.data.sources.box_forms:box_doubt",
                  "is_bookkeeping": "vlrl.data.sources.unread:is_bookkeeping"})
_PROBED = 8  # number of rows of a task that are used to find out which columns it reads
_LISTED = 8
_LONGEST = 60
_ALIKE = 0.75  # similarity of names, by difflib, from which a column is taken for a misspelt field
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def unread(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, Finding]]:
    """Yields an error for each column that is not read and whose name is similar to that of a field that the task reads
    and no row has, and one warning per task that lists the other columns used neither by the task's prompt nor by its
    reward, with an example value of each column."""
    for task, numbers in _by_task(rows, context.task):
        columns = [_columns(rows[n]) for n in numbers]
        names = dict.fromkeys(name for given in columns for name in given)
        if not names or (task and has_environment(task)):
            continue
        read = _columns_read(task, [rows[n] for n in numbers], names) if task else FIELDS
        left = {name: [given[name] for given in columns if name in given] for name in names if name not in read}
        taken = {"label"} if any(rows[n].row.get("multi") for n in numbers) else set[str]()  # from `labels`
        given = {field for n in numbers for field, value in rows[n].row.items() if value is not None}
        misspelt = _misspelt(left, (read - given) | taken) if task else {}
        for name, field in misspelt.items():
            yield _first(columns, numbers, [name]), Finding(
                message=f"nothing reads the column {name!r} ({_example(left.pop(name)[0])}), and no row has {field!r}, "
                        f"which the task reads. If {name!r} is misspelt, rename it or set data.columns="
                        f"{{{field}: {name}}}; otherwise remove it")
        content = {name: values for name, values in left.items() if not _SOURCES["is_bookkeeping"](name, values[0])}
        if content:
            message = _unread_message(content, [*(left.keys() - content.keys())], len(numbers), task)
            yield _first(columns, numbers, content), Finding(message=message, level="warning")


def _first(columns: Sequence[Mapping[str, Any]], numbers: Sequence[int], names: Collection[str]) -> int:
    """The number of the first row that has one of the columns `names`."""
    return next(n for n, given in zip(numbers, columns, strict=True) if not given.keys().isdisjoint(names))


def _misspelt(left: Collection[str], absent: Collection[str]) -> dict[str, str]:
    """{column that nothing reads: field of a similar name that is read and absent}."""
    fields = sorted(name for name in absent if name not in _READ_ELSEWHERE or name in MEDIA_FIELDS)
    near = {name: get_close_matches(name, fields, n=1, cutoff=_ALIKE) for name in left}
    return {name: found[0] for name, found in near.items() if found}


def box_units(rows: Sequence[CheckedRow], context: Context) -> Iterator[tuple[int, Finding]]:
    """Yields a finding if the boxes and points of the rows do not seem to be [x1, y1, x2, y2] and [x, y] in pixels,
    although no setting names their form."""
    form = context.boxes or getattr(getattr(context.task, "data", None), "boxes", "auto")
    checked = context.canonical and any(not _BOX_FIELDS.isdisjoint(row.row) for row in rows)
    if checked and (found := _SOURCES["doubt"]([row.row for row in rows], form)):
        yield found.row, Finding(message=found.message, level="error" if found.sure else "warning")


def _unread_message(content: Mapping[str, Sequence[Any]], bookkeeping: Sequence[str], count: int, task: Task | None
                    ) -> str:
    listed = []
    for name, values in [*content.items()][:_LISTED]:
        listed.append(f"'{name}' ({len(values):,} of {count:,} rows, {_example(values[0])})")
    rest = f", and {len(content) - _LISTED} more" if len(content) > _LISTED else ""
    also = (f"; nor columns that look like bookkeeping: {', '.join(sorted(bookkeeping)[:_LISTED])}" if bookkeeping
            else "")
    who = f"neither prompt nor reward of task '{task.name}' reads" if task else "no field of the rows is read from"
    first = next(iter(content))
    return (f"{who} {', '.join(listed)}{rest}{also}. If it belongs to the question, write {{{first}}} into task.prompt "
            f"or say which field it is (--columns NAME={first}, data.columns); otherwise remove it")


def _example(value: Any) -> str:
    shown = repr(value)
    return f"e.g. {shown if len(shown) <= _LONGEST else f'{shown[:_LONGEST]}...'}"


def _by_task(rows: Sequence[CheckedRow], task: Task | None) -> list[tuple[Task | None, list[int]]]:
    groups: dict[int, tuple[Task | None, list[int]]] = {}
    for n, row in enumerate(rows):
        if row.row and not row.error and not (task and row.sample is None):
            own = task.of(row.sample) if task and row.sample else task
            groups.setdefault(id(own), (own, []))[1].append(n)
    return list(groups.values())


def _columns(row: CheckedRow) -> dict[str, Any]:
    """The columns of a row that have a value, including the entries of its `meta`."""
    meta = row.row.get("meta")
    both = {**(meta if isinstance(meta, Mapping) else {}), **row.row}
    return {str(k): v for k, v in both.items() if k not in _READ_ELSEWHERE and v not in (None, "", [], {})
            and not any(media_names(str(k), v, row.root))}  # media that are not shown have a rule of their own


# --- what a task reads ------------------------------------------------------------------------------------------------


class _RecordingRow(dict[str, Any]):
    """A row that records which of its fields are accessed by name."""

    def __init__(self, row: Mapping[str, Any], read: set[str]):
        super().__init__(row)
        self.read = read
        if isinstance(row.get("meta"), Mapping):
            super().__setitem__("meta", _RecordingRow(row["meta"], read))

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def _columns_read(task: Task, rows: Sequence[CheckedRow], names: Collection[str]) -> set[str]:
    read: set[str] = {name for text in map(str, vars(task).values()) for name in _PLACEHOLDER.findall(text)}
    having = [next(row for row in rows if name in _columns(row)) for name in names]
    for row in list({id(row): row for row in [*rows[:2], *having]}.values())[:_PROBED]:
        if row.sample is not None:
            _record_reads(task, row.sample, row, read)
    return read


def _record_reads(task: Task, sample: Sample, row: CheckedRow, read: set[str]) -> None:
    recorded = replace(sample, row=_RecordingRow(sample.row, read))
    text = ""

    def answer() -> None:
        nonlocal text
        text = task_oracle(task, recorded) or ""

    shown = set[str]()

    def ask() -> None:
        messages = task_messages(task, replace(sample, row=_RecordingRow(sample.row, shown)))
        if str(sample.get("question")) not in prompt_text(messages):  # it was only searched for marks of media
            shown.discard("question")
        read.update(shown)

    for use in (lambda: task.sample_from_row(_RecordingRow(row.row, read), row.root), ask, answer,
                lambda: task.target(recorded), lambda: task.score(recorded, parse_answer(text)),
                lambda: task.guidance(recorded, ())):
        try:
            use()
        except (Exception, SystemExit):  # other rules report it
            continue
