"""Video sampling: selects the frames to decode and computes the timestamps that the model sees.

All times are seconds from the start of the clip, which is `start` if given, else the first frame."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlrl.data.media import VideoSampling
from vlrl.data.video.decoders import HiddenFrames, VideoTrack, read_frames, read_track, recount_frames
from vlrl.errors import DataError
from vlrl.types import LoadedMedia

TICKS = 1_000_000
"""Frames per second of the virtual clock in `clock`: a frame's number is its time in microseconds."""


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

    `times` holds the seconds of each frame from the first frame. The number of selected frames is the clip's duration
    times `sampling.fps`, at least `min_frames`, at most `max_frames` and the number of available frames, rounded down
    to an even number. From a clip with a single frame, this frame is selected twice. For constant frame rates the
    selection equals that of qwen-vl-utils 0.0.14.

    Raises DataError if there is no frame between `start` and `end`."""
    whole = float(times[-1]) + 1 / fps
    low, high = max(0.0, start or 0.0), whole if end is None else min(end, whole)
    inside = np.flatnonzero((times >= low - 1e-3) & (times <= high + 1e-3)) if low < high else np.empty(0, int)
    if not inside.size:
        raise DataError(f"{name}: no frame between start={start} and end={end} seconds; it lasts {whole:.3f} s")
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
    """Decodes the frames of a file that `choose` selects, with decord if it is installed and reliable, else with PyAV.

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
