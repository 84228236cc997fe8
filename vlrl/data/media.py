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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps, ImagePalette, UnidentifiedImageError

from vlrl.config.schema import DataSettings, LimitsSettings
from vlrl.data.embedded import Embedded
from vlrl.data.media_edits import edited
from vlrl.data.sources.download import Policy, Remote, checked, fetched, shown
from vlrl.data.video.clip_cache import NO_CACHE, ClipCache
from vlrl.data.video.sampling import Clip, VideoSampling, choose, decode
from vlrl.errors import DataError, VlrlError
from vlrl.rewards.boxes import is_number
from vlrl.store.files import cache_folder
from vlrl.types import LoadedMedia, Media

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""What is opened; formats that start other programs (EPS) are not."""
_READING = threading.Lock()
"""A picture that was opened and not yet read must not be read by two threads at once."""
_DRAWN = "drawn image"
_APART, _LATEST = 0.99e-6, 1e9
"""Least seconds between two frames, a microsecond as floats hold it, and what those of any are below."""
_SAME_RATE = 0.01
"""Share by which a told rate may differ from that of the times: they are rounded."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")


@dataclass(frozen=True)
class Access:
    """Where media may come from besides the root of the rows."""

    roots: tuple[Path, ...] = ()
    """Further folders, absolute, links followed: data.media_roots."""
    urls: Policy | None = None
    """None = nothing is fetched."""

    @classmethod
    def of(cls, data: DataSettings | None) -> Access:
        """Returns what the settings `data.*` allow. Raises ConfigError for entries of data.urls that are no hosts."""
        return _access(data.media_roots, data.urls, data.cache) if data else CLOSED


CLOSED = Access()
"""The root alone."""


@cache
def _access(roots: tuple[str, ...], urls: bool | tuple[str, ...], cache: str) -> Access:
    folders = tuple(Path(os.path.realpath(root)) for root in roots)
    policy = Policy(None if urls is True else urls, cache_folder(cache)) if urls else None
    return Access(folders, policy)


def load(media: Media, limits: LimitsSettings, video: VideoSampling | None = None,
         cache: ClipCache = NO_CACHE) -> LoadedMedia:
    """Reads one image or video.

    Images become RGB, with the EXIF orientation applied and transparency laid over white. Of a video between `start`
    and `end` an even number of frames is taken (models merge two at a time), see `video_sampling.choose`; those of a
    file are kept in `cache`. Then come the edits.

    Raises DataError naming the file when it is missing, unreadable, cut short or above `limits`; decoders raise
    anything else on broken pixels, which becomes one too.
    """
    return _guard(_name(media.source), lambda: edited(_load(media, limits, video or VideoSampling(), cache),
                                                      media.edits))


def _load(media: Media, limits: LimitsSettings, video: VideoSampling, cache: ClipCache) -> LoadedMedia:
    if isinstance(media.source, LoadedMedia):
        return media.source
    if media.kind == "video":
        return _load_video(media, limits, video, cache)
    if isinstance(media.source, Image.Image):
        image = _rgb(media.source, _DRAWN, limits)
        return LoadedMedia(kind="image", frames=(image,), sha256=_pixel_hash([image]))
    if isinstance(media.source, (bytes, Embedded)):
        own = _checked_bytes(media.source, limits)
        data = own.data
        return LoadedMedia(kind="image", frames=(_decode(data, own.name, limits),), sha256=own.sha256, data=data)
    path = _checked_file(media.source, limits)
    data = _guard(path, path.read_bytes)
    return LoadedMedia(kind="image", frames=(_decode(data, path, limits),), sha256=_sha256(data), path=path)


def source(path: Any, root: Path, access: Access = CLOSED) -> Any:
    """Returns what a row names: a file, see `resolve`, or a URL that data.urls allows; media that it holds, and a list
    of frames, likewise. Raises DataError.
    """
    if isinstance(path, Embedded):
        return path
    if isinstance(path, list):
        return [source(frame, root, access) for frame in path]
    if access.urls and isinstance(path, str) and _URL.match(path):
        return checked(path, access.urls)
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


def _checked_file(source: Any, limits: LimitsSettings) -> Path:
    if isinstance(source, Remote):
        source = fetched(source, limits.media_bytes, limits.url_seconds)
    if not isinstance(source, (str, os.PathLike)):
        raise DataError(f"media source of type {type(source).__name__}: give a path, a PIL image, or frames")
    _refuse_url(str(source))
    path = Path(source)
    if problem := _guard(path, lambda: missing(path)):
        raise DataError(problem)
    size = _guard(path, path.stat).st_size
    if size > limits.media_bytes:
        raise DataError(f"media file {path} has {size} bytes, more than limits.media_bytes={limits.media_bytes}")
    if size == 0:
        raise DataError(f"media file {path} is empty")
    return path


def _checked_bytes(source: bytes | Embedded, limits: LimitsSettings) -> Embedded:
    own = Embedded(source) if isinstance(source, bytes) else source
    if own.count > limits.media_bytes:
        raise DataError(f"{own.name}: more bytes than limits.media_bytes={limits.media_bytes}")
    if not own.count:
        raise DataError(f"{own.name} is empty")
    return own


def missing(path: str | Path) -> str:
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


def _guard(path: Path | str, read: Any) -> Any:
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


