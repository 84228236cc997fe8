"""Safe loading of images and videos from files, from bytes in rows, or from PIL images created by code.

    load(Media(source=Path("cat.jpg")), config.limits)        # one RGB frame, EXIF orientation applied
    load(Media(kind="video", source=Path("clip.mp4")), config.limits, VideoSampling(fps=1, max_frames=16))

Nothing is decoded before its size is checked, and nothing is downloaded unless `data.urls` allows it. Every failure is
a DataError that names the file."""

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
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, ImageOps, ImagePalette, UnidentifiedImageError

from vlrl.config.registry import Table
from vlrl.config.schema import DataSettings, LimitsSettings
from vlrl.config.url_entries import redacted
from vlrl.data.clip_cache import ClipCache
from vlrl.data.embedded import EmbeddedMedia
from vlrl.errors import DataError, VlrlError
from vlrl.store.files import cache_folder
from vlrl.types import LoadedMedia, Media

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""Image formats that are opened. Formats for which Pillow starts other programs (EPS) are excluded."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v")
_READING = threading.Lock()
"""Lock that is held while Pillow decodes pixels: two threads must not decode the same lazily opened image."""
_DRAWN = "drawn image"
_KINDS = Table({"video": "vlrl.data.video.sampling:load_video", "edited": "vlrl.data.media_edits:apply_edits",
                "urls": "vlrl.data.sources.download:Policy"})
"""Functions that load videos, apply edits and check URLs. A module is imported only when a row needs its function."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")


@dataclass(frozen=True)
class VideoSampling:
    """How frames are sampled from a video: `model.video_fps`, `model.video_min_frames`, `model.video_max_frames`."""

    fps: float = 2.0
    """Number of frames sampled per second of video."""
    max_frames: int = 64
    """Maximum number of sampled frames; an odd number is rounded down to an even number."""
    min_frames: int = 4
    """Minimum number of sampled frames (fewer if the video has fewer); an odd number is rounded up to an even one."""


@dataclass(frozen=True)
class MediaAccess:
    """The folders and URLs from which media may be read, in addition to the root folder of the rows."""

    roots: tuple[Path, ...] = ()
    """Additional folders (data.media_roots) as absolute paths with symbolic links resolved."""
    urls: Any = None
    """A download.Policy that decides which URLs may be downloaded; None forbids all downloads."""

    @classmethod
    def of(cls, data: DataSettings | None) -> MediaAccess:
        """Returns the access that the settings data.media_roots and data.urls allow; only the root folder if `data` is
        None. Raises ConfigError if an entry of data.urls is not a host."""
        return _access(data.media_roots, data.urls, data.cache) if data else ROOT_ONLY


ROOT_ONLY = MediaAccess()
"""Access to the root folder only."""


@cache
def _access(roots: tuple[str, ...], urls: bool | tuple[str, ...], cache: str) -> MediaAccess:
    folders = tuple(Path(os.path.realpath(root)) for root in roots)
    policy = _KINDS["urls"](None if urls is True else urls, cache_folder(cache)) if urls else None
    return MediaAccess(folders, policy)


class RemoteMedia:
    """Base class of a Media's `source` that is downloaded when it is loaded."""

    def fetched(self, limits: LimitsSettings) -> Path:
        raise NotImplementedError


def load(media: Media, limits: LimitsSettings, video: VideoSampling | None = None,
         clips: ClipCache | None = None) -> LoadedMedia:
    """Loads one image or video, and returns its frames as LoadedMedia.

    An image becomes RGB, with its EXIF orientation applied and transparency blended over white. From a video, an even
    number of frames between `media.start` and `media.end` is sampled with the settings `video`. The number is even
    because models merge frames in pairs (see `video.sampling.choose`). Frames decoded from video files are cached in
    `clips`. The edits of `media` are applied last.

    Raises DataError naming the file if it is missing, unreadable, truncated or above `limits`."""
    def read() -> LoadedMedia:
        loaded = _load(media, limits, video or VideoSampling(), clips)
        return _KINDS["edited"](loaded, media.edits) if media.edits else loaded

    return guard_read(source_name(media.source), read)


def _load(media: Media, limits: LimitsSettings, video: VideoSampling, clips: ClipCache | None) -> LoadedMedia:
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
    sha256 = hashlib.sha256(data).hexdigest()
    return LoadedMedia(kind="image", frames=(_decode(data, path, limits),), sha256=sha256, path=path)


