"""Images and videos of run folders: access to the files, and thumbnails. Imports no torch.

A file is served only if it lies in the media/ folder of a run, and both its name and its signature are those of an
image or video. A symbolic link in media/ (store.media=link) is followed only if its target has the sha256 in the name
of the link. So a link cannot expose a file whose content the link's creator did not have."""

import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from PIL import Image, ImageSequence

from vlrl.config.schema import LimitsSettings
from vlrl.data.media import IMAGE_FORMATS, load
from vlrl.data.video import decoders as video_decoders
from vlrl.errors import DataError
from vlrl.store.files import file_sha256
from vlrl.types import Media

from . import AppError
from .library import Library, inside, inside_folder

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".mp4", ".mkv", ".webm", ".mov", ".avi",
            ".m4v"}
VIDEO_SUFFIXES = {".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v"}
"""Suffixes of files that are opened with a video decoder; .webp and .gif files may also be animated."""
_MAGIC = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|BM|II\*\x00|MM\x00\*|RIFF....(?:WEBP|AVI )|"
                    rb"\x1aE\xdf\xa3|....(?:ftyp|moov|mdat|wide|free|skip)", re.DOTALL)
_CACHED_BYTES = 64 << 20
_SMALLEST, _LARGEST = 16, 2048  # sides of a picture in pixels
_MOST_FRAMES = 64
_LIMITS = LimitsSettings()
_QUALITY = 85


class MediaStore:
    """Reads files in the media/ folders of a library's runs, and no other files. Thread-safe."""

    def __init__(self, library: Library):
        self.library = library
        self._pictures = _Cache()
        self._links: dict[tuple[Any, ...], str] = {}
        self._decoding = threading.Semaphore(2)  # limits the large pictures in memory

    def resolve(self, run: str, name: str) -> Path:
        """The path of a run's media file ("<hash>.png" or "media/<hash>.png"). Raises AppError for any other file."""
        folder = self.library.path(run) / "media"
        plain = name.removeprefix("media/") if isinstance(name, str) else ""
        if not re.fullmatch(r"[^/\\\x00]{1,255}", plain) or plain.startswith("."):
            raise AppError(f"{str(name)[:200]!r} is not the name of a file in the media folder of a run")
        path = folder / plain
        if not inside_folder(folder, self.library.root):
            raise AppError(f"the media folder of run {run!r} leads out of {self.library.root}: copy the folder into "
                           "the run")
        real = self._linked(path) if os.path.islink(path) else inside(path, self.library.root)
        if real is None:
            raise AppError(f"run {run!r} has no media file {plain!r}")
        if not {path.suffix.lower(), real.suffix.lower()} <= SUFFIXES or not _MAGIC.match(_head(real)):
            raise AppError(f"media file {plain!r} is not an image or video of a known type")
        return real

    def thumbnail(self, run: str, name: str, size: int = 256) -> bytes:
        """An image, or the first frame of a video, as a JPEG of at most `size` x `size` pixels. Raises AppError if the
        file may not be served or is unreadable."""
        path, size = self.resolve(run, name), _side(size)
        return self._cached(path, size, None, lambda: [_first(path)])[0]

    def frames(self, run: str, name: str, timestamps: Sequence[float], size: int = 256) -> list[bytes]:
        """The video frames shown at `timestamps` (seconds from the start of the file), each as a JPEG of at most `size`
        x `size` pixels. Only the first 64 times are used. Raises AppError for the same reasons as `thumbnail`."""
        path, size = self.resolve(run, name), _side(size)
        times = tuple(_seconds(t) for t in list(timestamps)[:_MOST_FRAMES])
        return self._cached(path, size, times, lambda: _frames(path, times)) if times else []

    def _cached(self, path: Path, size: int, times: Any, read: Callable[[], list[Image.Image]]) -> list[bytes]:
        try:
            key = (*_signature(path), size, times)
            pictures = self._pictures.get(key)
            if pictures is None:
                with self._decoding:
                    pictures = [_jpeg(image, size) for image in read()]
                self._pictures.put(key, pictures)
            return pictures
        except (DataError, OSError) as error:
            raise AppError(f"media file {path.name!r} cannot be shown: {error}") from None

    def _linked(self, path: Path) -> Path | None:
        try:
            real = path.resolve(strict=True)
            if not real.is_file() or real.stat().st_size > _LIMITS.media_bytes:
                return None
            key = _signature(real)
            if key not in self._links:
                self._links[key] = file_sha256(real)
            return real if self._links[key] == path.stem else None
        except (OSError, ValueError, RuntimeError):
            return None


