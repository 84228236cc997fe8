"""Rows of a data file -> samples. A row is one JSON object with canonical fields; media paths are relative to a root.

    {"id": "7", "image": "img/7.jpg", "width": 640, "height": 480, "expression": "the red mug",
     "boxes": [{"box": [31, 40, 75, 84], "label": "mug"}]}
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from vlrl.config.paths import tried
from vlrl.config.registry import failure
from vlrl.data.coordinates import CONVENTIONS
from vlrl.data.formats import rows_in
from vlrl.data.formats.fields import short
from vlrl.data.formats.files import MOST_LINE
from vlrl.data.formats.folders import of_side
from vlrl.data.media import CLOSED, Access, missing, source
from vlrl.data.row_media import unshown_problem
from vlrl.errors import ConfigError, DataError, RunError, TaskError, VlrlError, did_you_mean
from vlrl.rewards.boxes import is_number
from vlrl.store.files import write_text
from vlrl.types import Media, Sample

log = logging.getLogger(__name__)

SPLITS = ("train", "heldout")
MEDIA_FIELDS = ("image", "images", "video")
OUTSIDE = 1.0
"""Pixels that a box or point may lie outside the image: annotations are rounded."""
_FIELDS = (
    "id difficulty category source split weight processed_size coordinates solution hints group_key meta "
    "image images video width height video_start video_end duration fps frames "
    "expression labels boxes points count mask_rle "
    "instruction box action history platform element_type "
    "question answer_type answer options spans tracks tolerance "
    "label synonyms multi plan speed_mps navigation trajectory obstacles responses "
    "cameras drivable ego_size to_pixels outcomes system_prompt original_id"
)
FIELDS = frozenset(_FIELDS.split())
"""The canonical fields of all tasks. Others are kept where they are and gathered in `meta` as well."""


@dataclass(frozen=True)
class BadRow:
    """A row that was left out."""

    where: str
    """File and line, or file and number."""
    reason: str


def told_once(bad: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each different reason of (whose it is, reason) pairs, with the number of rows more that have it."""
    same: dict[str, list[str]] = {}
    for whose, reason in bad:
        same.setdefault(reason, []).append(whose)
    return [f"{whose[0]}: {reason}" + (f" (and {len(whose) - 1:,} rows more)" if whose[1:] else "")
            for reason, whose in same.items()]


def rows_told_once(bad: Iterable[BadRow]) -> list[str]:
    """`told_once` of rows that were left out; a reason may begin with the name of its row."""
    return told_once((f"{b.where}{': ' + row[0][:-2] if (row := _ROW.match(b.reason)) else ''}",
                      _ROW.sub("", b.reason, count=1)) for b in bad)


_ROW = re.compile(r"row '[^'\n]*': ")


class Samples(Sequence[Sample]):
    """The usable samples of a file, media unread, and the rows left out of it."""

    def __init__(self, samples: Sequence[Sample], quarantined: Sequence[BadRow] = (), files: Sequence[Path] = ()):
        self._samples = tuple(samples)
        self.quarantined = tuple(quarantined)
        self.files = tuple(files)

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
        return [self._draw(i) for i in places] if isinstance(places, range) else self._draw(places)

    def _draw(self, index: int) -> Sample:
        try:
            return self._make(index)
        except VlrlError:
            raise
        except (Exception, SystemExit) as error:  # an IndexError would end a loop over the samples in silence
            raise TaskError(f"sample {index} cannot be drawn: {failure(error)}") from error


def read_rows(path: Path, format: str = "auto") -> list[dict[str, Any]]:
    """The canonical rows of a file in any format of `vlrl.data.formats`: an object a line, a list of objects ...

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
    """A row as one line of JSON; DataError when it holds NaN, an infinity, text that is not Unicode, or too much."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        line.encode()
    except ValueError as error:
        raise DataError(f"row {row.get('id')!r} cannot be written as JSON: {error}") from None
    if len(line) > MOST_LINE:
        raise DataError(f"row {row.get('id')!r} has {len(line)} characters, more than the {MOST_LINE} that one row may "
                        "have")
    return line


def check_suffix(path: Path) -> None:
    """Raises DataError unless the file's name ends in .jsonl or .json."""
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(f"{path}: rows are kept in .jsonl (one object a line) or .json (a list of objects)")