def _name(source: Any) -> Path | str:
    if isinstance(source, (str, os.PathLike)):
        return Path(source)
    return getattr(source, "name", "a picture in memory") if isinstance(source, Embedded) else _DRAWN


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pixel_hash(frames: Sequence[Image.Image]) -> str:
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

    return _guard(path, read)


def drawn(image: Image.Image) -> Image.Image:
    """Returns a picture of any mode in RGB, transparency laid over white: what is sent from one process to another,
    where a picture without a palette would break. Raises DataError for what cannot be decoded or has no colours."""
    return _guard(_DRAWN, lambda: _converted(image, _DRAWN))


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


# --- videos -----------------------------------------------------------------------------------------------------------


def _load_video(media: Media, limits: LimitsSettings, sampling: VideoSampling, cache: ClipCache) -> LoadedMedia:
    if isinstance(media.source, Sequence) and not isinstance(media.source, (str, bytes)):
        return _load_frames(media, limits, sampling)

    def read(path: Path) -> Clip:
        return decode(path, sampling, media.start, media.end,
                      lambda size, count: _check_frames(size, count, path, limits))

    def read_embedded() -> Clip:
        with own.file() as path:
            return read(path)

    if isinstance(media.source, (bytes, Embedded)):
        own = _checked_bytes(media.source, limits)
        clip = cache.clip((own.sha256, sampling, media.start, media.end), read_embedded)
        return replace(_video(clip, own.sha256, None), data=own.data)
    path = _checked_file(media.source, limits)
    sha256 = _guard(path, lambda: cache.sha256(path))
    return _video(cache.clip((sha256, sampling, media.start, media.end), lambda: read(path)), sha256, path)


def _check_frames(size: tuple[int, int], count: int, path: Path, limits: LimitsSettings) -> None:
    check_pixels(size, str(path), limits)
    if count * size[0] * size[1] > limits.video_pixels:
        raise DataError(f"{path}: {count} frames of {size[0]}x{size[1]} have more pixels than limits.video_pixels="
                        f"{limits.video_pixels}; take fewer with model.video_max_frames, make the video smaller, or "
                        "raise the limit")


def _load_frames(media: Media, limits: LimitsSettings, sampling: VideoSampling) -> LoadedMedia:
    """Returns a video given as pictures, drawn or in files, with `Media.fps` or `Media.times`."""
    times, fps = frame_times(len(media.source), media.fps, media.times)
    if not media.source:
        raise DataError("a video given as frames has none")
    chosen = choose(times, fps, sampling, media.start, media.end, "video given as frames")
    frames = tuple(load(Media(source=media.source[i]), limits).frames[0] for i in chosen.indices)
    if len({frame.size for frame in frames}) > 1:
        raise DataError(f"frames of one video differ in size: {sorted({frame.size for frame in frames})}")
    sha256 = _pixel_hash(frames)
    if media.times is not None:  # a model is told them
        sha256 = _sha256(f"{sha256} {chosen.times}".encode())
    return _video(Clip(frames, chosen, fps, len(times), "frames"), sha256, None)


def frame_times(frames: int, fps: Any, times: Any = None) -> tuple[np.ndarray, float]:
    """Returns the seconds of each frame of a video given as frames, and the mean rate: of `times` where these are told,
    else of `fps` frames a second. Raises DataError for times that are none of these frames, or of another rate.
    """
    if times is None:
        rate = _checked_rate(frames, fps)
        return np.arange(frames) / rate, rate
    told = times.tolist() if isinstance(times, np.ndarray) else times
    if problem := _times_problem(told, frames):
        raise DataError(f"a video of {frames} frames has frame_times={told!r:.200}: {problem}")
    rate = None if fps is None else _checked_rate(frames, fps)
    mean = (frames - 1) / (told[-1] - told[0]) if frames > 1 else rate or 1.0
    if rate and abs(rate - mean) > _SAME_RATE * mean:
        raise DataError(f"a video of {frames} frames has fps={fps!r}, and frame_times={told!r:.200} of {mean:.4g} "
                        "frames a second: leave out the one that is wrong")
    return np.array(told, float), mean


def _checked_rate(frames: int, fps: Any) -> float:
    if not is_number(fps) or not 0 < fps < 1e6:
        raise DataError(f"a video of {frames} frames needs their rate: fps={fps!r} must be a number above 0, the "
                        "frames a second; or frame_times, the seconds of each")
    return fps


def _times_problem(times: Any, frames: int) -> str | None:
    if not isinstance(times, (list, tuple)) or len(times) != frames:
        return f"it must be a list of {frames} numbers, the seconds of each frame"
    for i, (before, now) in enumerate(zip((None, *times), times, strict=False)):
        if not is_number(now) or not 0 <= now < _LATEST:
            return f"{now!r}, of frame {i + 1}, must be a number of seconds of at least 0"
        if before is not None and now - before < _APART:
            return f"{now!r}, of frame {i + 1}, must come after {before!r}, that of the frame before: sort the frames"
    return None


def _video(clip: Clip, sha256: str, path: Path | None) -> LoadedMedia:
    metadata = {"fps": clip.fps, "total_num_frames": clip.total, "duration": clip.chosen.duration,
                "frames_indices": clip.chosen.indices, "video_backend": clip.backend}
    return LoadedMedia(kind="video", frames=clip.frames, sha256=sha256, path=path, metadata=metadata,
                       timestamps=clip.chosen.times)
