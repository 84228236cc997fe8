"""Checks data files for all problems, and summarises their content. Only reads; does not import torch.

    report = check(Path("rows.jsonl"), make_task(config), config.limits)
    report.bad, report.problems[0]      # 3, Finding(where="rows.jsonl:7", id="a", rule="box", message="...")

The rules are in vlrl.checks."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlrl import checks
from vlrl.checks import CheckedRow, Context, Finding
from vlrl.checks.files import split_of
from vlrl.checks.media_files import Key, check_exists, file_keys, read_media
from vlrl.checks.rule import MediaFile, Size, default_refusal
from vlrl.config.registry import prints_aside
from vlrl.config.schema import LimitsSettings
from vlrl.data import MEDIA_FIELDS, make_sample, sample_from_row
from vlrl.data.coordinates import Coordinates
from vlrl.data.sources.answer_types import TypeLine, TypeTable
from vlrl.data.sources.box_forms import assumed_form, coordinates_in
from vlrl.data.sources.files import READERS
from vlrl.data.sources.reading import rows_in
from vlrl.errors import DataError, TaskError
from vlrl.progress import Progress, no_progress
from vlrl.task import Task
from vlrl.tools.datasets.pixel_budget import PixelBudget, Scale, pixel_budget
from vlrl.tools.play.preview import SamplePreview
from vlrl.types import Media, Sample

COMPARED = 20_000
"""Held-out and training images are compared visually only if the data has at most this many images and videos."""
COUNTED = ("category", "split", "answer_type")  # fields for which the report counts how often each value occurs
_ORDER = ("file", *(rule.name for rule in checks.RULES))
_TIMES = ("video_start", "video_end", "fps", "frame_times")
_NO_ROWS = ("metadata.jsonl", "metadata.csv", "dataset_info.json", "dataset_dict.json", "state.json")
_TEXT_SUFFIXES = tuple(suffix for suffix in READERS if suffix not in (".txt", ".parquet", ".arrow", ".feather"))


@dataclass(frozen=True)
class DataReport:
    """The result of checking data files: their problems, and a summary of their content."""

    rows: int
    bad: int  # number of rows with at least one error
    problems: tuple[Finding, ...]  # errors, in the order of files and rows
    warnings: tuple[Finding, ...]  # suspicious properties of rows that may be intended
    fields: Mapping[str, int]  # field -> number of rows in which the field has a value other than null
    counts: Mapping[str, Mapping[str, int]]
    """Field (category, split or answer_type) -> value -> number of rows. Fields that do not occur are left out."""
    media: Mapping[str, int]  # numbers of distinct images, of distinct videos, and of unusable files
    copies: tuple[tuple[str, ...], ...]  # groups of media files with the same content
    unlabelled: int  # number of rows for which the task has no perfect answer
    shapes: Mapping[str, int] = field(default_factory=dict)
    """Name of a recognised data format, with the projects that use it -> number of records."""
    example: SamplePreview | None = None  # the first row without errors, rendered as the model will see it
    types: Sequence[TypeLine] = ()
    """The answer types that were chosen for the rows, each with examples and the reasons for the choice."""
    boxes: str = ""
    """In which form the boxes of another project's format were read; empty if the rows or the caller say it."""
    pixels: PixelBudget | None = None
    """Sizes of target boxes after the processor has resized the images; None if no row has a target box, or if the
    resize is not known."""


@dataclass
class _Row(CheckedRow):
    """A row being checked, with the raw record that the row was made from."""

    given: Mapping[str, Any] | DataError = field(default_factory=dict)
    media: tuple[Media, ...] = ()


