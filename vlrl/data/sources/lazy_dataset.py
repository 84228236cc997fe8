"""Samples of files larger than memory: each row is read, checked and turned into a sample on demand."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.config.schema import DataSettings
from vlrl.data.embedded import without_bytes
from vlrl.data.media import MediaAccess
from vlrl.data.row_samples import checked_sample
from vlrl.data.samples import SampleSequence
from vlrl.data.sources.answer_types import AnswerTrend, settle_type
from vlrl.data.sources.fields import RecordSource
from vlrl.data.sources.reading import check_columns, check_format, format_named, format_of, rename_columns, rows_as
from vlrl.data.sources.row_index import FileRecord, IndexedRecords, open_records, size_in_bytes
from vlrl.errors import ConfigError, DataError
from vlrl.store.files import cache_folder
from vlrl.types import Sample

log = logging.getLogger(__name__)

LARGE = 64 << 20
"""With data.index=auto, files of at least this many bytes are read on demand; compressed files count ten times their
size."""


_LOOKED_AT = 64
SPREAD = 256
"""Number of rows of a large file, spread evenly, that are compared instead of all rows when a run is resumed."""


class LazySamples(SampleSequence):
    """The samples of a split, made on demand. A bad row raises its DataError, naming file and line, at every access."""

    def __init__(self, task: Any, rows: IndexedRecords, split: str, root: Path, files: Sequence[Path] = ()):
        self.files = tuple(files)
        self._task, self._rows, self._root = task, rows, root
        self._columns = task.data.columns
        self._format = _format(rows, task.data)
        self._roots = MediaAccess.of(task.data).roots
        self._tendency = AnswerTrend.of(row for record in _looked_at(rows) for row in self._rows_of("", record))
        self._places = _rows_of_split(rows.splits, split)

    def __len__(self) -> int:
        return len(self._rows) if self._places is None else len(self._places)

    def record(self, index: int) -> FileRecord:
        """Returns location, id and raw record of the row at an index."""
        return self._rows[index if self._places is None else int(self._places[index])]

    def where(self, index: int) -> str:
        return self.record(index).where

    def fingerprint_rows(self) -> Sequence[int]:
        return sorted({round(i * (len(self) - 1) / (SPREAD - 1)) for i in range(SPREAD)})

    def raw_record(self, index: int) -> tuple[str, Any]:
        _, id, record = self.record(index)
        return str(record.get("id", id) if isinstance(record, Mapping) else id), record

    def _at(self, index: int) -> Sample:
        where, id, record = self.record(index)
        data = self._task.data
        try:
            (row,) = self._rows_of(id, record)
            return checked_sample(self._task, settle_type(row, self._tendency, data.answer_type), self._root)
        except DataError as error:
            way = "" if data.quarantine else " (data.quarantine=true leaves bad rows out)"
            raise DataError(f"{where}: {error}{way}") from error

    def _rows_of(self, id: str, record: Any) -> Sequence[Any]:
        data = self._task.data
        source, sure = RecordSource(id, self._root, self._roots, data.boxes), data.format != "auto"
        return rows_as(rename_columns(record, self._columns), self._format, source, sure=sure)


def lazy_samples(task: Any, split: str, files: Sequence[Path], root: Path) -> LazySamples | None:
    """Returns the samples of large files; None if `data.index` or the type of the files requires reading them as a
    whole.

    Raises ConfigError if data.index=lazy is impossible, and DataError for files that cannot be read or have no row."""
    data = task.data
    check_format(data.format)
    setting = "data.stream=true" if data.stream else "data.index=lazy" if data.index == "lazy" else ""
    if data.index == "memory" or (not setting and sum(map(size_in_bytes, files)) < LARGE):
        return None
    rows = open_records(files, cache_folder(data.cache))
    if rows is not None:
        check_columns(_looked_at(rows), data.columns, files[0])
    why = _unfit(rows, data)
    if rows is None or why:
        if setting:
            raise ConfigError(f"{setting}: {files[0]}: {why}. Remove the setting (data.index=memory reads all rows), "
                              f"or convert the file: vlrl data convert {files[0].name} -o rows.jsonl")
        return None
    samples = LazySamples(task, rows, split, root, files)
    if not len(samples):
        raise DataError(f"data.{split}={str(files[0])!r} has no usable row")
    log.info("data.%s: %d rows, each read on demand", split, len(samples))
    return samples


def _unfit(rows: IndexedRecords | None, data: DataSettings) -> str:
    """Returns the reason why rows cannot be read on demand; "" if they can. Only some of the rows are examined."""
    if rows is None:
        return "files of this kind are read as a whole; use .jsonl, .jsonl.gz, .parquet or .arrow"
    name = _format(rows, data)
    joins = f"format {name} joins or splits records, so its rows cannot be read one at a time"
    return "" if format_named(name).alone else joins


def _format(rows: IndexedRecords, data: DataSettings) -> str:
    if data.format != "auto":
        return data.format
    return format_of([rename_columns(record, data.columns) for record in _looked_at(rows)])


def _looked_at(rows: IndexedRecords) -> list[Any]:
    return [without_bytes(rows[i].record) for i in range(0, len(rows), max(1, len(rows) // _LOOKED_AT))]


def _rows_of_split(splits: np.ndarray | None, split: str) -> np.ndarray | None:
    """Returns the indices of the rows that belong to `split` or to no split; None, which means all rows, unless some
    rows belong to train and some to heldout.

    `splits` is the split of each row, as in IndexedRecords.splits."""
    if splits is None or not {1, 2} <= set(np.unique(splits).tolist()):
        return None
    return np.flatnonzero((splits == 0) | (splits == (1 if split == "train" else 2)))