class _Cache:
    def __init__(self):
        self._lock, self._bytes = threading.Lock(), 0
        self._pictures: OrderedDict[Any, list[bytes]] = OrderedDict()

    def get(self, key: Any) -> list[bytes] | None:
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
            return self._pictures.get(key)

    def put(self, key: Any, pictures: list[bytes]) -> None:
        with self._lock:
            self._bytes += sum(map(len, pictures)) - sum(map(len, self._pictures.get(key, ())))
            self._pictures[key] = pictures
            while self._bytes > _CACHED_BYTES and len(self._pictures) > 1:
                self._bytes -= sum(map(len, self._pictures.popitem(last=False)[1]))


def url(run: str, name: str, size: int | None = None) -> str:
    """The URL of a media file, or of its thumbnail of `size` pixels. The URL is relative to the page, because a proxy
    may serve the page below a path of its own."""
    words = {"run": run, "name": name} | ({"size": size} if size else {})
    return "vlrl/media?" + urlencode(words, errors="backslashreplace")


def _first(path: Path) -> Image.Image:
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return _frames(path, (0.0,))[0]
    return load(Media(source=path), _LIMITS).frames[0]


def _frames(path: Path, times: Sequence[float]) -> list[Image.Image]:
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        return _moving(path, times)
    if path.stat().st_size > _LIMITS.media_bytes:
        raise DataError(f"the file has more than {_LIMITS.media_bytes} bytes, the limit")
    track = video_decoders.read_track(path)
    _check_size(*track.size)
    wanted = [int(np.abs(track.times - t).argmin()) for t in times]
    order = sorted(set(wanted))
    try:
        frames, _ = video_decoders.read_frames(track, order)
    except video_decoders.HiddenFrames:
        track = video_decoders.recount_frames(track)
        wanted = [int(np.abs(track.times - t).argmin()) for t in times]
        order = sorted(set(wanted))
        frames, _ = video_decoders.read_frames(track, order)
    return [frames[order.index(i)] for i in wanted]


def _moving(path: Path, times: Sequence[float]) -> list[Image.Image]:
    """The frames of an animated image shown at `times`; all of its frames if there are as many frames as times."""
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            _check_size(*image.size)
            count = getattr(image, "n_frames", 1)
            if count * image.width * image.height > _LIMITS.video_pixels:
                raise DataError(f"the {count} frames together have more than {_LIMITS.video_pixels} pixels, the limit")
            chosen: dict[int, Image.Image] = {}
            clock = 0.0
            for number, frame in enumerate(ImageSequence.Iterator(image)):
                frame.load()
                end = clock + frame.info.get("duration", 0) / 1000
                places = ([number] if number < len(times) else []) if count == len(times) else [
                    i for i, t in enumerate(times) if clock <= t < end or (number == count - 1 and t >= end)]
                if places:
                    picture = frame.convert("RGB")
                    picture.thumbnail((_LARGEST, _LARGEST))
                    chosen |= dict.fromkeys(places, picture)
                clock = end
            return [chosen[i] for i in range(len(times))]
    except DataError:
        raise
    except Exception as error:  # decoders raise anything on broken bytes
        raise DataError(f"{type(error).__name__}: {str(error)[:200]}") from None


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= _LIMITS.image_pixels:
        raise DataError(f"the size {width}x{height} exceeds the limit of {_LIMITS.image_pixels} pixels")


def _jpeg(image: Image.Image, size: int) -> bytes:
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.convert("RGB").save(out, format="JPEG", quality=_QUALITY)
    return out.getvalue()


def _signature(path: Path) -> tuple[Any, ...]:
    stat = path.stat()
    return str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            return file.read(16)
    except OSError:
        return b""


def _side(size: Any) -> int:
    try:
        return min(max(int(size), _SMALLEST), _LARGEST)
    except (TypeError, ValueError, OverflowError):
        raise AppError(f"size {str(size)[:50]!r} must be a number of pixels") from None


def _seconds(value: Any) -> float:
    try:
        return min(max(float(value), 0.0), 1e9)
    except (TypeError, ValueError):
        raise AppError(f"time {str(value)[:50]!r} must be a number of seconds") from None