def sample_from_row(row: Mapping[str, Any], root: Path | None = None, access: Access = CLOSED) -> Sample:
    """A sample from a canonical row. Media come from `image`, `images` or `video`, unread: they lie under `root`, or
    where else `access` allows.

    Fields that are not canonical stay in the row and are gathered in its `meta` too; a weight of null becomes 1.

    Raises DataError naming the row for a missing id, a media path that cannot be used, a difficulty outside [0, 1], a
    number that is negative or not finite, unknown `coordinates`, or text that is not Unicode.
    """
    sample_id = row.get("id")
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int)) or sample_id == "":
        near = "" if "id" in row else f" Its fields are those of no known format: {short(', '.join(map(str, row)))}"
        raise DataError(f"the row has id={sample_id!r}; every row needs an 'id', a text or a whole number.{near}")
    sample_id = str(sample_id)
    unknown = {k: v for k, v in row.items() if k not in FIELDS}
    clean = {**row, "id": sample_id}
    if unknown:
        clean["meta"] = {**unknown, **(row.get("meta") or {})}
    try:
        _check_text(row)
        _check_values(row)
        return Sample(id=sample_id, row=_weighted(clean), media=_media(row, root or Path.cwd(), access))
    except DataError as error:
        raise DataError(f"row {sample_id!r}: {error}") from None


def read_samples(task: Any, split: str) -> Sequence[Sample]:
    """The samples in the files of `data.<split>`, made by `task.sample_from_row`.

    Media files exist, boxes and points lie inside the image, ids are unique (`rows_in` makes those of others so). Of
    files whose rows name both sides in `split` (train; val, test ...), those of this side are read.

    With `data.quarantine` bad rows are left out, logged and listed in `quarantined`; else the first stops the run. Of
    large files, see `data.index`, rows are read and checked one by one when they are asked for.

    Raises ConfigError when the split has no file, DataError naming file, line and row.
    """
    from vlrl.data.lazy_dataset import lazy_samples

    files = _split_files(task, split)
    data = task.data
    root = Path(data.root) if data.root else files[0].parent
    return lazy_samples(task, split, files, root) or _all_samples(task, split, files, root)


def _all_samples(task: Any, split: str, files: Sequence[Path], root: Path) -> Samples:
    data, roots = task.data, Access.of(task.data).roots
    samples: dict[str, Sample] = {}
    bad: list[BadRow] = []
    taken: set[str] = set()
    rows = [found for path in files for found in rows_in(path, data.format, root, roots=roots, taken=taken)]
    for where, row in of_side(rows, split):
        try:
            sample = checked_sample(task, row, root)
            if sample.id in samples:
                raise DataError(f"row '{sample.id}': this id occurs before; ids must be unique")
            samples[sample.id] = sample
        except DataError as error:
            if not data.quarantine:
                raise DataError(f"{where}: {error} (data.quarantine=true leaves bad rows out)") from error
            bad.append(BadRow(where, str(error)))
    if bad:
        listed = "".join(f"\n  {line}" for line in rows_told_once(bad)[:20])
        log.warning("data.%s: left out %d of %d rows%s", split, len(bad), len(bad) + len(samples), listed)
    if not samples:
        first = f"; {bad[0].where}: {bad[0].reason}" if bad else ""
        raise DataError(f"data.{split}={getattr(data, split)!r} has no usable row{first}")
    return Samples(list(samples.values()), bad, files)


def make_sample(task: Any, row: Mapping[str, Any] | DataError, root: Path) -> Sample:
    """The sample that `task.sample_from_row` makes of a row; its media need not exist.

    Raises DataError naming the row, TaskError when the task returns no Sample.
    """
    if isinstance(row, DataError):
        raise row
    try:
        sample = task.sample_from_row(row, root)
        if not isinstance(sample, Sample):
            raise TaskError(f"task '{task.name}': sample_from_row returned {type(sample).__name__}, expected a Sample")
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:  # a task's own code may trip over a row in any way
        raise DataError(f"row {row.get('id')!r}: {type(error).__name__}: {error}") from error
    try:
        _check_values(sample.row)  # a task may make its samples without the function above
    except DataError as error:
        raise DataError(f"row '{sample.id}': {error}") from None
    return replace(sample, row=_weighted(sample.row))


def checked_sample(task: Any, row: Mapping[str, Any] | DataError, root: Path) -> Sample:
    """The sample of a row, whose media files exist and whose boxes and points lie inside the image. Raises DataError
    naming the row."""
    sample = make_sample(task, row, root)
    if problem := unshown_problem(sample, FIELDS, MEDIA_FIELDS, root):
        raise DataError(f"row '{sample.id}': {problem}")
    for media in sample.media:
        if isinstance(media.source, Path) and not os.path.isfile(media.source):  # Path.is_file raises for long names
            raise DataError(f"row '{sample.id}': media file {short(media.source)} {missing(media.source)}; check it "
                            "and data.root")
    for problem in box_problems(sample.row, (sample.get("width"), sample.get("height"))):
        raise DataError(f"row '{sample.id}': {problem}")
    return sample