@prints_aside()
def check(path: Path | Sequence[Path], task: Task | None, limits: LimitsSettings, root: Path | None = None,
          format: str = "auto", *, media: bool = True, allow_missing: bool = False,
          columns: Mapping[str, str] | None = None, answer_type: str | None = None, boxes: str = "auto",
          scale: Scale | None = None, progress: Progress = no_progress, preview: Callable[[Sample],
                                                                                      SamplePreview] | None = None,
          refusal: Callable[[Size], str] = default_refusal) -> DataReport:
    """Reads every row through `task.sample_from_row`, and reports every problem. Without a task, only the canonical
    fields are checked.

    If `path` is a folder, all row files in it are read, see `files_of`. Held-out rows are compared with training rows.
    A row is held out if the file name (val, test, heldout ...) or the row's field `split` says so. A custom task itself
    decides what the fields of a row may hold.

    Media lie under `root` (default: each file's folder) and are opened under `limits`. With `media=False`, media files
    only need to exist; with `allow_missing`, they may be missing. `format`, `columns`, `answer_type` and `boxes` are as
    in data.sources.reading.rows_in. `scale(size)` returns the factor by which the model's processor resizes an image of
    this size, and `refusal(size)` the reason why the processor rejects it. `preview` renders a sample as the model will
    see it. Perfect answers are scored in original pixels, so rounding to a model's coordinates cannot make them wrong.

    Raises DataError if the only file cannot be read, TaskError if the task breaks the Task contract."""
    reader = task or Task()
    reader.coordinates = Coordinates()
    context = Context(task=task, limits=limits, refusal=refusal, boxes=boxes)
    shapes, types = Counter[str](), TypeTable()
    rows = _rows([path] if isinstance(path, Path) else path, format, root, columns, shapes=shapes, types=types,
                 answer_type=answer_type, boxes=boxes)
    for done, row in enumerate(rows):
        if done % 1000 == 0:
            progress("reading rows", done, len(rows))
        _read(row, reader, root or row.path.parent)
    files = _files(rows, limits, progress, media, allow_missing)
    for done, row in enumerate(rows):
        if done % 1000 == 0:
            progress("checking rows", done, len(rows))
        row.files = [files[key] for one in row.media for key in file_keys(one) if key in files]
        checks.row_findings(row, context)
    checks.file_findings(rows, context)
    pixels = pixel_budget([row.given for row in rows if isinstance(row.given, dict)], scale)
    summary = _summary(rows, files, pixels)
    doubted = any(f.rule == "box/units" for row in rows for f in row.findings)
    return replace(summary, shapes=dict(shapes.most_common()), types=types.lines(),
                   boxes="" if doubted else assumed_form(shapes, summary.fields, boxes),
                   example=_example(rows, preview) if preview else None)


def files_of(path: Path) -> list[Path]:
    """The row files that a path stands for: the path itself if it is a file. For a folder, all row files in it and
    below it, sorted by name; or the folder itself if it is a single data set (one folder of images per class, or
    parquet shards)."""
    if not path.is_dir():
        return [path]
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names
             if name.lower().endswith(_TEXT_SUFFIXES) and name not in _NO_ROWS]
    return sorted(files) or [path]


def printable(text: str) -> str:
    """The text with "?" in place of characters that could control a terminal or cannot be encoded."""
    return "".join(c if c.isprintable() else "?" for c in text)


# --- one row ----------------------------------------------------------------------------------------------------------


def _example(rows: Sequence[_Row], preview: Callable[[Sample], SamplePreview]) -> SamplePreview | None:
    """The preview of the first row without errors; None if there is no such row. If the row cannot be previewed, the
    text of the preview is the error message."""
    row = next((row for row in rows if row.sample and not _errors(row)), None)
    if row is None or row.sample is None:
        return None
    try:
        return preview(row.sample)
    except (DataError, TaskError) as error:
        return SamplePreview(id=row.sample.id, text=f"it cannot be shown: {error}", tokens=None, media=(),
                             coordinates="")


def _errors(row: CheckedRow) -> list[Finding]:
    return [finding for finding in row.findings if finding.level == "error"]


def _rows(paths: Sequence[Path], format: str, root: Path | None, columns: Mapping[str, str] | None,
          **options: Any) -> list[_Row]:
    """The rows of all files. An unreadable file counts as a single bad row, unless it is the only file."""
    files, rows = [file for path in paths for file in files_of(path)], []
    for file in files:
        try:
            rows += [_row(file, where, row, root) for where, row in rows_in(file, format, root, columns, **options)]
        except DataError as error:
            if len(files) == 1:
                raise
            broken = _row(file, str(file), error, root)
            broken.findings.append(Finding(rule="file", where=str(file), message=printable(str(error))))
            rows.append(broken)
    return rows


def _row(file: Path, where: str, given: Mapping[str, Any] | DataError, root: Path | None) -> _Row:
    row = {} if isinstance(given, DataError) else given
    id = row.get("id")
    return _Row(where=where, row=row, given=given, path=file, root=root or file.parent,
                side=split_of(file, row.get("split")), id=str(id) if isinstance(id, (str, int)) else "")


