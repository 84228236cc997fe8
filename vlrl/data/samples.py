"""The samples of a split: read from files at the start, or drawn by code on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.config.registry import failure
from vlrl.data.reasons import reason_lines
from vlrl.data.sequences import SampleSequence
from vlrl.errors import DataError, TaskError, VlrlError
from vlrl.types import Sample

SPLITS = ("train", "heldout")
SPLIT_NAMES = {"train": "train", "training": "train", "val": "heldout", "valid": "heldout", "validation": "heldout",
               "dev": "heldout", "test": "heldout", "testing": "heldout", "eval": "heldout", "heldout": "heldout"}
"""Name of a split in folders, files and `split` fields -> its side."""


def side_of(name: Any) -> str | None:
    """train or heldout, from the name of a split, a file ("train-00000-of-2.parquet") or a folder; None for other
    names."""
    word = str(name).lower().replace("_", "-").split("-")[0].split(".")[0]
    return SPLIT_NAMES.get(word)


def with_split(settings: Iterable[Any]) -> list[str]:
    """Names in data.train and data.heldout with a split, as in org/name@train: splits of Hub data sets and of folders.
    """
    names = [getattr(one, split, None) or "" for one in settings for split in SPLITS]
    return [name for name in dict.fromkeys(names) if "@" in name]


@dataclass(frozen=True)
class BadRow:
    """A row that was left out."""

    where: str
    """File and line, or file and number."""
    reason: str


def bad_row_lines(bad: Iterable[BadRow]) -> list[str]:
    """`reason_lines` of rows that were left out."""
    return reason_lines((row.where, row.reason) for row in bad)


class Samples(SampleSequence):
    """The usable samples of files, media unread, and the rows that were left out."""

    def __init__(self, samples: Sequence[Sample], quarantined: Sequence[BadRow] = (), files: Sequence[Path] = (),
                 places: Sequence[str] = ()):
        self._samples, self._places = tuple(samples), tuple(places)
        self.quarantined = tuple(quarantined)
        self.files = tuple(files)

    def __len__(self) -> int:
        return len(self._samples)

    def _at(self, place: int) -> Sample:
        return self._samples[place]

    def where(self, place: int) -> str:
        return self._places[place] if self._places else ""

    def fingerprint_rows(self) -> Sequence[int]:
        return range(len(self))


class Drawn(SampleSequence):
    """`count` samples that code makes on demand; sample i is `make(i)`, the same every time."""

    def __init__(self, count: int, make: Callable[[int], Sample]):
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def _at(self, index: int) -> Sample:
        try:
            return self._make(index)
        except VlrlError:
            raise
        except (Exception, SystemExit) as error:  # an IndexError would silently end a loop over the samples
            raise TaskError(f"sample {index} cannot be drawn: {failure(error)}") from error


def readable(samples: Sequence[Sample], index: int) -> Sample | None:
    """A sample; None if its row is read only now and is bad."""
    try:
        return samples[index]
    except DataError:
        return None


def parts_of(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """The samples of each task of a mixture, or the samples of a single task as one entry."""
    return [*samples.parts.values()] if isinstance(samples, SampleSequence) and samples.parts else [samples]


def fingerprint_rows(samples: Sequence[Sample]) -> Sequence[int]:
    """As SampleSequence.fingerprint_rows; all indices of a list."""
    if isinstance(samples, SampleSequence):
        return samples.fingerprint_rows()
    return range(len(samples)) if isinstance(samples, (list, tuple)) else ()
