"""Rows of a data file -> samples. A row is one JSON object with canonical fields; media paths are relative to a root.

    {"id": "7", "image": "img/7.jpg", "width": 640, "height": 480, "expression": "the red mug",
     "boxes": [{"box": [31, 40, 75, 84], "label": "mug"}]}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from vlrl.errors import ConfigError, DataError
from vlrl.media import resolve
from vlrl.types import Media, Sample

log = logging.getLogger(__name__)

SPLITS = ("train", "heldout")
FORMATS = ("auto", "canonical")
_FIELDS = (
    "id difficulty category source split weight processed_size coordinates solution hints group_key meta "
    "image images video width height video_start video_end duration fps frames "
    "expression labels boxes points count mask_rle "
    "instruction box action history platform element_type "
    "question answer_type answer options spans tracks tolerance "
    "label synonyms multi plan speed_mps navigation trajectory obstacles responses"
)
FIELDS = frozenset(_FIELDS.split())
"""The canonical fields of all tasks. Others are kept where they are and gathered in `meta` as well."""


@dataclass(frozen=True)
class BadRow:
    """A row that was left out."""

    where: str
    """File and line, or file and number."""
    reason: str


class Samples(Sequence[Sample]):
    """The usable samples of a file, media unread, and the rows left out of it."""

    def __init__(self, samples: Sequence[Sample], quarantined: Sequence[BadRow] = ()):
        self._samples = tuple(samples)
        self.quarantined = tuple(quarantined)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        return self._samples[index]


class Drawn(Sequence[Sample]):
    """`count` samples that code makes on demand; sample i is `make(i)`, the same every time."""

    def __init__(self, count: int, make: Callable[[int], Sample]):
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        places = range(self._count)[index]
        return [self._make(i) for i in places] if isinstance(places, range) else self._make(places)


def read_rows(path: Path, format: str = "auto") -> list[dict[str, Any]]:
    """The rows of a .jsonl file (one object a line) or a .json file (a list of objects).

    Raises DataError naming the file and the line, ConfigError for an unknown format.
    """
    _check_format(format)
    rows = []
    for where, row in _rows(Path(path)):
        if isinstance(row, DataError):
            raise DataError(f"{where}: {row}")
        rows.append(row)
    return rows


def sample_from_row(row: Mapping[str, Any], root: Path | None = None) -> Sample:
    """A sample from a canonical row. Media come from `image`, `images` or `video`, resolved under `root`, unread.

    Fields that are not canonical stay in the row and are gathered in its `meta` too.

    Raises DataError naming the row for a missing id, a media path that cannot be used, a difficulty outside [0, 1] or a
    negative weight.
    """
    sample_id = row.get("id")
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int)) or sample_id == "":
        raise DataError(f"the row has id={sample_id!r}; every row needs an 'id', a text or a whole number")
    unknown = {k: v for k, v in row.items() if k not in FIELDS}
    clean = {**row, "id": str(sample_id)}
    if unknown:
        clean["meta"] = {**unknown, **(row.get("meta") or {})}
    try:
        _check_number(row, "difficulty", 1.0)
        _check_number(row, "weight", float("inf"))
        return Sample(id=str(sample_id), row=clean, media=_media(row, root or Path.cwd()))
    except DataError as error:
        raise DataError(f"row '{sample_id}': {error}") from None


def read_samples(task: Any, split: str) -> Samples:
    """The samples in the file of `data.<split>`, made by `task.sample_from_row`; media files exist, ids are unique.

    With `data.quarantine` bad rows are left out, logged and listed in `quarantined`; else the first stops the run.

    Raises ConfigError when the split has no file, DataError naming file, line and row.
    """
    path = _split_file(task, split)
    data = task.data
    _check_format(data.format)
    root = Path(data.root) if data.root else path.parent
    samples: dict[str, Sample] = {}
    bad: list[BadRow] = []
    for where, row in _rows(path):
        try:
            sample = _checked_sample(task, row, root)
            if sample.id in samples:
                raise DataError(f"row '{sample.id}': this id occurs before; ids must be unique")
            samples[sample.id] = sample
        except DataError as error:
            if not data.quarantine:
                raise DataError(f"{where}: {error} (data.quarantine=true leaves bad rows out)") from error
            bad.append(BadRow(where, str(error)))
    if bad:
        listed = "".join(f"\n  {b.where}: {b.reason}" for b in bad[:20])
        log.warning("data.%s: left out %d of %d rows%s", split, len(bad), len(bad) + len(samples), listed)
    if not samples:
        raise DataError(f"data.{split}={str(path)!r} has no usable row")
    return Samples(list(samples.values()), bad)


def _checked_sample(task: Any, row: Mapping[str, Any] | DataError, root: Path) -> Sample:
    if isinstance(row, DataError):
        raise row
    try:
        sample = task.sample_from_row(row, root)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"row '{row.get('id')}': {type(error).__name__}: {error}") from error
    for media in sample.media:
        if isinstance(media.source, Path) and not media.source.is_file():
            raise DataError(f"row '{sample.id}': media file {media.source} does not exist; check it and data.root")
    return sample


def _split_file(task: Any, split: str) -> Path:
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: rows are read from files for {' and '.join(SPLITS)} only")
    name = getattr(task.data, split, "")
    if not name:
        raise ConfigError(f"data.{split} is not set: task '{task.name}' reads its rows from a file, e.g. "
                          f"data.{split}=rows.jsonl")
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"data.{split}={name!r}: this file does not exist")
    return path


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ConfigError(f"data.format={format!r} is not known; known: {', '.join(FORMATS)}")


def _rows(path: Path) -> list[tuple[str, dict[str, Any] | DataError]]:
    """(place, row) of every row; a line that is no JSON object gives its DataError instead."""
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(f"{path}: rows are read from .jsonl (one object a line) or .json (a list of objects)")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".jsonl":
        lines = [(f"{path}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [(where, _object(_parse(line))) for where, line in lines]
    rows = _parse(text)
    if isinstance(rows, DataError):
        raise DataError(f"{path}: {rows}")
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold a list of rows, not a {type(rows).__name__}")
    return [(f"{path}, row {n}", _object(row)) for n, row in enumerate(rows, 1)]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return DataError(f"not JSON: {error}")


def _object(row: Any) -> dict[str, Any] | DataError:
    if isinstance(row, (dict, DataError)):
        return row
    return DataError(f"a row must be a JSON object, not a {type(row).__name__}")


def _media(row: Mapping[str, Any], root: Path) -> tuple[Media, ...]:
    images = [*_paths(row, "image"), *_paths(row, "images")]
    media = [Media(source=resolve(path, root)) for path in images]
    span = {"start": row.get("video_start"), "end": row.get("video_end")}
    media += [Media(kind="video", source=resolve(path, root), **span) for path in _paths(row, "video")]
    return tuple(media)


def _paths(row: Mapping[str, Any], field: str) -> list[str]:
    value = row.get(field)
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_number(row: Mapping[str, Any], field: str, most: float) -> None:
    value = row.get(field)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        limit = f"a number from 0 to {most:g}" if most < float("inf") else "a number of at least 0"
        raise DataError(f"{field}={value!r} must be {limit}")