def media_source(path: Any, root: Path, access: MediaAccess = ROOT_ONLY) -> Any:
    """Returns the source of an image or video that a row names, after checking that it may be read.

    The source is a file path (see `resolve`), a URL that `access` allows, or embedded media. For a video given as
    frames, it is a list with the source of each frame. Raises DataError for anything else."""
    if isinstance(path, EmbeddedMedia):
        return path
    if isinstance(path, list):
        return [media_source(frame, root, access) for frame in path]
    if access.urls and isinstance(path, str) and _URL.match(path):
        return access.urls.checked(path)
    return resolve(path, root, access.roots)


def resolve(path: str, root: Path, roots: Sequence[Path] = ()) -> Path:
    """Returns the absolute path of a file that a row names relative to `root`; the file need not exist.

    Raises DataError for a URL, and for a path outside `root` and `roots` ("..", an absolute path, a symbolic link)."""
    if not isinstance(path, str):
        raise DataError(f"media path {path!r} must be a string")
    if not path.strip():
        raise DataError(f"media path {path!r} is empty: name the file, or leave the field out of a row without media")
    _refuse_url(path)
    try:
        base = root.resolve()
        full = (base / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise DataError(f"media path {path!r} is not a path: {error}") from None
    if not any(full.is_relative_to(folder) for folder in (base, *roots)):
        raise DataError(f"media path {path!r} lies outside {' and '.join(map(str, (base, *roots)))}: move the file "
                        "there, set data.root to the folder that holds all media, or add the file's folder to "
                        "data.media_roots")
    return full


def checked_file(source: Any, limits: LimitsSettings) -> Path:
    if isinstance(source, RemoteMedia):
        source = source.fetched(limits)
    if not isinstance(source, (str, os.PathLike)):
        raise DataError(f"media source of type {type(source).__name__} cannot be loaded: give a path, a PIL image, "
                        "or frames")
    _refuse_url(str(source))
    path = Path(source)
    if problem := guard_read(path, lambda: missing_file(path)):
        raise DataError(problem)
    size = guard_read(path, path.stat).st_size
    if size > limits.media_bytes:
        raise DataError(f"media file {path} has {size} bytes, more than limits.media_bytes={limits.media_bytes}; make "
                        "the file smaller, or raise the limit")
    if size == 0:
        raise DataError(f"media file {path} is empty")
    return path


def checked_bytes(source: bytes | EmbeddedMedia, limits: LimitsSettings) -> EmbeddedMedia:
    own = EmbeddedMedia(source) if isinstance(source, bytes) else source
    if own.count > limits.media_bytes:
        raise DataError(f"{own.name} has more bytes than limits.media_bytes={limits.media_bytes}; raise the limit")
    if not own.count:
        raise DataError(f"{own.name} is empty")
    return own


def missing_file(path: str | Path) -> str:
    """Returns an error message if the path is not a regular file, else ""."""
    if os.path.isfile(path):  # Path.is_file raises for long names
        return ""
    kind = "a folder" if os.path.isdir(path) else "not a regular file"
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
    problem = f"is {kind}" if os.path.exists(path) else "does not exist"
    return f"media file {name} {problem}; check the path and data.root"


def _refuse_url(path: str) -> None:
    if _URL.match(path):
        raise DataError(f"media path {redacted(path)} is a URL, and nothing is downloaded unless data.urls allows "
                        "it: download the file and give its local path, or set data.urls to the allowed hosts")


def guard_read(path: Path | str, read: Any) -> Any:
    """Returns the result of `read()`, which reads the file `path`. An error of the system or of a decoder becomes a
    DataError.

    If `path` is a string, the error message starts with that string."""
    name = path if isinstance(path, str) else f"media file {path}"
    try:
        return read()
    except VlrlError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name} is not an image of a known format ({', '.join(IMAGE_FORMATS)})") from None
    except Exception as error:  # decoders raise anything on broken bytes: OSError, SyntaxError, struct.error, ...
        why = str(error).partition(" <_io.")[0]  # Pillow names a buffer by its address
        raise DataError(f"{name} cannot be read: {type(error).__name__}: {why}") from error


def source_name(source: Any) -> Path | str:
    if isinstance(source, (str, os.PathLike)):
        return Path(source)
    return getattr(source, "name", "an image in memory") if isinstance(source, EmbeddedMedia) else _DRAWN


