"""What the rows of a training split are, so that a run notices when they are others at a resume. No torch.

A fingerprint has the CRC-32 of each row: of its id and its fields, not of what its media files hold. Of rows that are
read when they are drawn (data.index) it has those of some rows, evenly spread. Samples that code makes on demand have
none but their number.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.data.samples import compared, parts_of, readable
from vlrl.data.sequences import SampleSequence
from vlrl.errors import DataError, RunError
from vlrl.types import Sample

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Of the samples of a split."""

    rows: int
    places: np.ndarray
    """[K] int64: the rows that are compared."""
    sums: np.ndarray
    """[K] uint32: CRC-32 of each of them."""
    ids: tuple[str, ...]
    """[K] ids of them; no part of the state."""
    files: Mapping[Path, tuple[int, int]]
    """Bytes and time of writing (ns) of the files that the rows were read from; no part of the state."""

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "sums": self.sums}

    def check(self, state: Mapping[str, Any], named: str) -> None:
        """Raises RunError where the rows are not those of a checkpoint's state; `named` says for the message where
        they come from."""
        before, way = int(state["rows"]), ("Bring the rows back as they were, choose another run.dir, or start over "
                                           "with resume=never (the old run is kept beside).")
        sums = np.asarray(state["sums"]) if "sums" in state else self.sums  # of a checkpoint that has none
        if before != self.rows:
            changed = f"there were {before:,} rows and now there are {self.rows:,}"
        elif len(sums) == len(self.sums) and (sums == self.sums).all():
            return
        else:
            changed = self._changed(sums)
        raise RunError(f"the samples of {named} are not those of the checkpoint: {changed}. What the run knows of its "
                       f"prompts goes by their places. {way}")

    def _changed(self, sums: np.ndarray) -> str:
        if len(sums) != len(self.sums):
            return "its rows were read in another way (data.index)"
        other = np.flatnonzero(sums != self.sums)
        shown = ", ".join(f"{self.ids[i]!r} (row {self.places[i] + 1})" for i in other[:_SHOWN].tolist())
        more = f" and {len(other) - _SHOWN:,} more" if len(other) > _SHOWN else ""
        compared = f" of the {len(self.sums):,} that are compared" if len(self.sums) < self.rows else ""
        moved = "the same rows in another order: " if sorted(sums) == sorted(self.sums) else ""
        return f"{len(other):,} rows{compared} are others, {moved}{shown}{more}"

    def written_to(self) -> list[str]:
        """Returns the files that are no longer what they were when the run began."""
        return [str(path) for path, before in self.files.items() if _state(path) != before]


def fingerprint_of(samples: Sequence[Sample]) -> Fingerprint:
    """Returns the fingerprint of a split's samples."""
    known = [*compared(samples)]
    checksums = [_read(samples, i) for i in known]
    return Fingerprint(len(samples), np.array(known, dtype=np.int64),
                       np.array([crc for _, crc in checksums], dtype=np.uint32), tuple(id for id, _ in checksums),
                       {path: _state(path) for path in _files(samples)})


def _read(samples: Sequence[Sample], index: int) -> tuple[str, int]:
    """Id and CRC-32 of a row; of one that is read when it is drawn, of the record in the file, so that it is not made
    into a sample before its turn."""
    try:
        unmade = samples.unmade(index) if isinstance(samples, SampleSequence) else None
    except DataError:
        return "", 0
    if unmade:
        return unmade[0], row_sum("", unmade[1])
    sample = readable(samples, index)
    return (sample.id, row_sum(sample.id, sample.row)) if sample else ("", 0)


def _files(samples: Sequence[Sample]) -> list[Path]:
    return [path for own in parts_of(samples) for path in getattr(own, "files", ()) if path.is_file()]


def _state(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def row_sum(id: str, row: Any) -> int:
    """Returns the CRC-32 of a row: of its id and fields."""
    try:
        text = json.dumps([id, row], default=_other, skipkeys=True)
    except (ValueError, RecursionError):
        text = json.dumps(id)
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _other(value: Any) -> Any:
    if isinstance(value, bytes):
        return zlib.crc32(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else type(value).__name__
