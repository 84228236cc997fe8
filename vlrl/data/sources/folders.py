"""Reads the records of a file, or of a folder: one folder of images per class, images with a metadata file, shards
written by the library `datasets`, GOT-10k.

Media paths begin with the folder's name, so they are relative to its parent folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlrl.data.embedded import SpillFile, spill
from vlrl.data.media import IMAGE_SUFFIXES
from vlrl.data.samples import SPLIT_NAMES, train_or_heldout
from vlrl.data.sources.fields import IMAGE, VIDEO
from vlrl.data.sources.files import READERS, FileRecord, file_records, shallow
from vlrl.data.sources.hub import NoSuchSplit, selected
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.store.files import cache_folder

log = logging.getLogger(__name__)

_SHARDS = (".parquet", ".arrow", ".tar", ".jsonl", ".ndjson")
"""Suffixes of shards. In a folder with several of these suffixes, only files with the first of them are read."""
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_MOST = 5_000_000
"""Maximum number of files in a folder."""


def folder_records(path: Path) -> Iterator[FileRecord]:
    """Yields the records of a folder. Raises DataError if the folder holds no records."""
    files = sorted(_files(path))
    kinds = (("metadata beside the images", [f for f in files if os.path.basename(f) in _METADATA], _metadata_records),
             ("shards", _shards(files), _shard),
             ("sequences", [f for f in files if os.path.basename(f) == "groundtruth.txt"], _metadata_records),
             ("classes", [f for f in files if f.lower().endswith(IMAGE_SUFFIXES) and f.count("/") >= 1], _image_record))
    layout = next(((chosen, read) for _, chosen, read in kinds if chosen), None)
    if layout is None:
        raise DataError(f"{path}: the folder holds no rows. It may hold a folder of images for each class, images with "
                        f"{' or '.join(_METADATA)}, {' or '.join(_SHARDS)} shards, or GOT-10k sequences. "
                        "Rows of any other kind must be in a file: give the path of this file")
    chosen, read = layout
    for file in chosen:
        yield from read(path, file)


def rows_of_split(rows: list[Any], split: str) -> list[Any]:
    """Returns the (location, row) pairs that belong to `split`, if `split` fields name both training and held-out
    splits; else all pairs.

    Rows whose split is unknown are always included."""
    sides = [None if isinstance(row, DataError) else train_or_heldout(row.get("split")) for _, row in rows]
    if not {"train", "heldout"} <= set(sides):
        return rows
    return [row for row, side in zip(rows, sides, strict=True) if side in (None, split)]


def _files(path: Path) -> Iterator[str]:
    count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            count += 1
            if count > _MOST:
                raise DataError(f"{path} holds more than {_MOST} files; give the path of a subfolder")
            yield os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/")


def shards_of(path: Path) -> list[str]:
    """Returns the sorted paths of a folder's shards (its row files with the first suffix of _SHARDS that occurs),
    relative to the folder; [] if the folder has a metadata file for images."""
    files = sorted(_files(path))
    beside = any(os.path.basename(f) in _METADATA for f in files)
    return [] if beside else _shards(files)


def _shards(files: list[str]) -> list[str]:
    """Returns the row files with the first suffix in _SHARDS that occurs; [] if none occurs.

    Files cache-*, in which the library `datasets` stores results of map and filter, repeat rows and are skipped. In a
    folder with images, JSON lines do not count as shards."""
    pictured = any(file.lower().endswith(IMAGE_SUFFIXES) for file in files)
    for kind in _SHARDS[:3 if pictured else None]:
        if shards := [f for f in files if f.endswith(kind) and not os.path.basename(f).startswith("cache-")]:
            return shards
    return []


def split_files(path: Path, split: str) -> list[Path]:
    """Returns the row files of a split of a folder. If the library `datasets` wrote the folder, returns only the
    split's subfolder. Raises ConfigError listing the existing splits if there is no such split."""
    if os.path.isfile(path / "dataset_dict.json") and os.path.isdir(path / split):
        return [path / split]
    try:
        files = [file for file in sorted(_files(path)) if not os.path.basename(file).startswith("cache-")]
        selection = selected(files, (), "", split)
    except NoSuchSplit as error:
        raise ConfigError(f"the folder {path} has no split {split!r}.{did_you_mean(split, error.known)} There are: "
                          f"{', '.join(error.known) or 'none'}") from None
    return [path / file for file in selection.read]


def split_of(file: str) -> dict[str, str]:
    """Returns {"split": name} if a folder or file name in the path is the name of a split; else {}."""
    split_part = next((part for part in file.split("/") if train_or_heldout(part)), None)
    return {"split": split_part.split("-")[0].split(".")[0]} if split_part else {}


def _image_record(path: Path, file: str) -> Iterator[FileRecord]:
    parts = file.split("/")
    inner = [p for p in parts[:-1] if p not in SPLIT_NAMES]
    if inner:
        yield FileRecord(f"{path}, {file}", file, {
            "image": f"{path.name}/{file}", "label": inner[-1],
            **({"split": parts[0]} if parts[0] in SPLIT_NAMES else {})})


def _shard(path: Path, file: str) -> Iterator[FileRecord]:
    for n, (where, id, record) in enumerate(READERS[os.path.splitext(file)[1]](path / file), 1):
        yield FileRecord(where, id if file.endswith(".tar") else f"{os.path.splitext(file)[0]}-{n}",
                     record if isinstance(record, DataError) else {**split_of(file), **record})


def _metadata_records(path: Path, file: str) -> Iterator[FileRecord]:
    inner = "/".join(filter(None, (path.name, os.path.dirname(file))))
    for where, id, record in READERS[os.path.splitext(file)[1]](path / file):
        if not isinstance(record, DataError):
            record = {**split_of(file), **{k: _inside(inner, v) if k in (*IMAGE, *VIDEO) else v
                                         for k, v in record.items()}}
            if file.endswith("groundtruth.txt"):
                record["path"] = inner
        yield FileRecord(where, f"{os.path.dirname(file)}/{id}".lstrip("/"), record)


def _inside(folder: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_inside(folder, v) for v in value]
    return f"{folder}/{value}" if isinstance(value, str) and value else value


def records(path: Path, is_record: Callable[[Mapping[str, Any]], Any] = lambda document: False,
            cache: str = "") -> list[FileRecord]:
    """Returns the records of a file or folder. To save memory, embedded media are moved to a file in the folder
    `cache`.

    `is_record(document)` decides whether a .json document that is one object is itself a record, or contains a list of
    records. Raises DataError if the path cannot be read as a whole."""
    entries = folder_records(path) if os.path.isdir(path) else file_records(path, is_record)
    folder = cache_folder(cache)
    try:
        file = SpillFile(folder)
    except OSError as error:
        log.warning("media inside rows are held in memory, because %s cannot be written: %s. Set data.cache to another "
                    "folder", folder, error.strerror or error)
        return [one._replace(record=shallow(one.record)) for one in entries]
    try:
        return [one._replace(record=record if isinstance(record := shallow(one.record), DataError) else spill(
            record, file)) for one in entries]
    except OSError as error:
        raise DataError(f"{path}: the media inside its rows do not fit on the disk of the cache: "
                        f"{error.strerror or error}. Set data.cache (XDG_CACHE_HOME) to a folder on a "
                        "larger disk") from None
