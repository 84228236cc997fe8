"""Edits of decoded frames that make a shuffled, noisy or smaller variant of an image or video.

    load(replace(media, edits=(("shuffle", 17),)), limits)          # frames in another order, same timestamps
    load(replace(media, edits=(("noise", 500, 17),)), limits)       # diffusion noise of step 500
    load(replace(media, edits=(("shrink", 50_176),)), limits)       # at most this many pixels

An edit is a name in EDITS followed by its arguments. Edits are deterministic: the same edit of the same frames gives
the same pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from vlrl.errors import DataError, did_you_mean
from vlrl.types import LoadedMedia

Frames = tuple[Image.Image, ...]
NOISE_STEPS = 1000


def shuffle(frames: Frames, seed: int) -> Frames:
    """Returns the frames in a random order that visibly differs from the original order, unless all frames are equal.

    T-GRPO contrasts ordered with shuffled frames: Video-R1, arXiv 2503.21776."""
    looks = [frame.tobytes() for frame in frames]
    if len(set(looks)) < 2:
        return frames
    draw, order = np.random.default_rng(seed), list(range(len(frames)))
    while [looks[i] for i in order] == looks:
        order = draw.permutation(len(frames)).tolist()
    return tuple(frames[i] for i in order)


def noise(frames: Frames, t: int, seed: int) -> Frames:
    """Adds forward diffusion noise of step `t` (0 to 1000) to each frame; 0 changes nothing.

    Pixels x in [-1, 1] become x sqrt(abar_t) + sqrt(1 - abar_t) eps with standard normal eps. abar_t is the product of
    (1 - beta) over the first t of 1000 betas from 1e-4 to 0.02 (DDPM, arXiv 2006.11239). The result is clipped to the
    pixel range. For rollouts on noisy images see NoisyRollout, arXiv 2504.13055."""
    if not isinstance(t, (int, np.integer)) or not 0 <= t <= NOISE_STEPS:
        raise DataError(f"edit ('noise', {t!r}, ...): the diffusion step must be an integer from 0 to "
                        f"{NOISE_STEPS}")
    alpha_bar = float(np.prod(1 - np.linspace(1e-4, 0.02, NOISE_STEPS)[:t]))
    draw = np.random.default_rng(seed)

    def noisy(frame: Image.Image) -> Image.Image:
        pixels = np.asarray(frame.convert("RGB"), np.float32) / 127.5 - 1
        pixels = pixels * alpha_bar ** 0.5 + (1 - alpha_bar) ** 0.5 * draw.standard_normal(pixels.shape, np.float32)
        return Image.fromarray(((pixels + 1) * 127.5).round().clip(0, 255).astype(np.uint8))

    return tuple(map(noisy, frames)) if t else frames


def shrink(frames: Frames, pixels: int) -> Frames:
    """Scales each frame down to at most `pixels` pixels; the aspect ratio is preserved."""
    scale = min(1.0, *((pixels / (frame.width * frame.height)) ** 0.5 for frame in frames))
    return tuple(f.resize((max(1, int(f.width * scale)), max(1, int(f.height * scale)))) for f in frames)


def blank(frames: Frames) -> Frames:
    """Replaces each frame by a uniform image of the same size in the frame's mean colour."""
    def mean(frame: Image.Image) -> tuple[int, ...]:
        return tuple(np.asarray(frame.convert("RGB")).mean(axis=(0, 1)).round().astype(int).tolist())

    return tuple(Image.new("RGB", frame.size, mean(frame)) for frame in frames)


EDITS: dict[str, Callable[..., Frames]] = {"shuffle": shuffle, "noise": noise, "shrink": shrink, "blank": blank}
"""Edit functions by name. Each takes (frames, *arguments) and returns the same number of frames."""


def apply_edits(loaded: LoadedMedia, edits: Sequence[Sequence[Any]]) -> LoadedMedia:
    """Returns the media with edited frames and a new hash; timestamps and metadata are unchanged. Raises DataError for
    an unknown edit or wrong arguments."""
    if not edits:
        return loaded
    frames = loaded.frames
    for name, *arguments in edits:
        if name not in EDITS:
            raise DataError(f"edit {name!r} is not known.{did_you_mean(str(name), EDITS)} Known: {', '.join(EDITS)}")
        try:
            frames = EDITS[name](frames, *arguments)
        except (TypeError, ValueError) as error:
            raise DataError(f"edit {(name, *arguments)!r}: {error}") from None
    digest = hashlib.sha256(f"{loaded.sha256} {[list(edit) for edit in edits]!r}".encode()).hexdigest()
    return replace(loaded, frames=frames, sha256=digest, path=None, data=None)  # the file has the unedited pixels
