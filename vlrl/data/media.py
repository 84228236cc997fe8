"""Safe loading of images and videos: from a file, from the bytes that a row holds, or from pictures drawn by code.

    load(Media(source=Path("cat.jpg")), config.limits)        # one RGB frame, EXIF orientation applied
    load(Media(kind="video", source=Path("clip.mp4")), config.limits, VideoSampling(fps=1, max_frames=16))

Nothing is decoded before its size is known, nothing is fetched from the network unless `data.urls` says so, and every
failure is a DataError that names the file.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps, ImagePalette, UnidentifiedImageError

from vlrl.config.registry import Table
from vlrl.config.schema import DataSettings, LimitsSettings
from vlrl.config.url_entries import shown
from vlrl.data.embedded import EmbeddedMedia
from vlrl.errors import DataError, VlrlError
from vlrl.store.files import cache_folder
from vlrl.types import LoadedMedia, Media

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""What is opened; formats that start other programs (EPS) are not."""
_READING = threading.Lock()
"""A picture that was opened and not yet read must not be read by two threads at once."""
_DRAWN = "drawn image"
_KINDS = Table({"video": "vlrl.data.video.loading:load_video", "clips": "vlrl.data.video.clip_cache:ClipCache",
                "edited": "vlrl.data.media_edits:apply_edits", "urls": "vlrl.data.sources.download:Policy"})
