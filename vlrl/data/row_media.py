"""Finds media that a row names but its sample does not show, such as an image in a column `photo` instead of `image`,
or an image that the task dropped."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlrl.data.embedded import MEDIA_HASH, EmbeddedMedia, without_bytes
from vlrl.types import Media, Sample

_SUFFIX = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|m4v|avi|mov|mkv|webm|mpe?g|ts)(\?[^\s/]*)?$", re.I)
_VIDEO_SUFFIX = re.compile(r"\.(mp4|m4v|avi|mov|mkv|webm|mpe?g|ts)(\?[^\s/]*)?$", re.I)
_INLINE = re.compile(r"data:(image|video)/", re.I)
_CALLED = re.compile(r"image|img|photo|pic|frame|screenshot|video|clip|scan", re.I)
"""Matches names of columns that usually hold media, even if the file names have no suffix."""
_LONGEST = 1024


def unshown_columns(sample: Sample, canonical: Collection[str], media_fields: Collection[str], root: Path | None = None
                    ) -> list[str]:
    """Returns the columns of a sample's row that hold or name media which the sample does not show.

    Searches the columns in `media_fields`, and all columns that are not in `canonical`. Other canonical fields are not
    searched, because some of them (`meta`) may hold anything. Returns [] if the task has created or edited the sample's
    media, because their origin is then unknown."""
    shown = [source for media in sample.media for source in sources_of(media)]
    if not all(isinstance(source, (str, os.PathLike, EmbeddedMedia)) for source in shown):
        return []
    names = [str(source) for source in shown]
    return [str(column) for column, value in sample.row.items() if (column in media_fields or column not in canonical)
            and any(not _is_among(one, names) for one in media_names(str(column), value, root))]


def unshown_problem(sample: Sample, canonical: Collection[str], media_fields: Collection[str],
                    root: Path | None = None) -> str:
    """Returns an error message if a sample has no media but its row names some (see `unshown_columns`); else ""."""
    columns = [] if sample.media else unshown_columns(sample, canonical, media_fields, root)
    if not columns:
        return ""
    return (f"the prompt shows no image or video, and {named_media(sample.row, columns[0])}: "
            f"{unshown_advice(columns[0], media_fields, sample.row[columns[0]])}")


def named_media(row: Mapping[str, Any], column: str) -> str:
    """Returns the beginning of an error message about a column with media: "the column ... names media (...)", with the
    shortened value."""
    shown = ascii(row[column])
    return f"the column {column!r} names media ({shown if len(shown) <= 80 else shown[:77] + '...'})"


def unshown_advice(column: str, media_fields: Collection[str], value: Any) -> str:
    """Returns the end of an error message about a media column that no prompt shows: what the user can do. `value` is
    the value of the column in a row."""
    if column in media_fields:
        return "the task's sample_from_row drops it: pass it to the Sample as media"
    return (f"media are read only from {', '.join(media_fields)}. Rename the column, set "
            f"{column_setting({media_field(value): column})}, or move it into 'meta' if no prompt should show it")


def column_setting(columns: Mapping[str, str]) -> str:
    """Returns the settings that map fields to columns: "data.columns={image: file} (--columns image=file)"."""
    options = " ".join(f"--columns {field}={column}" for field, column in columns.items())
    return f"data.columns={{{', '.join(f'{field}: {column}' for field, column in columns.items())}}} ({options})"


def media_field(value: Any) -> str:
    """Returns the field of a row that a value with media belongs to: video, images for a list, else image."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, str) and _VIDEO_SUFFIX.search(first):
        return "video"
    return "images" if isinstance(value, (list, tuple)) else "image"


def media_names(column: str, value: Any, root: Path | None = None) -> Iterator[Any]:
    """Yields the path, URL or hash of each image or video in a value of a row, also from nested lists and objects. A
    path without the suffix of a media file counts only if the name of the column suggests media and the file exists
    under `root`."""
    if isinstance(value, Mapping):
        for key in ("bytes", "path", "url"):
            yield from media_names(column, value.get(key), root)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from media_names(column, one, root)
    elif isinstance(name := without_bytes(value), str) and _names_media(column, name, root):
        yield name


def _names_media(column: str, value: str, root: Path | None) -> bool:
    if MEDIA_HASH.fullmatch(value) or _INLINE.match(value):
        return True
    if not value or len(value) > _LONGEST or "\n" in value or "\0" in value:
        return False
    suffix, spaces = _SUFFIX.search(value), any(c.isspace() for c in value)
    if suffix and not spaces:
        return True
    return bool((suffix or _CALLED.search(column)) and root and os.path.isfile(root / value))


def _is_among(value: Any, names: Collection[str]) -> bool:
    if not isinstance(value, str):
        return False
    own = os.path.normpath(value).replace(os.sep, "/").lstrip("./")
    return any(name.replace(os.sep, "/").endswith(own) for name in names)


def sources_of(media: Media) -> list[Any]:
    """Returns the source of an image or video as a list; for a video given as frames, the source of each frame."""
    return list(media.source) if isinstance(media.source, (list, tuple)) else [media.source]
