"""Loads videos from files, embedded bytes and lists of frames: selects the frames to decode, and computes the
timestamps that the model sees.

All times are seconds from the start of the clip: from `start` if given, else from the first frame."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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
from vlrl.data.video.decoders import HiddenFrames, VideoTrack, read_frames, read_track, recount_frames
from vlrl.errors import DataError
from vlrl.rewards.boxes import is_number
from vlrl.types import LoadedMedia, Media

TICKS = 1_000_000
"""Frames per second of the virtual clock in `clock`; on this clock, a frame's number is its time in microseconds."""


@dataclass(frozen=True)
class FrameChoice:
    """The frames selected from a video."""

    indices: list[int]
    """Index of each selected frame in the whole video."""
    times: tuple[float, ...]
    """Time of each selected frame in seconds from the start of the clip."""
    duration: float
    """Length of the clip in seconds."""


@dataclass(frozen=True)
class SampledClip:
    """The frames decoded from a video."""

    frames: tuple[Image.Image, ...]
    chosen: FrameChoice
    fps: float
    """Mean frame rate of the whole video."""
    total: int
    """Number of frames of the whole video."""
    backend: str


def choose(times: np.ndarray, fps: float, sampling: VideoSampling, start: float | None, end: float | None,
           name: str) -> FrameChoice:
    """Selects frames between `start` and `end`, uniformly in time and including the first and the last frame.

    `times` holds the seconds of each frame from the first frame, `fps` is the mean frame rate, and `name` is the video
    in error messages. The number of selected frames is the clip's duration times `sampling.fps`, at least `min_frames`,
    at most `max_frames` and the number of available frames, rounded down to an even number. From a clip with a single
    frame, this frame is selected twice. For constant frame rates the selection equals that of qwen-vl-utils 0.0.14.

    Raises DataError if there is no frame between `start` and `end`."""
    whole = float(times[-1]) + 1 / fps
    low, high = max(0.0, start or 0.0), whole if end is None else min(end, whole)
    inside = np.flatnonzero((times >= low - 1e-3) & (times <= high + 1e-3)) if low < high else np.empty(0, int)
    if not inside.size:
        raise DataError(f"{name}: there is no frame between start={start} and end={end} s, because the video lasts "
                        f"{whole:.3f} s")
    own = times[inside]
    wanted = (own[-1] - own[0] + 1 / fps) * sampling.fps + 1e-6
    fewest = -(-sampling.min_frames // 2) * 2
    count = max(2, int(min(max(wanted, fewest), sampling.max_frames, inside.size)) // 2 * 2)
    targets = np.linspace(own[0], own[-1], count)
    right = np.searchsorted(own, targets).clip(1, max(1, inside.size - 1))
    nearest = right - (targets - own[right - 1] <= own[right] - targets) if inside.size > 1 else np.zeros(count, int)
    shown = np.round((own[nearest] - low).clip(0), 6)
    return FrameChoice([int(i) for i in inside[nearest]], tuple(map(float, shown)), high - low)


def decode(path: Path, sampling: VideoSampling, start: float | None, end: float | None,
           check: Callable[[tuple[int, int], int], None]) -> SampledClip:
    """Decodes and returns the frames of a file that `choose` selects between `start` and `end`. The decoder is decord
    if it is installed and reliable for the file, else PyAV.

    Only the selected frames are held in memory. `check(size, number of frames)` runs before decoding and may raise an
    error. Raises DataError naming the file."""
    video_track = read_track(path)
    try:
        return _clip(video_track, sampling, start, end, check)
    except HiddenFrames:
        return _clip(recount_frames(video_track), sampling, start, end, check)


def _clip(video_track: VideoTrack, sampling: VideoSampling, start: float | None, end: float | None,
          check: Callable[[tuple[int, int], int], None]) -> SampledClip:
    chosen = choose(video_track.times, video_track.fps, sampling, start, end, str(video_track.path))
    check(video_track.size, len(chosen.indices))
    frames, backend = read_frames(video_track, chosen.indices)
    return SampledClip(tuple(frames), chosen, video_track.fps, len(video_track.times), backend)


def clock(loaded: LoadedMedia) -> dict[str, Any]:
    """Returns video metadata from which processors of transformers compute the true timestamps.

    A processor computes a frame's time as number / fps, and the rate of the sampled frames as (sampled frames) / (total
    frames) * fps. The file's true values would give wrong times for variable frame rates and for clips that start
    inside the file. So frames are numbered on a virtual clock of TICKS per second, and the total number of frames is
    set to reproduce the mean rate of the sampled frames."""
    times, given = loaded.timestamps, loaded.metadata
    count = len(times)
    apart = (times[-1] - times[0]) / max(1, count - 1) or given["duration"] / max(1, count)
    return {"fps": float(TICKS), "frames_indices": [round(t * TICKS) for t in times],
            "total_num_frames": math.floor(apart * count * TICKS) + 1,  # rounded up: positions drop their fractions
            "duration": given["duration"], "video_backend": given["video_backend"]}


_APART, _LATEST = 0.99e-6, 1e9
"""Minimum seconds between two frames (a microsecond, less a rounding tolerance), and the upper bound of timestamps."""
_SAME_RATE = 0.01
"""Relative tolerance between a row's `fps` and the frame rate of its timestamps, since both are rounded."""


def load_video(media: Media, limits: LimitsSettings, sampling: VideoSampling, clips: ClipCache | None) -> LoadedMedia:
    """Loads a video file or a video given as frames, and returns the sampled frames (see media.load)."""
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
        sizes = sorted({frame.size for frame in frames})
        raise DataError(f"frames of one video differ in size: {sizes}. Scale them to one size")
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
        raise DataError(f"a video of {frames} frames has fps={fps!r}, but frame_times={seconds!r:.200} result in "
                        f"{mean:.4g} frames per second: remove the wrong field")
    return np.array(seconds, float), mean


def _checked_rate(frames: int, fps: Any) -> float:
    if not is_number(fps) or not 0 < fps < 1e6:
        raise DataError(f"a video of {frames} frames needs a frame rate: fps={fps!r} must be a number above 0, or "
                        "frame_times must hold the time of each frame in seconds")
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
