"""Converts data files to rows in vlrl's own format (canonical rows), with valid media paths. Does not import torch."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl import checks
from vlrl.checks import CheckedRow, Context
from vlrl.config.registry import prints_aside
from vlrl.data import MEDIA_FIELDS, BadRow, check_suffix, json_line, make_sample, repeated_id, write_rows
from vlrl.data.embedded import EmbeddedMedia
from vlrl.data.media import IMAGE_FORMATS, resolve
from vlrl.data.row_samples import media_items
from vlrl.data.sources.answer_types import TypeTable
from vlrl.data.sources.box_forms import assumed_form, box_doubt
from vlrl.data.sources.reading import rows_in
from vlrl.errors import DataError
from vlrl.store.files import replacing, suffix_of
from vlrl.task import Task
from vlrl.types import Media

_REMARKS = ("box/units", "unread")  # rules about a whole file that are checked during a conversion


@dataclass(frozen=True)
class UsableRow:
    """A canonical row that the task can read, with its media (not opened)."""

    where: str
    id: str
    row: Mapping[str, Any]
    media: tuple[Media, ...]
    root: Path | None = None
    """The folder that the row's media paths are relative to, if the row's embedded media were written to files. None =
    the paths are relative to the root of all rows, by default the folder of the file of rows."""


def convert(path: Path, out: Path, format: str = "auto", root: Path | None = None, task: Task | None = None, *,
            columns: Mapping[str, str] | None = None, keep_going: bool = False, force: bool = False,
            answer_type: str | None = None, types: TypeTable | None = None, boxes: str = "auto",
            remarks: list[str] | None = None, notes: list[str] | None = None) -> tuple[int, list[BadRow]]:
    """Writes the rows of `path` to `out` (.jsonl or .json), atomically; returns the number of written rows and the list
    of bad rows.

    Media paths of the new rows are relative to `root` if given, else to the folder of `out`; paths of the old rows are
    relative to `root`, else to the folder of `path`. With a task, its `sample_from_row` decides which rows are usable.
    Media files may be missing. Embedded media (parquet, base64) are written to the folder `<out>_media`. `columns` maps
    canonical fields to columns, e.g. {"image": "photo"}. `answer_type` replaces guessed answer types; `boxes` is as in
    data.boxes. `types` collects the answer types that are written, `remarks` the warnings about the file as a whole,
    `notes` what was assumed about it.

    Raises DataError at the first bad row unless `keep_going`, for a row whose media would lie outside the new root, if
    no row is usable, and if `out` exists without `force`."""
    check_suffix(out)
    refuse_existing([out], force)
    target, pictures = root or out.parent, dict[Path, EmbeddedMedia]()

    def keep(item: EmbeddedMedia, field: str) -> str:
        file = out.with_name(f"{out.stem}_media") / f"{item.sha256[:16]}{_suffix(item.data, field)}"
        pictures[file] = item
        name = os.path.relpath(file, target)
        if name.startswith(".."):
            raise DataError(f"the embedded media would be written to {file.parent}, outside {target}. Write the new "
                            f"file to a folder inside {target}, or omit --root")
        return name

    seen, shapes = list[CheckedRow](), Counter[str]()
    good, bad = usable_rows(path, format, root, task, columns=columns, answer_type=answer_type, types=types,
                            keep=lambda row: (_saved(row, keep), target), boxes=boxes, seen=seen,
                            shapes=shapes)
    found = [f for f in checks.file_findings(seen, Context(task=task, boxes=boxes)) if f.rule in _REMARKS]
    said, doubts = [f.message for f in found], "".join(f"\n{f.message}" for f in found if f.kind == "box")
    if bad and not keep_going:
        raise DataError(f"{bad[0].where}: {bad[0].reason} (--keep-going leaves bad rows out and lists them){doubts}")
    if any(f.kind == "box" and f.level == "error" for f in found):
        raise DataError(f"{path}:{doubts}")
    if not good:
        raise DataError(f"{path} has no usable row" + (f"; {bad[0].where}: {bad[0].reason}" if bad else ""))
    rows = [relocated(row, root or path.parent, target) for row in good]
    for file, item in pictures.items():
        with replacing(file, sync=False) as temporary:
            temporary.write_bytes(item.data)
    write_rows(out, rows)
    if remarks is not None:
        remarks += said
    if notes is not None:
        notes += filter(None, [assumed_form(shapes, {name for row in rows for name in row}, boxes)])
    return len(good), bad


def refuse_existing(paths: Sequence[Path], force: bool) -> None:
    """Raises DataError if one of the paths exists. With `force`, an existing file is accepted, because it can be
    replaced, but a folder is not."""
    for path in paths:
        if os.path.lexists(path) and not (force and path.is_file()):
            what = "is a folder" if path.is_dir() else "exists; --force replaces it"
            raise DataError(f"{path} {what}")


@prints_aside()
def usable_rows(path: Path, format: str = "auto", root: Path | None = None, task: Task | None = None, *,
                columns: Mapping[str, str] | None = None,
                keep: Callable[[Mapping[str, Any]], tuple[dict[str, Any], Path]] | None = None,
                answer_type: str | None = None, types: TypeTable | None = None, boxes: str = "auto",
                seen: list[CheckedRow] | None = None, shapes: Counter[str] | None = None
                ) -> tuple[list[UsableRow], list[BadRow]]:
    """Returns (the rows that the task can read, the bad rows with reasons). Without a task, rows with valid canonical
    fields are usable.

    Every row that could be parsed is appended to `seen`, and `shapes` counts the recognised formats. `keep` is called
    for a row with embedded media; it returns (the row with paths instead of media, the folder that these paths are
    relative to). For the other options see `convert`."""
    reader, good, bad = task or Task(), [], []
    context = Context(task=task)
    first: dict[str, str] = {}
    for where, row in rows_in(path, format, root, columns, answer_type=answer_type, types=types, boxes=boxes,
                              shapes=shapes):
        if seen is not None and not isinstance(row, DataError):
            seen.append(CheckedRow(where=where, row=row, id=str(row.get("id")), root=root or path.parent))
        try:
            own = None
            if not isinstance(row, DataError) and holds_media(row):
                if not keep:
                    raise DataError("the row contains embedded media: write them to files with `vlrl data convert`")
                row, own = keep(row)
            sample = make_sample(reader, row, own or root or path.parent)
            assert not isinstance(row, DataError)
            json_line(row)
            if seen:
                seen[-1].sample = sample
            checked = CheckedRow(where=where, row=row, id=sample.id, sample=sample, root=own or root or path.parent)
            for finding in checks.row_findings(checked, context, expensive=False):
                if finding.level == "error":
                    raise DataError(f"row '{sample.id}': {finding.message}")
            if problem := repeated_id(first, sample.id, where):
                raise DataError(problem)
            good.append(UsableRow(where, sample.id, row, sample.media, own))
        except DataError as error:
            bad.append(BadRow(where, str(error)))
    return good, bad


def sound_rows(path: Path, format: str, root: Path | None, columns: Mapping[str, str] | None, boxes: str = "auto"
               ) -> list[UsableRow]:
    """The rows of a file, for callers that accept no bad rows. Raises DataError at the first bad row, and if the boxes
    do not seem to be in the assumed form."""
    seen: list[CheckedRow] = []
    rows, bad = usable_rows(path, format, root, columns=columns, boxes=boxes, seen=seen)
    doubt = box_doubt([row.row for row in seen], boxes)
    doubted = f"\n{doubt.message}" if doubt else ""
    if bad:
        raise DataError(f"{bad[0].where}: {bad[0].reason} (vlrl data check lists every bad row){doubted}")
    if doubt and doubt.sure:
        raise DataError(f"{path}:{doubted}")
    return rows


def relocated(row: UsableRow, before: Path, after: Path) -> dict[str, Any]:
    """The row with its media paths relative to the folder `after` instead of the folder `before`. The path of a missing
    file outside `after` is left unchanged, because the media may be added later.

    Raises DataError for an existing file outside `after`, which no run could read."""
    new, before = dict(row.row), row.root or before
    if os.path.realpath(before) != os.path.realpath(after):
        for field in MEDIA_FIELDS:
            value = new.get(field)
            if isinstance(value, (list, tuple)):
                new[field] = [_moved(row, path, before, after) for path in value]
            elif value is not None:
                new[field] = _moved(row, value, before, after)
    return new


def _moved(row: UsableRow, path: str, before: Path, after: Path) -> str:
    given = Path(os.path.realpath(before), path)
    relative = os.path.relpath(given, os.path.realpath(after))
    try:
        resolve(relative, after)
    except DataError:
        if not os.path.lexists(given):
            return path
        raise DataError(f"{row.where}: row '{row.id}': {path!r} would lie outside {after}, the folder of the new file, "
                        "so no run could read it. Write the new file to a folder that contains the media, or set "
                        f"--root to such a folder, e.g. --root {before} (a config then needs "
                        f"data.root={before}).") from None
    return relative


def holds_media(row: Mapping[str, Any]) -> bool:
    """Whether a row has embedded images or videos. Raises DataError for a value that is neither media nor a path."""
    return any(isinstance(one, EmbeddedMedia) for items in media_items(row).values() for item in items
               for one in (item if isinstance(item, list) else [item]))


def _saved(row: Mapping[str, Any], keep: Callable[[EmbeddedMedia, str], str]) -> dict[str, Any]:
    new = dict(row)
    for field, items in media_items(row).items():
        def name(item: Any, field: str = field) -> Any:
            if isinstance(item, list):
                return [name(frame) for frame in item]
            return keep(item, field) if isinstance(item, EmbeddedMedia) else item

        names = [name(item) for item in items]
        new[field] = names if isinstance(row[field], (list, tuple)) else names[0]
    return new


def _suffix(data: bytes, field: str) -> str:
    """The file suffix for embedded bytes of an image or video. Raises DataError for an image that cannot be read."""
    from PIL import Image

    if field == "video" and suffix_of(data) not in (".png", ".jpg", ".bmp"):
        return suffix_of(data)
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            return f".{str(image.format).lower()}"
    except Exception as error:  # decoders raise anything on broken bytes
        why = str(error).partition(" <")[0]  # Pillow names the buffer by its address
        raise DataError(f"the image embedded in the row ({len(data)} bytes) cannot be read: {why}. Replace the image, "
                        "or remove the row") from None