def pixel_hash(frames: Sequence[Image.Image]) -> str:
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(f"{frame.mode} {frame.width} {frame.height}\n".encode())
        digest.update(frame.tobytes())
    return digest.hexdigest()


def _decode(data: bytes, path: Path | str, limits: LimitsSettings) -> Image.Image:
    def read() -> Image.Image:
        try:
            opened = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        except Image.DecompressionBombError:
            raise DataError(f"{path} has more pixels than limits.image_pixels={limits.image_pixels}, or than Pillow "
                            "opens; make the image smaller") from None
        with opened as image:
            check_pixels(image.size, str(path), limits)
            return _rgb(image, str(path), limits)

    return guard_read(path, read)


def as_rgb(image: Image.Image) -> Image.Image:
    """Converts a PIL image of any mode to RGB, with transparency blended over white; the result can be pickled. Raises
    DataError for an image that cannot be decoded or has no palette."""
    return guard_read(_DRAWN, lambda: _converted(image, _DRAWN))


def _rgb(image: Image.Image, name: str, limits: LimitsSettings) -> Image.Image:
    check_pixels(image.size, name, limits)
    return _converted(image, name)


def _converted(image: Image.Image, name: str) -> Image.Image:
    if "P" in image.mode and image.palette is None and not isinstance(image, ImageFile.ImageFile):
        image.palette = ImagePalette.ImagePalette()  # lost by pickling; Pillow loads nothing without one
    with _READING:
        image.load()
    image = ImageOps.exif_transpose(image)  # also for a file that a task has opened itself
    if image.mode in ("P", "PA") and not image.getpalette() and np.asarray(image.getchannel(0)).any():
        raise DataError(f"{name} is of mode {image.mode} without a palette, so its colours are unknown: add a "
                        "palette, or convert it to mode L or RGB")
    if image.mode == "La":
        image = image.convert("LA")  # La converts to no other mode
    if image.mode == "F" or image.mode.startswith("I"):
        image = _greyscale(np.asarray(image), name)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image


def _greyscale(values: np.ndarray, name: str) -> Image.Image:
    """Converts one number per pixel (floats from 0 to 1, or 8-bit or 16-bit integers) to an 8-bit greyscale image."""
    low, high = values.min(), values.max()
    most = 1 if values.dtype.kind == "f" and high <= 1 else 255 if high <= 255 else 65535
    if not 0 <= low <= high <= most:  # also nan
        raise DataError(f"{name} has pixel values from {low:g} to {high:g}, and it is unknown which of them mean "
                        "black and white: save the image with 8 or 16 bits per pixel")
    return Image.fromarray((values // 256 if most == 65535 else values * (255 / most)).astype(np.uint8))


def check_pixels(size: tuple[int, int], name: str, limits: LimitsSettings) -> None:
    """Raises DataError for an image that is empty or has over limits.image_pixels pixels; `name` starts the message."""
    width, height = size
    if width < 1 or height < 1:
        raise DataError(f"{name} is {width}x{height} pixels: it is empty")
    if width * height > limits.image_pixels:
        raise DataError(f"{name} is {width}x{height} = {width * height} pixels, more than limits.image_pixels="
                        f"{limits.image_pixels}; scale the image down, or raise the limit")


_ORIENTATION = 0x0112
_ROTATED = (5, 6, 7, 8)


class Header(NamedTuple):
    """Size and orientation from the header of an image file."""

    size: tuple[int, int]
    """Width and height as displayed, with the EXIF orientation applied."""
    orientation: int
    """EXIF orientation: 1 = displayed as stored, 5 to 8 = rotated by 90 degrees."""


def header(source: Path | bytes | EmbeddedMedia) -> Header | None:
    """Returns size and orientation from the header of an image; None if the image is missing or unreadable."""
    data = source.data if isinstance(source, EmbeddedMedia) else source
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=IMAGE_FORMATS) as opened:
            width, height = opened.size
            # Pillow would search a PNG without EXIF in its header behind the pixels
            has_exif = opened.format != "PNG" or "exif" in opened.info
            orientation = opened.getexif().get(_ORIENTATION, 1) if has_exif else 1
    except Exception:  # decoders raise anything; loading the image reports the fault
        return None
    known = orientation if orientation in range(1, 9) else 1
    return Header((height, width) if known in _ROTATED else (width, height), known)
