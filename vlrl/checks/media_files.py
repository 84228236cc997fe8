"""Looking at the media that rows name: whether they are there, what their headers say, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from vlrl.checks.identity import content_of
from vlrl.checks.rule import MediaFile
from vlrl.config.schema import LimitsSettings
from vlrl.data.embedded import EmbeddedMedia
from vlrl.data.headers import header
from vlrl.data.media import VideoSampling, check_pixels, load, missing_file
from vlrl.data.row_media import sources_of
from vlrl.data.values import number
from vlrl.errors import DataError
from vlrl.types import LoadedMedia, Media

if TYPE_CHECKING:
    from vlrl.checks.image_similarity import ImageSignature

Key = tuple[Path | EmbeddedMedia, str, float | None, float | None]
"""File, image or video, and the seconds that a row cuts out."""
_FRAMES = VideoSampling(fps=1.0, max_frames=4)  # enough to see that a video decodes from its start to its end


def keys(media: Media) -> list[Key]:
    """Returns what is opened once: the file, or each frame of a video given as pictures; [] for what a task has drawn,
    and for what would have to be fetched.
    """
    several = isinstance(media.source, (list, tuple))
    named = [Path(one) if isinstance(one, str) else one for one in sources_of(media)]
    return [(one, "image", None, None) if several else (one, media.kind, media.start, media.end) for one in named
            if isinstance(one, (Path, EmbeddedMedia))]


def unopened(key: Key) -> MediaFile:
    """Returns the name of a file that is not looked for."""
    return _of(key)


def exists(key: Key) -> MediaFile:
    """Returns whether the file is there."""
    return _of(key, problem=missing_file(key[0]) if isinstance(key[0], Path) else "")


def opened(key: Key, limits: LimitsSettings, look: bool = False) -> MediaFile:
    """Returns what reading an image, or some frames of a video, shows; with `look` how the image compares with others.
    """
    path, kind, start, end = key
    try:
        loaded = load(Media(source=path, kind="video" if kind == "video" else "image", start=start, end=end), limits,
                      _FRAMES)
    except DataError as error:
        return _of(key, problem=str(error))
    head = header(path) if kind == "image" else None
    shown = _look(loaded) if look and kind == "image" else None
    return _of(key, size=loaded.size, sha256=loaded.sha256, seconds=number(loaded.metadata.get("duration")),
               orientation=head.orientation if head else 1, look=shown)


def _look(loaded: LoadedMedia) -> ImageSignature:
    from vlrl.checks.image_similarity import WINDOWS, image_signature

    return image_signature(loaded.sha256, loaded.sha256, loaded.frames[0], WINDOWS[:1])


def looked_at(key: Key, limits: LimitsSettings) -> MediaFile:
    """Returns what the header of an image says; one that cannot be read is opened for the reason. A video is only
    looked for.
    """
    found = exists(key)
    if found.problem or key[1] == "video":
        return found
    head = header(key[0])
    if head is None:
        return opened(key, limits)
    try:
        check_pixels(head.size, str(key[0]), limits)
    except DataError as error:
        return _of(key, problem=str(error))
    return _of(key, size=head.size, orientation=head.orientation)


def drawn(media: Sequence[Media], limits: LimitsSettings | None = None) -> list[MediaFile]:
    """Returns the sizes of what a task has drawn; within `limits` also whether it can be shown, and its hash."""
    return [_drawn(one, limits) for one in media
            if any(isinstance(source, Image.Image) for source in sources_of(one))]


def _drawn(media: Media, limits: LimitsSettings | None) -> MediaFile:
    size = next(source.size for source in sources_of(media) if isinstance(source, Image.Image))
    found = MediaFile(name=f"the drawn {media.kind}", size=size)
    try:
        if limits:
            load(media, limits, _FRAMES)
    except DataError as error:
        return replace(found, problem=str(error))
    return replace(found, sha256=content_of(media)) if limits else found


def _of(key: Key, **facts: object) -> MediaFile:
    path, _, start, end = key
    return MediaFile(name=path.name, path=str(path), start=start, end=end, **facts)  # pyright: ignore
