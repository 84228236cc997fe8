"""Reads data files into the samples of a split at the start of a run; bad rows stop the run or are left out."""

from __future__ import annotations

import glob
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlrl.config.paths import searched_in, similar_file, split_of_folder
from vlrl.config.schema import DataSettings
from vlrl.data.media import MediaAccess
from vlrl.data.row_samples import checked_sample, make_sample, repeated_id
from vlrl.data.samples import SPLITS, BadRow, Samples, bad_row_lines
from vlrl.data.sources import hub
from vlrl.data.sources.answer_types import AnswerTrend, TypeTable, settle_type
from vlrl.data.sources.box_forms import assumed_form, box_doubt
from vlrl.data.sources.fields import RecordSource
from vlrl.data.sources.folders import rows_of_split, split_files
from vlrl.data.sources.heldout import part_of
from vlrl.data.sources.lazy_dataset import lazy_samples
from vlrl.data.sources.reading import canonical_rows, rename_columns, rows_in
from vlrl.errors import ConfigError, DataError
from vlrl.store.files import cache_folder
from vlrl.types import Sample

log = logging.getLogger(__name__)


def read_rows(path: Path, format: str = "auto") -> list[dict[str, Any]]:
    """Returns the canonical rows of a file in any format of `vlrl.data.formats`. Raises DataError naming the file and
    line of a bad row, and ConfigError for an unknown format."""
    rows = []
    for where, row in rows_in(Path(path), format):
        if isinstance(row, DataError):
            raise DataError(f"{where}: {row}")
        rows.append(row)
    return rows


def read_samples(task: Any, split: str) -> Sequence[Sample]:
    """Reads the files of `data.<split>` and returns a sample for each row, made by `task.sample_from_row`.

    Checks that media files exist, that boxes and points lie inside the image, and that ids are unique (`rows_in` has
    already renamed repeated ids of other formats). If the `split` fields of the rows name both training and held-out
    splits (train; val, test ...), only the rows of `split` are read. With `data.heldout_share` and
    no `data.heldout`, both splits are parts of data.train.

    With `data.quarantine`, bad rows are left out, logged and listed in the attribute `quarantined` of the result;
    otherwise the first bad row stops the run. Rows of large files are read and checked on demand, see `data.index`.

    Raises ConfigError if the split has no file, DataError naming file, line and row."""
    data = task.data or DataSettings()
    share = 0.0 if data.heldout else data.heldout_share
    source = "train" if share else split
    files, root = _split_files(task, source)
    samples = lazy_samples(task, source, files, root) or _all_samples(task, source, files, root)
    return part_of(samples, split, share, data.seed, data.train) if share else samples


def _all_samples(task: Any, split: str, files: Sequence[Path], root: Path) -> Samples:
    data, roots = task.data, MediaAccess.of(task.data).roots
    samples: list[Sample] = []
    places: dict[str, str] = {}
    bad: list[BadRow] = []
    taken: set[str] = set()
    types, shapes = TypeTable(), Counter[str]()
    rows = [entry for path in files for entry in rows_in(
        path, data.format, root, data.columns, roots, taken, cache=data.cache, answer_type=data.answer_type,
        types=types, boxes=data.boxes, shapes=shapes)]
    if guessed := types.guessed():
        log.info("data.%s: answer types guessed, since no field states them: %s (vlrl data check shows examples, "
                 "data.answer_type overrides the guesses)", split, guessed)
    fields = {name for _, row in rows if not isinstance(row, DataError) for name in row}
    if said := assumed_form(shapes, fields, data.boxes):
        log.info("data.%s: %s", split, said)
    for where, row in rows_of_split(rows, split):
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
    found = box_doubt([row for _, row in rows if not isinstance(row, DataError)], data.boxes)
    return f"\n{found.message}" if found else ""


def sample_from(task: Any, row: Mapping[str, Any], root: Path) -> Sample:
    """Makes a sample from one row in any format of `data.format`, for scoring. The media of the row need not exist.

    If the row's media paths lie outside `root`, the sample has no media. Raises DataError naming the row."""
    data = task.data or DataSettings()
    rows = canonical_rows(rename_columns(dict(row), data.columns), data.format,
                          RecordSource(root=root, boxes=data.boxes))
    if len(rows) != 1:
        raise DataError(f"the record gives {len(rows)} rows, but one row is needed: pass one of the rows "
                        "that `vlrl data convert` writes")
    row = settle_type(rows[0], AnswerTrend.of(rows), data.answer_type)
    try:
        return make_sample(task, row, root)
    except DataError:
        outside = make_sample(task, row, Path("/"))  # raises again unless only the paths were wrong
        return Sample(id=outside.id, row=outside.row, prompt=outside.prompt)


def _split_files(task: Any, split: str) -> tuple[list[Path], Path]:
    if split not in SPLITS:
        raise ConfigError(f"files can be read for the splits {' and '.join(SPLITS)}, not for {split!r}")
    data, name = task.data, getattr(task.data, split, "")
    if not name:
        raise ConfigError(f"data.{split} is not set: task '{task.name}' reads its rows from a file, e.g. "
                          f"data.{split}=rows.jsonl")
    try:
        files, root = locate_files(name, data.cache)
    except ConfigError as error:
        raise ConfigError(f"data.{split}={name!r}: {error}") from None
    if root is None and len({file.parent for file in files}) > 1 and not data.root:
        raise ConfigError(f"data.{split}={name!r} matches files in several folders: set data.root to the root "
                          "folder of their media")
    return files, Path(data.root) if data.root else root or files[0].parent


def several(name: str) -> bool:
    """Whether a name stands for several files (a pattern, a split of a folder, or a Hub data set) instead of an
    existing path."""
    many = glob.has_magic(name) or split_of_folder(name) or hub.parse_hub_name(name)
    return not os.path.exists(name) and bool(many)


def locate_files(name: str, cache: str = "") -> tuple[list[Path], Path | None]:
    """Returns the files that a name in data.train or data.heldout stands for, and the root folder of their media.

    If the root folder is None, media lie in the folder of the first file. A name is a file or folder, a pattern
    (`rows-*.jsonl`), a split of a folder (`folder@train`), or a Hub data set, which is downloaded into the cache.
    Raises ConfigError if there is no such file; the message does not name the setting."""
    hub_name = hub.parse_hub_name(name)
    if hub_name and hub.is_local(name):
        log.info("%s: the local path of this name is read, not the Hub data set", name)
    if os.path.exists(name):
        return [Path(name)], None
    if part := split_of_folder(name):
        folder, files = Path(part[0]), split_files(Path(part[0]), part[1])
        return files, folder if files != [folder] else None
    if glob.has_magic(name) and (matches := sorted(map(Path, glob.glob(name)))):
        return matches, None
    if hub_name:
        return hub.fetch_split(hub_name, cache_folder(cache))
    raise ConfigError(f"this file does not exist{searched_in(name)}{similar_file(Path(name))}")