def box_problems(row: Mapping[str, Any], size: Sequence[Any]) -> Iterator[str]:
    """What is wrong with the boxes and points of a row: order of corners, and what lies outside of (width, height).

    Other things than lists of numbers are left to the task. A size that is not known is not held against a box.
    """
    boxes = [*(entry.get("box") for entry in _listed(row, "boxes") if isinstance(entry, dict)), row.get("box")]
    for box in boxes:
        if _numbers(box, 4):
            if not (box[0] < box[2] and box[1] < box[3]):
                yield f"box {short(box)} must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2"
            elif _outside(box, size):
                yield f"box {short(box)} reaches out of the image of {size[0]}x{size[1]} pixels"
    action = row.get("action") if isinstance(row.get("action"), Mapping) else {}
    for point in (*_listed(row, "points"), action.get("point"), action.get("coordinate")):  # pyright: ignore
        if _numbers(point, 2) and _outside(point, size):
            yield f"point {short(point)} lies outside the image of {size[0]}x{size[1]} pixels"


def _listed(row: Mapping[str, Any], field: str) -> list[Any]:
    value = row.get(field)
    return value if isinstance(value, list) else []


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(is_number, value))


def _outside(values: Any, size: Sequence[Any]) -> bool:
    if not all(is_number(side) and side > 0 for side in size):
        return False
    return any(not -OUTSIDE <= v <= size[i % 2] + OUTSIDE for i, v in enumerate(values))


def readable(samples: Sequence[Sample], index: int) -> Sample | None:
    """A sample; None when its row is read only now, and is bad."""
    try:
        return samples[index]
    except DataError:
        return None


def _split_files(task: Any, split: str) -> list[Path]:
    """The file, or folder, of a split; or the files that its pattern (`rows-*.jsonl`) fits, by name."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r}: rows are read from files for {' and '.join(SPLITS)} only")
    name = getattr(task.data, split, "")
    if not name:
        raise ConfigError(f"data.{split} is not set: task '{task.name}' reads its rows from a file, e.g. "
                          f"data.{split}=rows.jsonl")
    path = Path(name)
    if os.path.exists(path):
        return [path]
    found = sorted(map(Path, glob.glob(name))) if glob.has_magic(name) else []
    if not found:
        raise ConfigError(f"data.{split}={name!r}: this file does not exist{tried(name)}")
    if len({file.parent for file in found}) > 1 and not task.data.root:
        raise ConfigError(f"data.{split}={name!r} fits files of several folders: set data.root to the folder that "
                          "their media lie under")
    return found


def _media(row: Mapping[str, Any], root: Path, access: Access) -> tuple[Media, ...]:
    images = [*_paths(row, "image"), *_paths(row, "images")]
    if any(isinstance(image, bytes) for image in images):
        raise DataError("its image lies in the file of rows itself; `vlrl data convert` writes it as a file of its own")
    media = [Media(source=source(path, root, access)) for path in images]
    start, end = row.get("video_start"), row.get("video_end")
    media += [Media(kind="video", source=source(path, root, access), start=start, end=end)
              for path in _paths(row, "video")]
    return tuple(media)


def _paths(row: Mapping[str, Any], field: str) -> list[str]:
    value = row.get(field)
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _weighted(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**row, "weight": 1.0} if row.get("weight", 1.0) is None else row


def _check_values(row: Mapping[str, Any]) -> None:
    _check_number(row, "difficulty", 1.0)
    for field in ("weight", "video_start", "video_end", "width", "height"):
        _check_number(row, field)
    if row.get("system_prompt") is not None and not isinstance(row["system_prompt"], str):
        raise DataError(f"system_prompt={short(row['system_prompt'])} must be a text")
    size, own = row.get("processed_size"), row.get("coordinates")
    if size is not None and not (isinstance(size, (list, tuple)) and len(size) == 2
                                 and all(is_number(side) and side > 0 for side in size)):
        raise DataError(f"processed_size={short(size)} must be [w, h], two positive numbers of pixels")
    if own and own not in CONVENTIONS:
        raise DataError(f"coordinates={own!r} is not a convention.{did_you_mean(str(own), CONVENTIONS)} "
                        f"Known: {', '.join(CONVENTIONS)}.")


def _check_text(row: Mapping[str, Any]) -> None:
    for field, value in row.items():
        try:
            json.dumps([field, value], ensure_ascii=False, skipkeys=True, default=str).encode()
        except UnicodeEncodeError:  # JSON can hold half of a surrogate pair, which no file and no tokenizer takes
            raise DataError(f"{field!r} holds text that is not Unicode: {ascii(value)[:200]}") from None


def _check_number(row: Mapping[str, Any], field: str, most: float = float("inf")) -> None:
    value = row.get(field)
    if value is not None and not (is_number(value) and 0 <= value <= most):
        limit = f"a number from 0 to {most:g}" if most < float("inf") else "a finite number of at least 0"
        raise DataError(f"{field}={short(value)} must be {limit}")
