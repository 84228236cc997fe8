"""Media that a row names and its sample does not show: a column `photo` instead of `image`, an image that a task
dropped."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlrl.data.embedded import MEDIA_HASH, EmbeddedMedia, without_bytes
from vlrl.types import Media, Sample

_SUFFIX = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|heic|avif|mp4|m4v|avi|mov|mkv|webm|mpe?g|ts)(\?[^\s/]*)?$", re.I)
_INLINE = re.compile(r"data:(image|video)/", re.I)
_CALLED = re.compile(r"image|img|photo|pic|frame|screenshot|video|clip|scan", re.I)
"""Names of columns whose values are media even if the file name has no suffix."""
_LONGEST = 1024


def unshown_columns(sample: Sample, known: Collection[str], fields: Collection[str], root: Path | None = None
                    ) -> list[str]:
    """Columns of a sample's row that hold or name media which the sample does not show.

    `fields` are the canonical media fields; other `known` columns, `meta` among them, may hold anything. [] for a
    sample with media that its task has drawn or edited, since their origin is unknown.
    """
    shown = [source for media in sample.media for source in sources_of(media)]
    if not all(isinstance(source, (str, os.PathLike, EmbeddedMedia)) for source in shown):
        return []
    names = [str(source) for source in shown]
    return [str(column) for column, value in sample.row.items() if (column in fields or column not in known)
            and any(not _is_among(one, names) for one in media_names(str(column), value, root))]


def unshown_problem(sample: Sample, known: Collection[str], fields: Collection[str], root: Path | None = None) -> str:
    """Why a sample without media cannot be intended; "" if its row names none."""
    columns = [] if sample.media else unshown_columns(sample, known, fields, root)
    if not columns:
        return ""
    return (f"its prompt shows no image or video, and {named_media(sample.row, columns[0])}: "
            f"{unshown_advice(columns[0], fields)}")


def named_media(row: Mapping[str, Any], column: str) -> str:
    """A column with its shortened value, as the subject of a message."""
    shown = ascii(row[column])
    return f"the column {column!r} names media ({shown if len(shown) <= 80 else shown[:77] + '...'})"


def unshown_advice(column: str, fields: Collection[str]) -> str:
    """What to do about a media column that no prompt shows."""
    if column in fields:
        return "the task's sample_from_row leaves it out; give the Sample its media"
    return (f"media are read from {', '.join(fields)}. Rename it, or, where no prompt is to show it, move it below "
            "'meta'")


def media_names(column: str, value: Any, root: Path | None = None) -> Iterator[Any]:
    """Yields each image or video in a value of a row, also inside lists and objects: paths, URLs, hashes of embedded
    media."""
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
    """The source of an image or video, or the sources of its frames."""
    return list(media.source) if isinstance(media.source, (list, tuple)) else [media.source]
