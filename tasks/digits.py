"""Digits: the 1,797 real handwritten digits of scikit-learn (UCI, 8x8 pixels), offline.

One fixed split, independent of all seeds, has 1,400 digits for training and 397 held-out digits. The model that is
embedded in vlrl was not trained on the held-out digits either."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vlrl.data import Drawn
from vlrl.errors import ConfigError
from vlrl.types import Media, Sample

from .classification import Classification

SIZE = 64
TRAIN = 1400
_SPLIT_SEED = 20250101
_LABELS = [str(d) for d in range(10)]


class Digits(Classification):
    """Name the digit in the image. Recipes, reward parts and thinking are those of Classification."""

    question: str = "Which digit is this?"
    direct: str = "Which digit is this? Answer with the digit only."
    reasoned: str = "Which digit is this? Think in <think> </think>, then answer in <answer> </answer>."

    def samples(self, split: str) -> Sequence[Sample]:
        train, heldout = split_indices()
        if split not in ("train", "heldout"):
            raise ConfigError(f"task 'digits' has no split {split!r}. The splits of the task are train and heldout")
        places = train if split == "train" else heldout
        arrays, labels = digit_arrays()
        drawn = Drawn(len(places), lambda i: self._sample(places[i], arrays[places[i]], int(labels[places[i]])))
        return self.chosen(split, [(_id(place), (str(labels[place]),)) for place in places], _LABELS, drawn)

    def _sample(self, place: int, array: np.ndarray, label: int) -> Sample:
        row = {"id": _id(place), "width": SIZE, "height": SIZE, "label": str(label), "labels": _LABELS,
               "category": str(label)}
        return Sample(id=row["id"], media=(Media(source=digit_image(array)),), row=self.filled(row))


def digit_image(array: np.ndarray) -> Image.Image:
    """Converts an [8, 8] array with values 0..16 to an RGB image of 64x64 pixels, white on black."""
    grey = np.rint(np.asarray(array, dtype=np.float64) * (255 / 16)).astype(np.uint8)
    return Image.fromarray(grey).resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB")


@functools.cache
def split_indices() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices in the data set of the 1,400 training digits and of the 397 held-out digits; always the same."""
    order = np.random.RandomState(_SPLIT_SEED).permutation(1797).tolist()  # RandomState's stream is frozen by numpy
    return tuple(order[:TRAIN]), tuple(order[TRAIN:])


@functools.cache
def digit_arrays() -> tuple[np.ndarray, np.ndarray]:
    """Returns [1797, 8, 8] float pixels 0..16 and [1797] int labels. Raises ConfigError if scikit-learn is not
    installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("task.name=digits takes its images from scikit-learn, which is not installed: "
                          "pip install scikit-learn") from None
    data: Any = load_digits()
    return data.images, data.target


def _id(place: int) -> str:
    return f"digit-{place:04d}"