"""What not every row names."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")


@dataclass(frozen=True)
class VideoSampling:
    """How densely a video is read: `model.video_fps`, `model.video_min_frames` and `model.video_max_frames`."""

    fps: float = 2.0
    """Frames per second of video."""
    max_frames: int = 64
    """Most frames; an odd number is taken as the even one below."""
    min_frames: int = 4
    """Fewest frames, where the video has so many; an odd number is taken as the even one above."""


@dataclass(frozen=True)
class MediaAccess:
    """Where media may come from besides the root of the rows."""

    roots: tuple[Path, ...] = ()
    """Further folders, absolute, links followed: data.media_roots."""
    urls: Any = None
    """A download.Policy; None = nothing is fetched."""

    @classmethod
    def of(cls, data: DataSettings | None) -> MediaAccess:
        """Returns what the settings `data.*` allow. Raises ConfigError for entries of data.urls that are no hosts."""
        return _access(data.media_roots, data.urls, data.cache) if data else ROOT_ONLY


ROOT_ONLY = MediaAccess()
"""The root alone."""


@cache
def _access(roots: tuple[str, ...], urls: bool | tuple[str, ...], cache: str) -> MediaAccess:
    folders = tuple(Path(os.path.realpath(root)) for root in roots)
    policy = _KINDS["urls"](None if urls is True else urls, cache_folder(cache)) if urls else None
    return MediaAccess(folders, policy)


class Clips:
    """Frames of video files kept in memory, at most `mib` MiB (data.clip_cache_mib): a ClipCache, made with the first
    video. Safe across threads."""

    def __init__(self, mib: int):
        self._mib, self._lock, self._cache = mib, threading.Lock(), None

    def made(self) -> Any:
        with self._lock:
            self._cache = self._cache or _KINDS["clips"](self._mib)
            return self._cache


class RemoteMedia:
    """The source of a Media that is fetched when it is loaded."""

    def fetched(self, limits: LimitsSettings) -> Path:
        raise NotImplementedError


def load(media: Media, limits: LimitsSettings, video: VideoSampling | None = None,
         clips: Clips | None = None) -> LoadedMedia:
    """Reads one image or video.

    Images become RGB, with the EXIF orientation applied and transparency laid over white. Of a video between `start`
    and `end` an even number of frames is taken (models merge two at a time), see `video_sampling.choose`; those of a
    file are kept in `clips`. Then come the edits.

    Raises DataError naming the file when it is missing, unreadable, cut short or above `limits`; decoders raise
    anything else on broken pixels, which becomes one too.
    """
    def read() -> LoadedMedia:
        loaded = _load(media, limits, video or VideoSampling(), clips)
        return _KINDS["edited"](loaded, media.edits) if media.edits else loaded

    return guard_read(source_name(media.source), read)


def _load(media: Media, limits: LimitsSettings, video: VideoSampling, clips: Clips | None) -> LoadedMedia:
    if isinstance(media.source, LoadedMedia):
        return media.source
    if media.kind == "video":
        return _KINDS["video"](media, limits, video, clips)
    if isinstance(media.source, Image.Image):
        image = _rgb(media.source, _DRAWN, limits)
        return LoadedMedia(kind="image", frames=(image,), sha256=pixel_hash([image]))
    if isinstance(media.source, (bytes, EmbeddedMedia)):
        own = checked_bytes(media.source, limits)
        data = own.data
        return LoadedMedia(kind="image", frames=(_decode(data, own.name, limits),), sha256=own.sha256, data=data)
    path = checked_file(media.source, limits)
    data = guard_read(path, path.read_bytes)
    return LoadedMedia(kind="image", frames=(_decode(data, path, limits),), sha256=_sha256(data), path=path)


def media_source(path: Any, root: Path, access: MediaAccess = ROOT_ONLY) -> Any:
    """Returns what a row names: a file, see `resolve`, or a URL that data.urls allows; media that it holds, and a list
    of frames, likewise. Raises DataError.
    """
    if isinstance(path, EmbeddedMedia):
        return path
    if isinstance(path, list):
        return [media_source(frame, root, access) for frame in path]
    if access.urls and isinstance(path, str) and _URL.match(path):
        return access.urls.checked(path)
    return resolve(path, root, access.roots)


def resolve(path: str, root: Path, roots: Sequence[Path] = ()) -> Path:
    """Returns the file that a row names, relative to `root`, as an absolute path; it need not exist.

    Raises DataError for a URL and for a path that leads out of `root` and all of `roots` ("..", absolute, by a link).
    """
    if not isinstance(path, str):
        raise DataError(f"media path {path!r} must be a text")
    if not path.strip():
        raise DataError(f"media path {path!r} is empty: name the file, or, where the row has none, leave the field out")
    _refuse_url(path)
    try:
        base = root.resolve()
        full = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise DataError(f"media path {path!r} is not a path: {error}") from None
    if not any(full.is_relative_to(folder) for folder in (base, *roots)):
        raise DataError(f"media path {path!r} leads out of {' and '.join(map(str, (base, *roots)))}: move the file "
                        "there, set data.root to a folder that holds all media, or add its folder to data.media_roots")
    return full


# --- files ------------------------------------------------------------------------------------------------------------


def checked_file(source: Any, limits: LimitsSettings) -> Path:
    if isinstance(source, RemoteMedia):
        source = source.fetched(limits)
    if not isinstance(source, (str, os.PathLike)):
        raise DataError(f"media source of type {type(source).__name__}: give a path, a PIL image, or frames")
    _refuse_url(str(source))
    path = Path(source)
    if problem := guard_read(path, lambda: missing_file(path)):
        raise DataError(problem)
    size = guard_read(path, path.stat).st_size
    if size > limits.media_bytes:
        raise DataError(f"media file {path} has {size} bytes, more than limits.media_bytes={limits.media_bytes}")
    if size == 0:
        raise DataError(f"media file {path} is empty")
    return path


def checked_bytes(source: bytes | EmbeddedMedia, limits: LimitsSettings) -> EmbeddedMedia:
    own = EmbeddedMedia(source) if isinstance(source, bytes) else source
    if own.count > limits.media_bytes:
        raise DataError(f"{own.name}: more bytes than limits.media_bytes={limits.media_bytes}")
    if not own.count:
        raise DataError(f"{own.name} is empty")
    return own


def missing_file(path: str | Path) -> str:
    """Returns what is wrong with the path of an image or video that is no file, "" for a file."""
    if os.path.isfile(path):  # Path.is_file raises for long names
        return ""
    kind = "a folder" if os.path.isdir(path) else "no regular file"
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
    return f"media file {name} {f'is {kind}' if os.path.exists(path) else 'does not exist'}; check it and data.root"


def _refuse_url(path: str) -> None:
    if _URL.match(path):
        raise DataError(f"media path {shown(path)} is a URL, and nothing is fetched unless data.urls allows it: "
                        "download it and name the file, or set data.urls to the hosts that may be asked")


def guard_read(path: Path | str, read: Any) -> Any:
    """`read()` with what the system or a decoder raises turned into a DataError that names the file, or what else a
    text names.
    """
    name = path if isinstance(path, str) else f"media file {path}"  # "media inside row ..."
    try:
        return read()
    except VlrlError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name} is no image of a known kind ({', '.join(IMAGE_FORMATS)})") from None
    except Exception as error:  # decoders raise anything on broken bytes: OSError, SyntaxError, struct.error, ...
        why = str(error).partition(" <_io.")[0]  # Pillow names a buffer by its address
        raise DataError(f"{name} cannot be read: {type(error).__name__}: {why}") from error


def source_name(source: Any) -> Path | str:
    if isinstance(source, (str, os.PathLike)):
        return Path(source)
    return getattr(source, "name", "a picture in memory") if isinstance(source, EmbeddedMedia) else _DRAWN


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pixel_hash(frames: Sequence[Image.Image]) -> str:
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(f"{frame.mode} {frame.width} {frame.height}\n".encode())
        digest.update(frame.tobytes())
    return digest.hexdigest()


# --- images -----------------------------------------------------------------------------------------------------------


def _decode(data: bytes, path: Path | str, limits: LimitsSettings) -> Image.Image:
    def read() -> Image.Image:
        try:
            opened = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        except Image.DecompressionBombError:
            raise DataError(f"{path} has more pixels than limits.image_pixels={limits.image_pixels}, or than Pillow "
                            "opens; make it smaller") from None
        with opened as image:
            check_pixels(image.size, str(path), limits)
            return _rgb(image, str(path), limits)

    return guard_read(path, read)


def as_rgb(image: Image.Image) -> Image.Image:
    """Returns a picture of any mode in RGB, transparency laid over white: what is sent from one process to another,
    where a picture without a palette would break. Raises DataError for what cannot be decoded or has no colours."""
    return guard_read(_DRAWN, lambda: _converted(image, _DRAWN))


def _rgb(image: Image.Image, name: str, limits: LimitsSettings) -> Image.Image:
    check_pixels(image.size, name, limits)
    return _converted(image, name)


def _converted(image: Image.Image, name: str) -> Image.Image:
    if "P" in image.mode and image.palette is None and not isinstance(image, ImageFile.ImageFile):
        image.palette = ImagePalette.ImagePalette()  # lost by pickling; Pillow loads nothing without one
    with _READING:
        image.load()
    image = ImageOps.exif_transpose(image)  # also of a file that a task has opened itself
    if image.mode in ("P", "PA") and not image.getpalette() and np.asarray(image.getchannel(0)).any():
        raise DataError(f"{name} is of mode {image.mode} without a palette, so its colours are not known: give it one, "
                        "or make it of mode L or RGB")
    if image.mode == "La":
        image = image.convert("LA")  # the one way out of it
    if image.mode == "F" or image.mode.startswith("I"):
        image = _of_numbers(np.asarray(image), name)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image


def _of_numbers(values: np.ndarray, name: str) -> Image.Image:
    """Returns a picture of one number a pixel: floats in [0, 1], or whole numbers of 8 or 16 bits, in [0, 255]."""
    low, high = values.min(), values.max()
    most = 1 if values.dtype.kind == "f" and high <= 1 else 255 if high <= 255 else 65535
    if not 0 <= low <= high <= most:  # also nan
        raise DataError(f"{name} holds numbers from {low:g} to {high:g}, of which black and white are not known: save "
                        "it with 8 or 16 bits a pixel")
    return Image.fromarray((values // 256 if most == 65535 else values * (255 / most)).astype(np.uint8))


def check_pixels(size: tuple[int, int], name: str, limits: LimitsSettings) -> None:
    """Raises DataError, with the name, for a size without a pixel or above limits.image_pixels."""
    width, height = size
    if width < 1 or height < 1:
        raise DataError(f"{name} is {width}x{height} pixels: nothing to see")
    if width * height > limits.image_pixels:
        raise DataError(f"{name} is {width}x{height} = {width * height} pixels, more than limits.image_pixels="
                        f"{limits.image_pixels}; make it smaller, or raise the limit")