def _read(row: _Row, task: Task, root: Path) -> None:
    """Makes the sample of a row and stores it in the row; if this fails, stores the error instead. The row's media are
    collected in either case."""
    if row.findings:  # the file as a whole
        return
    try:
        row.sample = make_sample(task, _sized(row.given, root), root)
        row.id, row.media = row.sample.id, row.sample.media
    except DataError as error:
        row.error = str(error)
        if isinstance(row.given, DataError):
            return
        named = {k: row.row[k] for k in (*MEDIA_FIELDS, *_TIMES) if k in row.row}
        try:
            row.media = sample_from_row({**named, "id": row.id or "?"}, root).media
        except DataError as other:
            if str(other) != str(error) and row.id:
                row.findings.append(Finding(rule="media", id=row.id, where=row.where, message=str(other).removeprefix(
                    f"row {row.id!r}: ")))


def _sized(row: Mapping[str, Any] | DataError, root: Path) -> Mapping[str, Any] | DataError:
    """If a row has no image size and its image is missing, returns the row with an assumed size that contains all its
    coordinates; else returns the row unchanged.

    The missing image is reported separately; the rest of the row is checked as if the image existed."""
    image = None if isinstance(row, DataError) else row.get("image")
    if isinstance(row, DataError) or row.get("width") is not None or not isinstance(image, str) or image[:5] == "data:":
        return row
    if os.path.isfile(root / image.replace("\0", "")):
        return row
    side = max([1, *(math.ceil(v) for values in coordinates_in(row) for v in values)])
    return {**row, "width": side, "height": side}


# --- media ------------------------------------------------------------------------------------------------------------


def _files(rows: Sequence[_Row], limits: LimitsSettings, progress: Progress, media: bool, allow_missing: bool
           ) -> dict[Key, MediaFile]:
    named = dict.fromkeys(key for row in rows for one in row.media for key in file_keys(one))
    there = [key for key in named if not allow_missing or not check_exists(key).problem]
    sides = {row.side for row in rows if row.media}
    look = {"train", "heldout"} <= sides and len(there) <= COMPARED
    return _open_all(there, limits, progress, look) if media else {key: check_exists(key) for key in there}


def _open_all(there: Sequence[Key], limits: LimitsSettings, progress: Progress, look: bool) -> dict[Key, MediaFile]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        files: dict[Key, MediaFile] = {}
        try:
            for key, file in zip(there, pool.map(lambda key: read_media(key, limits, look), there), strict=True):
                files[key] = file
                progress("opening media", len(files), len(there))
        except BaseException:  # Ctrl-C: those in the queue are not waited for
            pool.shutdown(cancel_futures=True)
            raise
    return files


# --- all rows ---------------------------------------------------------------------------------------------------------


def _summary(rows: Sequence[_Row], files: Mapping[Key, MediaFile], pixels: PixelBudget | None) -> DataReport:
    plain = [row.given for row in rows if not isinstance(row.given, DataError)]
    fields = Counter(printable(name) for row in plain for name, value in row.items() if value is not None)
    counts = {name: Counter(printable(str(row[name])) for row in plain if row.get(name) is not None)
              for name in COUNTED}
    kinds = Counter(kind for _, kind in {(path, kind) for path, kind, *_ in files})
    contents: dict[str, set[str]] = {}
    for file in files.values():
        if file.sha256:
            contents.setdefault(file.sha256, set()).add(file.path)
    listed = [replace(f, id=printable(f.id), message=printable(f.message)) for row in rows
              for f in sorted(row.findings, key=lambda f: _ORDER.index(f.rule))]
    return DataReport(
        rows=len(rows), bad=sum(bool(_errors(row)) for row in rows),
        problems=tuple(f for f in listed if f.level == "error"),
        warnings=tuple(f for f in listed if f.level == "warning"),
        fields=dict(fields.most_common()), counts={k: dict(v.most_common()) for k, v in counts.items() if v},
        media={"images": kinds["image"], "videos": kinds["video"],
               "unusable": len({path for (path, *_), file in files.items() if file.problem})},
        copies=tuple(sorted(tuple(sorted(paths)) for paths in contents.values() if len(paths) > 1)),
        unlabelled=sum(row.unlabelled for row in rows), pixels=pixels)
