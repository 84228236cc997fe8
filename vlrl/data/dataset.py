"""Data files -> the samples of a split: read at the start, or drawn by code; bad rows are named or left out."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.config.paths import split_of_folder, tried
from vlrl.config.registry import failure
from vlrl.data.media import Access
from vlrl.data.reasons import reason_lines
from vlrl.data.row_samples import checked_sample, repeated_id
from vlrl.data.sequences import SampleSequence
from vlrl.data.sources import hub
from vlrl.data.sources.answer_types import TypeTable
from vlrl.data.sources.box_forms import doubt
from vlrl.data.sources.folders import of_side, split_files
from vlrl.data.sources.json_text import MOST_LINE
from vlrl.data.sources.lazy_dataset import lazy_samples
from vlrl.data.sources.reading import rows_in
from vlrl.errors import ConfigError, DataError, RunError, TaskError, VlrlError
from vlrl.store.files import cache_folder, write_text
from vlrl.types import Sample

log = logging.getLogger(__name__)

SPLITS = ("train", "heldout")


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
    """The usable samples of a file, media unread, and the rows left out of it."""

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
        except (Exception, SystemExit) as error:  # an IndexError would end a loop over the samples in silence
            raise TaskError(f"sample {index} cannot be drawn: {failure(error)}") from error


def read_rows(path: Path, format: str = "auto") -> list[dict[str, Any]]:
    """Returns the canonical rows of a file in any format of `vlrl.data.formats`: an object a line, a list of objects
    ...

    Raises DataError naming the file and the line, ConfigError for an unknown format.
    """
    rows = []
    for where, row in rows_in(Path(path), format):
        if isinstance(row, DataError):
            raise DataError(f"{where}: {row}")
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as .jsonl (one object a line) or .json (a list), whole or not at all.

    Raises DataError for another suffix, a number that JSON cannot hold, and a place that cannot be written.
    """
    check_suffix(path)
    lines = [json_line(row) for row in rows]
    text = "".join(f"{line}\n" for line in lines) if path.suffix == ".jsonl" else "[" + ",\n ".join(lines) + "]\n"
    try:
        write_text(path, text)
    except RunError as error:
        cause = error.__cause__
        raise DataError(f"cannot write {path}: {getattr(cause, 'strerror', None) or cause}. Name another file, or free "
                        "space there.") from None


def json_line(row: Mapping[str, Any]) -> str:
    """Returns a row as one line of JSON; DataError when it holds NaN, an infinity, text that is not Unicode, or too
    much.
    """
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        line.encode()
    except (ValueError, TypeError) as error:  # a table holds dates, bytes ...
        raise DataError(f"row {row.get('id')!r} cannot be written as JSON: {error}") from None
    if len(line) > MOST_LINE:
        raise DataError(f"row {row.get('id')!r} has {len(line)} characters, more than the {MOST_LINE} that one row may "
                        "have")
    return line


def check_suffix(path: Path) -> None:
    """Raises DataError unless the file's name ends in .jsonl or .json."""
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(f"{path}: rows are kept in .jsonl (one object a line) or .json (a list of objects)")


def read_samples(task: Any, split: str) -> Sequence[Sample]:
    """Returns the samples in the files of `data.<split>`, made by `task.sample_from_row`.

    Media files exist, boxes and points lie inside the image, ids are unique (`rows_in` makes those of others so). Of
    files whose rows name both sides in `split` (train; val, test ...), those of this side are read.

    With `data.quarantine` bad rows are left out, logged and listed in `quarantined`; else the first stops the run. Of
    large files, see `data.index`, rows are read and checked one by one when they are asked for.

    Raises ConfigError when the split has no file, DataError naming file, line and row.
    """
    files, root = _split_files(task, split)
    return lazy_samples(task, split, files, root) or _all_samples(task, split, files, root)


