"""A fingerprint of the rows of a training split, by which a resumed run detects changed rows.

It contains a CRC-32 of each row's id and fields, but not of media files. For rows that are read on demand (data.index)
it contains the checksums of some evenly spaced rows. For samples generated on demand it only contains their number."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.data.samples import SampleSequence, fingerprint_rows, parts_of, readable
from vlrl.errors import DataError, RunError
from vlrl.types import Sample

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Checksums of rows of a split: of all rows, or of some if rows are read on demand."""

    rows: int
    places: np.ndarray  # [K] int64: indices of the rows that have a checksum
    sums: np.ndarray  # [K] uint32: the CRC-32 of each of these rows
    ids: tuple[str, ...]  # [K] ids of these rows; not saved
    files: Mapping[Path, tuple[int, int]]
    """Size in bytes and modification time (ns) of each file that rows were read from; not saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "sums": self.sums}

    def check(self, state: Mapping[str, Any], named: str) -> None:
        """Raises RunError if the rows have changed since a checkpoint. state: the `state_dict` of the Fingerprint in
        that checkpoint. named: the setting or task that provides the rows, for the message."""
        before = int(state["rows"])
        sums = np.asarray(state["sums"]) if "sums" in state else self.sums  # a checkpoint may have none
        if before != self.rows:
            changed = f"there were {before:,} rows and now there are {self.rows:,}"
        elif len(sums) == len(self.sums) and (sums == self.sums).all():
            return
        else:
            changed = self._changed(sums)
        raise RunError(f"the samples of {named} differ from those of the checkpoint: {changed}. A run stores results "
                       "of its prompts by row number. Restore the rows, choose another run.dir, or start over with "
                       "resume=never (the old run is kept).")

    def _changed(self, sums: np.ndarray) -> str:
        if len(sums) != len(self.sums):
            return "its rows were read with another data.index"
        other = np.flatnonzero(sums != self.sums)
        shown = ", ".join(f"{self.ids[i]!r} (row {self.places[i] + 1})" for i in other[:_SHOWN].tolist())
        more = f" and {len(other) - _SHOWN:,} more" if len(other) > _SHOWN else ""
        compared = f" of the {len(self.sums):,} compared rows" if len(self.sums) < self.rows else ""
        moved = "the same rows in another order: " if sorted(sums) == sorted(self.sums) else ""
        return f"{len(other):,} rows{compared} changed, {moved}{shown}{more}"

    def written_to(self) -> list[str]:
        """The files that were modified after the fingerprint was made."""
        return [str(path) for path, before in self.files.items() if _state(path) != before]


def fingerprint_of(samples: Sequence[Sample]) -> Fingerprint:
    """Makes the fingerprint of a split's samples."""
    known = [*fingerprint_rows(samples)]
    checksums = [_read(samples, i) for i in known]
    return Fingerprint(len(samples), np.array(known, dtype=np.int64),
                       np.array([crc for _, crc in checksums], dtype=np.uint32), tuple(id for id, _ in checksums),
                       {path: _state(path) for own in parts_of(samples) for path in getattr(own, "files", ())
                        if path.is_file()})


def _read(samples: Sequence[Sample], index: int) -> tuple[str, int]:
    """Returns (id, CRC-32) of the row `index`; ("", 0) if the row cannot be read. If rows are read on demand, the
    CRC-32 is that of the row's record in the file."""
    try:
        raw = samples.raw_record(index) if isinstance(samples, SampleSequence) else None
    except DataError:
        return "", 0
    if raw:
        return raw[0], row_sum("", raw[1])
    sample = readable(samples, index)
    return (sample.id, row_sum(sample.id, sample.row)) if sample else ("", 0)


def _state(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def row_sum(id: str, row: Any) -> int:
    """CRC-32 of a row's id and fields."""
    try:
        text = json.dumps([id, row], default=_other, skipkeys=True)
    except (ValueError, RecursionError):
        text = json.dumps(id)
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _other(value: Any) -> Any:
    if isinstance(value, bytes):
        return zlib.crc32(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else type(value).__name__
