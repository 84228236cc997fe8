"""Inspects the media of rows: only whether files exist, also their headers, or their full content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from vlrl.checks.identity import media_digest
from vlrl.checks.rule import CheckedRow, MediaFile
from vlrl.config.schema import LimitsSettings
from vlrl.data.embedded import EmbeddedMedia
from vlrl.data.media import VideoSampling, check_pixels, header, load, missing_file
from vlrl.data.row_media import sources_of
from vlrl.data.samples import where
from vlrl.data.values import number
from vlrl.errors import DataError
from vlrl.types import Media, Sample

Key = tuple[Path | EmbeddedMedia, str, float | None, float | None]
"""(file, kind, start, end): kind is image or video; start and end of the selected part are in seconds."""
_FRAMES = VideoSampling(fps=1.0, max_frames=4)  # enough to see that a video decodes from its start to its end


def file_keys(media: Media) -> list[Key]:
    """Keys of the files of an image or video: one, or one per frame. Empty for images in memory and for media to be
    downloaded."""
    frames = isinstance(media.source, (list, tuple))
    sources = [Path(one) if isinstance(one, str) else one for one in sources_of(media)]
    return [(one, "image", None, None) if frames else (one, media.kind, media.start, media.end) for one in sources
            if isinstance(one, (Path, EmbeddedMedia))]


def unread_file(key: Key, **facts: object) -> MediaFile:
    """Describes a file by its key alone, without access to the file."""
    path, _, start, end = key
    return MediaFile(name=path.name, path=str(path), start=start, end=end, **facts)  # pyright: ignore


def check_exists(key: Key) -> MediaFile:
    """Describes a file after only checking that it exists."""
    return unread_file(key, problem=missing_file(key[0]) if isinstance(key[0], Path) else "")


def read_media(key: Key, limits: LimitsSettings, look: bool = False) -> MediaFile:
    """Reads an image, or some frames of a video. With `look` the result has the signature by which images are compared.
    """
    path, kind, start, end = key
    try:
        loaded = load(Media(source=path, kind="video" if kind == "video" else "image", start=start, end=end), limits,
                      _FRAMES)
    except DataError as error:
        return unread_file(key, problem=str(error))
    head, shown = header(path) if kind == "image" else None, None
    if look and kind == "image":
        from vlrl.checks.image_similarity import WINDOWS, image_signature

        shown = image_signature(loaded.sha256, loaded.sha256, loaded.frames[0], WINDOWS[:1])
    return unread_file(key, size=loaded.size, sha256=loaded.sha256, seconds=number(loaded.metadata.get("duration")),
                       orientation=head.orientation if head else 1, look=shown)


def read_header(key: Key, limits: LimitsSettings) -> MediaFile:
    """Reads the header of an image, or the full image if its header is unreadable. Of a video only the existence is
    checked."""
    found = check_exists(key)
    if found.problem or key[1] == "video":
        return found
    head = header(key[0])
    if head is None:
        return read_media(key, limits)
    try:
        check_pixels(head.size, str(key[0]), limits)
    except DataError as error:
        return unread_file(key, problem=str(error))
    return unread_file(key, size=head.size, orientation=head.orientation)


def _drawn(media: Media, limits: LimitsSettings | None) -> MediaFile:
    """Describes an image or video that the task holds in memory: its size and, if `limits` are given, its digest and
    whether it can be loaded."""
    size = next(source.size for source in sources_of(media) if isinstance(source, Image.Image))
    found = MediaFile(name=f"the drawn {media.kind}", size=size)
    try:
        if limits:
            load(media, limits, _FRAMES)
    except DataError as error:
        return replace(found, problem=str(error))
    return replace(found, sha256=media_digest(media)) if limits else found


# --- samples as rows --------------------------------------------------------------------------------------------------


def checked_row(samples: Sequence[Sample], n: int, split: str) -> CheckedRow:
    """Sample number `n` of a split as a CheckedRow, whose `error` says why the row cannot be read.

    Ids of samples that code makes must be unique over all splits, those of rows only within their split."""
    at = where(samples, n)
    row = CheckedRow(where=at or f"samples({split!r})[{n}]", row={}, path=Path(split if at else ""),
                     side="train" if split == "train" else "heldout")
    try:
        return with_sample(row, samples[n])
    except DataError as error:  # a row that is read only now
        row.error = str(error).removeprefix(f"{row.where}: ")
        return row


def with_sample(row: CheckedRow, sample: Sample) -> CheckedRow:
    """Sets the sample of a CheckedRow and returns the row."""
    row.sample, row.row, row.id = sample, sample.row, sample.id
    return row


def with_files(row: CheckedRow, look_at: Callable[[Key], MediaFile], limits: LimitsSettings | None = None
               ) -> CheckedRow:
    """Sets the `files` of a CheckedRow and returns the row.

    look_at: describes one media file of the sample. limits: if given, media in memory are loaded within these limits.
    """
    media = row.sample.media if row.sample else ()
    row.files = [*(look_at(key) for one in media for key in file_keys(one)),
                 *(_drawn(one, limits) for one in media
                   if any(isinstance(source, Image.Image) for source in sources_of(one)))]
    return row
