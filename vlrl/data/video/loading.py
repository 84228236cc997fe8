"""Loads videos from files, from embedded bytes, and from lists of frames."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.config.schema import LimitsSettings
from vlrl.data.clip_cache import ClipCache
from vlrl.data.embedded import EmbeddedMedia
from vlrl.data.media import (
    VideoSampling,
    check_pixels,
    checked_bytes,
    checked_file,
    guard_read,
    load,
    pixel_hash,
)
from vlrl.data.video.sampling import SampledClip, choose, decode
from vlrl.errors import DataError
from vlrl.rewards.boxes import is_number
from vlrl.types import LoadedMedia, Media

_APART, _LATEST = 0.99e-6, 1e9
"""Minimum seconds between two frames (a microsecond, less a tolerance for rounding), and the upper bound of timestamps.
"""
_SAME_RATE = 0.01
"""Relative tolerance between a row's `fps` and the frame rate of its timestamps, since both are rounded."""


def load_video(media: Media, limits: LimitsSettings, sampling: VideoSampling, clips: ClipCache | None) -> LoadedMedia:
    """Loads a video file or a video given as frames: samples its frames as media.load describes."""
    cache = clips or ClipCache(0)
    if isinstance(media.source, Sequence) and not isinstance(media.source, (str, bytes)):
        return _load_frames(media, limits, sampling)

    def read(path: Path) -> SampledClip:
        return decode(path, sampling, media.start, media.end,
                      lambda size, count: _check_frames(size, count, path, limits))

    def read_embedded() -> SampledClip:
        with own.file() as path:
            return read(path)

    if isinstance(media.source, (bytes, EmbeddedMedia)):
        own = checked_bytes(media.source, limits)
        clip = cache.clip((own.sha256, sampling, media.start, media.end), read_embedded)
        return replace(_video(clip, own.sha256, None), data=own.data)
    path = checked_file(media.source, limits)
    sha256 = guard_read(path, lambda: cache.sha256(path))
    return _video(cache.clip((sha256, sampling, media.start, media.end), lambda: read(path)), sha256, path)


def _check_frames(size: tuple[int, int], count: int, path: Path, limits: LimitsSettings) -> None:
    check_pixels(size, str(path), limits)
    if count * size[0] * size[1] > limits.video_pixels:
        raise DataError(f"{path}: {count} frames of {size[0]}x{size[1]} have more pixels than limits.video_pixels="
                        f"{limits.video_pixels}; lower model.video_max_frames, scale the video down, or raise the "
                        "limit")


def _load_frames(media: Media, limits: LimitsSettings, sampling: VideoSampling) -> LoadedMedia:
    times, fps = frame_times(len(media.source), media.fps, media.times)
    if not media.source:
        raise DataError("a video given as a list of frames has no frames")
    chosen = choose(times, fps, sampling, media.start, media.end, "video given as frames")
    frames = tuple(load(Media(source=media.source[i]), limits).frames[0] for i in chosen.indices)
    if len({frame.size for frame in frames}) > 1:
        raise DataError(f"frames of one video differ in size: {sorted({frame.size for frame in frames})}")
    sha256 = pixel_hash(frames)
    if media.times is not None:  # the model sees them
        sha256 = hashlib.sha256(f"{sha256} {chosen.times}".encode()).hexdigest()
    return _video(SampledClip(frames, chosen, fps, len(times), "frames"), sha256, None)


def frame_times(frames: int, fps: Any, times: Any = None) -> tuple[np.ndarray, float]:
    """Returns the time in seconds of each frame of a video given as frames, and the mean frame rate.

    The times are `times` if given, else they are computed from `fps`. Raises DataError if `times` does not match the
    number of frames or `fps`."""
    if times is None:
        rate = _checked_rate(frames, fps)
        return np.arange(frames) / rate, rate
    seconds = times.tolist() if isinstance(times, np.ndarray) else times
    if problem := _times_problem(seconds, frames):
        raise DataError(f"a video of {frames} frames has frame_times={seconds!r:.200}: {problem}")
    rate = None if fps is None else _checked_rate(frames, fps)
    mean = (frames - 1) / (seconds[-1] - seconds[0]) if frames > 1 else rate or 1.0
    if rate and abs(rate - mean) > _SAME_RATE * mean:
        raise DataError(f"a video of {frames} frames has fps={fps!r}, but frame_times={seconds!r:.200} mean {mean:.4g} "
                        "frames per second: remove the wrong one")
    return np.array(seconds, float), mean


def _checked_rate(frames: int, fps: Any) -> float:
    if not is_number(fps) or not 0 < fps < 1e6:
        raise DataError(f"a video of {frames} frames needs a frame rate: fps={fps!r} must be a number above 0, or "
                        "frame_times must hold the seconds of each frame")
    return fps


def _times_problem(times: Any, frames: int) -> str | None:
    if not isinstance(times, (list, tuple)) or len(times) != frames:
        return f"it must be a list of {frames} numbers, the seconds of each frame"
    for i, (before, now) in enumerate(zip((None, *times), times, strict=False)):
        if not is_number(now) or not 0 <= now < _LATEST:
            return f"the time {now!r} of frame {i + 1} must be a number of seconds of at least 0"
        if before is not None and now - before < _APART:
            return (f"the time {now!r} of frame {i + 1} must be later than {before!r}, the time of the previous frame: "
                    "sort the frames")
    return None


def _video(clip: SampledClip, sha256: str, path: Path | None) -> LoadedMedia:
    metadata = {"fps": clip.fps, "total_num_frames": clip.total, "duration": clip.chosen.duration,
                "frames_indices": clip.chosen.indices, "video_backend": clip.backend}
    return LoadedMedia(kind="video", frames=clip.frames, sha256=sha256, path=path, metadata=metadata,
                       timestamps=clip.chosen.times)
