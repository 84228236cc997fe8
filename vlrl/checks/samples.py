"""Samples of a task as rows under examination, for the start of a run and for `vlrl tasks check`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vlrl.checks.media_files import Key, drawn, keys
from vlrl.checks.rule import CheckedRow, MediaFile
from vlrl.config.schema import LimitsSettings
from vlrl.data.sequences import where
from vlrl.errors import DataError
from vlrl.types import Sample


def row_at(samples: Sequence[Sample], place: int, split: str) -> CheckedRow:
    """Returns the sample at a place of a split, or why its row cannot be read. Ids of samples that code makes are
    unique in all splits, those of rows in one.
    """
    at = where(samples, place)
    row = CheckedRow(where=at or f"samples({split!r})[{place}]", row={}, path=Path(split if at else ""),
                     side="train" if split == "train" else "heldout")
    try:
        return of_sample(row, samples[place])
    except DataError as error:  # a row that is read only now
        row.error = str(error).removeprefix(f"{row.where}: ")
        return row


def of_sample(row: CheckedRow, sample: Sample) -> CheckedRow:
    """Puts a sample into a row, and returns it."""
    row.sample, row.row, row.id = sample, sample.row, sample.id
    return row


def look(row: CheckedRow, file: Callable[[Key], MediaFile], limits: LimitsSettings | None = None) -> CheckedRow:
    """Adds what `file` says of each file that the sample shows, and what its task has drawn; within `limits`, where
    that is looked at. Returns the row.
    """
    media = row.sample.media if row.sample else ()
    row.files = [*(file(key) for one in media for key in keys(one)), *drawn(media, limits)]
    return row