def _all_samples(task: Any, split: str, files: Sequence[Path], root: Path) -> Samples:
    data, roots = task.data, Access.of(task.data).roots
    samples: list[Sample] = []
    places: dict[str, str] = {}
    bad: list[BadRow] = []
    taken: set[str] = set()
    types = TypeTable()
    rows = [entry for path in files for entry in rows_in(path, data.format, root, data.columns, roots, taken,
                                                         cache=data.cache,
                                                         answer_type=data.answer_type, types=types, boxes=data.boxes)]
    if guessed := types.guessed():
        log.info("data.%s: types of answers that no field says: %s (vlrl data check shows examples, data.answer_type "
                 "sets one)", split, guessed)
    for where, row in of_side(rows, split):
        try:
            sample = checked_sample(task, row, root)
            if problem := repeated_id(places, sample.id, where):
                raise DataError(problem)
            samples.append(sample)
        except DataError as error:
            if not data.quarantine:
                raise DataError(f"{where}: {error} (data.quarantine=true leaves bad rows out){_boxes(rows, data)}"
                                ) from error
            bad.append(BadRow(where, str(error)))
    if bad:
        listed = "".join(f"\n  {line}" for line in bad_row_lines(bad)[:20])
        log.warning("data.%s: left out %d of %d rows%s", split, len(bad), len(bad) + len(samples),
                    listed + _boxes(rows, data))
    if not samples:
        first = f"; {bad[0].where}: {bad[0].reason}" if bad else ""
        raise DataError(f"data.{split}={getattr(data, split)!r} has no usable row{first}")
    return Samples(samples, bad, files, [*places.values()])


def _boxes(rows: Sequence[tuple[str, Any]], data: Any) -> str:
    """Returns what the boxes of a file with bad rows seem to be, as a line of its own; "" where nothing shows."""
    found = doubt([row for _, row in rows if not isinstance(row, DataError)]) if data.boxes == "auto" else None
    return f"\n{found.message}" if found else ""


def readable(samples: Sequence[Sample], index: int) -> Sample | None:
    """Returns a sample; None when its row is read only now, and is bad."""
    try:
        return samples[index]
    except DataError:
        return None


def _split_files(task: Any, split: str) -> tuple[list[Path], Path]:
    """Returns the files, or the folder, of a split, and the folder that its media lie under."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: rows are read from files for {' and '.join(SPLITS)} only")
    data, name = task.data, getattr(task.data, split, "")
    if not name:
        raise ConfigError(f"data.{split} is not set: task '{task.name}' reads its rows from a file, e.g. "
                          f"data.{split}=rows.jsonl")
    try:
        files, root = located(name, data.cache)
    except ConfigError as error:
        raise ConfigError(f"data.{split}={name!r}: {error}") from None
    if root is None and len({file.parent for file in files}) > 1 and not data.root:
        raise ConfigError(f"data.{split}={name!r} fits files of several folders: set data.root to the folder that "
                          "their media lie under")
    return files, Path(data.root) if data.root else root or files[0].parent


def several(name: str) -> bool:
    """Returns whether a name is no path but stands for files: a pattern, a split of a folder, a data set of the Hub."""
    many = glob.has_magic(name) or split_of_folder(name) or hub.parsed(name)
    return not os.path.exists(name) and bool(many)


def located(name: str, cache: str = "") -> tuple[list[Path], Path | None]:
    """Returns what a name of rows stands for, and the folder of their media where that is not the folder of the first:
    a file or folder; the files that a pattern fits (`rows-*.jsonl`), by name; a split of a folder (`folder@train`); a
    data set of the Hub, which is fetched into the cache.

    Raises ConfigError, without the setting, where there is none.
    """
    hub_name = hub.parsed(name)
    if hub_name and hub.is_local(name):
        log.info("%s: what lies here under this name is read, not the data set of the Hub", name)
    if os.path.exists(name):
        return [Path(name)], None
    if part := split_of_folder(name):
        folder, files = Path(part[0]), split_files(Path(part[0]), part[1])
        return files, folder if files != [folder] else None
    if glob.has_magic(name) and (matches := sorted(map(Path, glob.glob(name)))):
        return matches, None
    if hub_name:
        return hub.fetched(hub_name, cache_folder(cache))
    raise ConfigError(f"this file does not exist{tried(name)}")
