"""Shared fixtures: tiny models of real architectures, saved once per test session."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlrl.types import Media, Sample

FAMILIES = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, Path]:
    """Folder of a random tiny model of each family, with its processor."""
    from vlrl import tiny

    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        tiny.build(family, root / family, seed=1)
    return {family: root / family for family in FAMILIES}


def noise(seed: int, width: int, height: int) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def noise_video(seed: int, frames: int = 4, width: int = 64, height: int = 64) -> Media:
    """A video of random frames, two a second."""
    return Media(kind="video", source=[noise(seed + i, width, height) for i in range(frames)], fps=2.0)


SAMPLES = {
    "image": Sample(id="image", media=(Media(source=noise(1, 112, 84)),), row={"q": "Where is the red circle?"}),
    "two images": Sample(id="two", media=(Media(source=noise(2, 84, 84)), Media(source=noise(3, 112, 56))),
                         row={"q": "Which of the two is brighter?"}),
    "text": Sample(id="text", row={"q": "What is 12 + 30? Think, then answer."}),
    "video": Sample(id="video", media=(noise_video(10),), row={"q": "What moves?"}),
}


def random_answers(seed: int, count: int, vocabulary: int, banned: set[int], longest: int = 12) -> list[np.ndarray]:
    """Ragged random token ids that an engine could have sampled."""
    rng = random.Random(seed)
    allowed = [i for i in range(vocabulary) if i not in banned]
    return [np.array(rng.choices(allowed, k=rng.randint(1, longest))) for _ in range(count)]
