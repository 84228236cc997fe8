"""Converts samples to rows of a new file. Media paths become relative to that file, and images drawn by code are
written to files. This module imports no torch."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vlrl.config.schema import Config
from vlrl.data import MEDIA_FIELDS
from vlrl.data.media import as_rgb, resolve
from vlrl.data.row_samples import FIELDS
from vlrl.errors import DataError
from vlrl.store import plain
from vlrl.store.files import replacing, suffix_of
from vlrl.task import Task
from vlrl.tools.datasets.prompt_table import COLUMNS
from vlrl.types import Media, Row, Sample

_ABOUT_ANSWERS = {*COLUMNS, "solution", "rejected", "hints", "responses", "meta", "original_id", "group_key", "refused"}
"""Fields of a row that describe the prompt or its answers; they are not copied to a new prompt made from the row."""


@dataclass(frozen=True, kw_only=True)
class MediaLocation:
    """The folders in which the images and videos of a file of rows are stored."""

    root: Path  # folder that media paths are relative to
    folder: Path  # folder inside `root` to which new images are written

    @classmethod
    def for_file(cls, config: Config, out: Path) -> MediaLocation:
        """The location for media of the file `out`, whose rows will be read with this config. `root` is data.root or,
        if that is not set, the folder of the file."""
        return cls(root=Path(config.data.root) if config.data.root else out.parent,
                   folder=out.with_name(f"{out.stem}_media"))


def row_of(task: Task, sample: Sample, location: MediaLocation) -> Row:
    """Converts a sample to a row with an id, without the fields that the task adds for its templates. Images drawn by
    code are written to files. Raises DataError for media that a row cannot refer to: they lie outside
    `location.root`, or are of an unknown type."""
    filled = {*task.of(sample).placeholders(sample.row)} - FIELDS
    row = {name: value for name, value in sample.row.items() if name not in {*MEDIA_FIELDS, *_ABOUT_ANSWERS, *filled}}
    for kind, several in (("image", "images"), ("video", "video")):
        paths = [_path(sample, media, location) for media in sample.media if media.kind == kind]
        if len(paths) == 1 and several not in sample.row:
            row[kind] = paths[0]
        elif paths:
            row[several] = paths[0] if several == "video" and len(paths) == 1 else paths
    return plain({**row, "id": sample.id})


def _path(sample: Sample, media: Media, location: MediaLocation) -> Any:
    given = media.source
    try:
        if isinstance(given, (list, tuple)):
            return [_path(sample, Media(source=frame), location) for frame in given]
        if isinstance(given, (str, os.PathLike)):
            full = Path(os.path.realpath(given))
        else:
            full = _written(given, location)
        name = os.path.relpath(full, os.path.realpath(location.root))
        resolve(name, location.root)
    except (DataError, TypeError) as error:
        raise DataError(f"sample '{sample.id}': its {media.kind} cannot be referenced from the new file of rows "
                        f"({error}). Write the new file to a folder that contains the media, with --out, or set "
                        "data.root to such a folder") from None
    return name


def _written(image: Any, location: MediaLocation) -> Path:
    """Writes an image to a file named by a hash of the image; returns the path."""
    if isinstance(image, Image.Image):
        buffer = io.BytesIO()
        as_rgb(image).save(buffer, "PNG")
        image = buffer.getvalue()
    data = getattr(image, "data", image)
    if not isinstance(data, bytes):
        raise TypeError(f"it is {type(image).__name__}")
    file = location.folder / f"{hashlib.sha256(data).hexdigest()[:16]}{suffix_of(data[:16])}"
    if not file.exists():
        with replacing(file, sync=False) as temporary:
            temporary.write_bytes(data)
    return Path(os.path.realpath(file))


def child(parent: Mapping[str, Any], changes: Mapping[str, Any], number: int, generator: str) -> Row:
    """The row of a new prompt: `parent` with `changes`. `number` makes the id unique. `generator` says how the row was
    made; `verifier` is set later."""
    inherited = {name: value for name, value in parent.items() if name not in _ABOUT_ANSWERS}
    return {**inherited, **changes, "id": f"{parent['id']}~{number}", "generator": generator,
            "parent": str(parent["id"])}
