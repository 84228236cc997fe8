"""Decoding videos: which frames to take, and taking them with decord or PyAV.

Both decoders give the same picture: frames in the order of presentation, times in seconds from the first of them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from vlrl.errors import DataError


@dataclass(frozen=True)
class VideoSampling:
    """How densely a video is read: `model.video_fps` and `model.video_max_frames`."""

    fps: float = 2.0
    """Frames per second of video."""
    max_frames: int = 64
    """Most frames; an odd number is taken as the even one below."""


@dataclass(frozen=True)
class Clip:
    """The frames taken from a video."""

    frames: tuple[Image.Image, ...]
    indices: list[int]
    """Place of each frame in the whole video."""
    times: np.ndarray
    """[all frames of the video] seconds from its first frame."""
    fps: float
    backend: str


class VideoReader(Protocol):
    """An opened video."""

    fps: float
    """Mean frames per second."""
    size: tuple[int, int]
    """Width and height in pixels."""
    times: np.ndarray
    """[frames] seconds from the first frame, ascending."""

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        """The frames of these ascending indices, in RGB; an index may repeat."""
        ...


def choose(times: np.ndarray, fps: float, sampling: VideoSampling, start: float | None, end: float | None,
           name: str) -> list[int]:
    """Indices of the frames to take between `start` and `end` seconds: uniform in time, first and last included.

    Their number is the range's length times `sampling.fps`, rounded down to an even number, at least 2, at most
    `sampling.max_frames` and the frames there are. A single frame is taken twice. As in Qwen-VL's own sampling.

    Raises DataError when there is no frame in the range.
    """
    duration = float(times[-1]) + 1 / fps
    low, high = 0.0 if start is None else start, duration if end is None else end
    inside = np.flatnonzero((times >= low - 1e-3) & (times <= high + 1e-3)) if low < high else np.empty(0, int)
    if not inside.size:
        raise DataError(f"{name}: no frame between start={start} and end={end} seconds; it lasts {duration:.3f} s")
    wanted = (min(high, duration) - max(low, 0.0)) * sampling.fps
    count = int(min(wanted, sampling.max_frames, inside.size))
    count = max(2, count // 2 * 2)
    own = times[inside]
    targets = np.linspace(own[0], own[-1], count)
    right = np.searchsorted(own, targets).clip(1, max(1, inside.size - 1))
    nearest = right - (targets - own[right - 1] <= own[right] - targets) if inside.size > 1 else np.zeros(count, int)
    return [int(i) for i in inside[nearest]]


def decode(path: Path, sampling: VideoSampling, start: float | None, end: float | None,
           check: Callable[[tuple[int, int]], None]) -> Clip:
    """The frames of a file that `choose` picks: by decord where it is installed and can read the file, else by PyAV.

    `check` sees width and height before the frames are read and may refuse them. Raises DataError naming the file.
    """
    readers = [cls for module, cls in READERS.items() if importlib.util.find_spec(module)]
    if not readers:
        raise DataError(f"{path}: reading videos needs a decoder: pip install av")
    errors = []
    for cls in readers:
        try:
            reader: VideoReader = cls(path)
            check(reader.size)
            chosen = choose(reader.times, reader.fps, sampling, start, end, str(path))
            return Clip(tuple(reader.frames(chosen)), chosen, reader.times, reader.fps, cls.backend)
        except DataError:
            raise
        except Exception as error:  # decoders raise their own classes, imported only here
            errors.append(f"{cls.backend}: {' '.join(str(error).split())[:200]}")
    raise DataError(f"media file {path} cannot be read as a video ({'; '.join(errors)})")


class _Decord:
    backend = "decord"

    def __init__(self, path: Path):
        import decord

        self.reader: Any = decord.VideoReader(str(path), num_threads=1)
        if not len(self.reader):
            raise ValueError("no frames")
        self.times, self.fps = _clock(self.reader.get_frame_timestamp(range(len(self.reader)))[:, 0],
                                      float(self.reader.get_avg_fps()))
        height, width = self.reader[0].shape[:2]
        self.size = (width, height)

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        # get_batch: where rows are padded (48 pixels wide) single frames come out wrong without an error
        unique = sorted(set(indices))
        found = dict(zip(unique, self.reader.get_batch(unique).asnumpy(), strict=True))
        return [Image.fromarray(found[i]) for i in indices]


class _PyAV:
    backend = "pyav"

    def __init__(self, path: Path):
        import av

        self.path = path
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            base = float(stream.time_base or 1)
            pts = sorted(p.pts for p in container.demux(stream) if p.pts is not None and p.size)
            rate = float(stream.average_rate or 0)
        if not pts:
            raise ValueError("no frames")
        self.times, self.fps = _clock(np.array(pts) * base, rate)
        with av.open(str(path)) as container:
            first = next(container.decode(video=0))
        turned = first.rotation % 180 != 0
        self.size = (first.height, first.width) if turned else (first.width, first.height)

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        import av

        wanted, found = set(indices), {}
        with av.open(str(self.path)) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in wanted:
                    found[index] = frame.to_image().rotate(frame.rotation, expand=True)
                if len(found) == len(wanted):
                    break
        if missing := wanted - set(found):
            raise ValueError(f"it breaks off: of {len(self.times)} frames, {sorted(missing)[:4]} cannot be decoded")
        return [found[i] for i in indices]


READERS: dict[str, Callable[[Path], VideoReader]] = {"decord": _Decord, "av": _PyAV}
"""Module that must be installed -> reader, the preferred one first."""


def _clock(times: np.ndarray, fps: float) -> tuple[np.ndarray, float]:
    """Seconds from the first frame, and the mean rate; a rate the file does not tell is taken from its times."""
    times = np.round(np.asarray(times, dtype=np.float64) - float(times[0]), 6)
    if not (math.isfinite(fps) and fps > 0):
        fps = (len(times) - 1) / times[-1] if times[-1] > 0 else 1.0
    return times, fps
