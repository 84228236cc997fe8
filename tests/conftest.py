"""Shared fixtures: tiny models of real architectures, saved once per test session."""

import atexit
import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

from tests import once
from vlrl.models import families
from vlrl.tools.tiny import families as tiny_families
from vlrl.types import Media, Sample

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long a test takes depends on what runs beside it

FAMILIES = tuple(tiny_families.FAMILIES)
TWO = ("qwen3_vl", "qwen2_5_vl")
"""Families for tests of what does not differ between families, or of what both of these have."""
FAST = {*TWO, "smolvlm"}
"""Families whose cases are in the fast suite; those of the others are `slow`."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and thousands of tests stay: to look through them for garbage takes two fifths of collecting them.

    Later it is looked for once in 20,000 new objects in place of 700, which takes a fifteenth off the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_sessionfinish() -> None:
    """Leaves the search for garbage to the end of the process, which makes one anyway."""
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        case = getattr(item, "callspec", None)
        params = case.params.values() if case else ()
        if any(isinstance(p, str) and p in FAMILIES and p not in FAST for p in params):
            item.add_marker(pytest.mark.slow)
    yield  # -m leaves some out
    items.sort(key=lambda item: not item.get_closest_marker("long"))  # none of them, nor its file, is left at the end


def pytest_collection_finish() -> None:
    once.install()


class TinyModels(dict):
    """Folder of a random tiny model by family, with its processor; made when first asked for."""

    def __init__(self, root: Path):
        super().__init__()
        self.root = root

    def __missing__(self, family: str) -> Path:
        from vlrl.tools.tiny import models as tiny

        tiny.build(family, self.root / family, seed=1)
        self[family] = self.root / family
        return self[family]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


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


def kinds_of(family: families.Family | str, kinds: tuple[str, ...] = tuple(SAMPLES)) -> tuple[str, ...]:
    """Those kinds of samples that models of a family (or the family of this name) take."""
    family = families.FAMILIES[family] if isinstance(family, str) else family
    return tuple(kind for kind in kinds if kind != "video" or family.videos)


def random_answers(seed: int, count: int, vocabulary: int, banned: set[int], longest: int = 12) -> list[np.ndarray]:
    """Ragged random token ids that an engine could have sampled."""
    rng = random.Random(seed)
    allowed = [i for i in range(vocabulary) if i not in banned]
    return [np.array(rng.choices(allowed, k=rng.randint(1, longest))) for _ in range(count)]
