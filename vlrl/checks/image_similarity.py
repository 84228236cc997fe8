"""Finds near duplicates among images (resized, recompressed and cropped copies) by perceptual hashes and correlation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import map_coordinates

from vlrl.progress import Progress, no_progress

_SIDE = 96  # pixels on a side of the grey thumbnail of an image
_GRID = 32  # points on a side at which two images are compared
_FLAT = 2.0  # standard deviation of grey values below which an image has too little structure to compare
_NEAR = 14  # of 64 bits: largest Hamming distance of hashes for two images to be correlated
_ALIKE = 0.95  # least correlation of the grey values of duplicates
Window = tuple[float, float, float, float]  # part of an image: left, top, width and height as fractions of its size


class NearDuplicate(NamedTuple):
    """A held-out row and the most similar row of train. Of several kinds of match, `kind` is the most certain one."""

    heldout: str  # Id of the held-out row
    train: str  # Id of the row in train
    kind: str  # how the two rows match: same (bytes), look or crop (images), text, words or meaning (texts)
    likeness: float
    """Similarity in [0, 1]: correlation of grey values, fraction of common n-grams, or cosine of words or text
    embeddings."""


@dataclass(frozen=True, eq=False)
class ImageSignature:
    """The features by which an image or video of a row is compared with others."""

    id: str
    sha256: str
    grey: np.ndarray | None = None
    """[_SIDE, _SIDE] grey values of an image, resized regardless of its aspect ratio; None for a video."""
    hashes: np.ndarray | None = None
    """[windows] uint64 perceptual hashes, one per entry of WINDOWS; None for an image without structure."""


def _windows() -> list[Window]:
    windows = [(0.0, 0.0, 1.0, 1.0)]
    for width, height in itertools.product((0.9, 0.75, 0.6), repeat=2):
        steps = [np.linspace(0, 1 - size, round((1 - size) / 0.12) + 2) for size in (width, height)]
        windows += [(float(x), float(y), width, height) for x in steps[0] for y in steps[1]]
    return windows


WINDOWS = _windows()
_COSINES = np.cos(np.pi * np.arange(8)[:, None] * (np.arange(_GRID) + 0.5) / _GRID).astype(np.float32)


def image_signature(id: str, sha256: str, image: Image.Image, windows: Sequence[Window] = WINDOWS) -> ImageSignature:
    """Returns the signature of an image, with one perceptual hash for each of `windows`. If `windows` has only the full
    image, crops are not recognised. `sha256` is the hash of the image file."""
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), np.float32)
    return ImageSignature(id, sha256, grey, None if grey.std() < _FLAT else _hashes(_sampled(grey, np.array(windows))))


def _hashes(values: np.ndarray) -> np.ndarray:
    """Returns perceptual hashes [windows] uint64 of grey values [windows, points].

    The bits stand for the 64 lowest frequencies of the cosine transform. A bit is 1 if its coefficient is above the
    median of the 64 coefficients, as in imagehash.phash."""
    low = _COSINES @ values.reshape(-1, _GRID, _GRID) @ _COSINES.T
    bits = low.reshape(len(low), 64) > np.median(low.reshape(len(low), 64), axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def similar_images(train: Sequence[ImageSignature], heldout: Sequence[ImageSignature],
                   progress: Progress = no_progress) -> list[NearDuplicate]:
    """Returns the held-out images that also occur in train, with at most one match for each.

    `kind` of a match: `same` = equal bytes; `look` = a correlation of at least 0.95 between the full images; `crop` =
    such a correlation between a part of one image and the full other image. Only pairs whose hashes differ in at most
    14 of 64 bits are correlated."""
    same = {one.sha256: one.id for one in reversed(train)}
    hashed = [one for one in train if one.hashes is not None]
    own_hashes = [one.hashes for one in hashed if one.hashes is not None]
    known = np.stack(own_hashes) if own_hashes else np.zeros((0, 1), np.uint64)
    matches: dict[str, NearDuplicate] = {}
    for done, own in enumerate(heldout):
        if done % 20 == 0:
            progress("comparing images", done, len(heldout))
        if own.sha256 in same:
            best = NearDuplicate(own.id, same[own.sha256], "same", 1.0)
        else:
            best = max(_alike(own, hashed, known), key=lambda s: s.likeness, default=None)
        if best and (own.id not in matches or matches[own.id].likeness < best.likeness):
            matches[own.id] = best
    return list(matches.values())


def _alike(own: ImageSignature, train: Sequence[ImageSignature], known: np.ndarray) -> Iterator[NearDuplicate]:
    if own.hashes is None or own.grey is None or not len(train):
        return
    inside = np.bitwise_count(known ^ own.hashes[0])  # parts of images of train against the whole held-out one
    outside = np.stack([np.bitwise_count(known[:, 0] ^ part) for part in own.hashes], axis=1)
    for distance, turned in ((inside, False), (outside, True)):
        for n in np.flatnonzero(distance.min(axis=1) <= _NEAR).tolist():
            other = train[n]
            assert other.grey is not None
            window = WINDOWS[int(distance[n].argmin())]
            part, whole = (own.grey, other.grey) if turned else (other.grey, own.grey)
            likeness, window = _correlation(part, whole, window)
            if likeness >= _ALIKE:
                kind = "look" if min(window[2:]) >= 0.97 else "crop"
                yield NearDuplicate(own.id, other.id, kind, min(likeness, 1.0))


def _correlation(part: np.ndarray, whole: np.ndarray, window: Window) -> tuple[float, Window]:
    """Returns the largest correlation of the image `whole` with a window of the image `part`, and that window. Only
    windows near `window` are tried."""
    wanted = _centred(_sampled(whole, np.array([[0.0, 0.0, 1.0, 1.0]])))[0]
    best, at = -1.0, np.array(window)
    for step in (0.06, 0.03, 0.015, 0.0075):
        moves = at + step * np.array(list(itertools.product((-1, 0, 1), repeat=4)))
        moves[:, 2:] = np.clip(moves[:, 2:], 0.3, 1.0)
        moves[:, :2] = np.clip(moves[:, :2], 0.0, 1.0 - moves[:, 2:])
        values = _centred(_sampled(part, moves)) @ wanted
        if values.max() > best:
            best, at = float(values.max()), moves[int(values.argmax())]
    x, y, w, h = at.tolist()
    return best, (x, y, w, h)


def _sampled(grey: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """[windows, points] grey values on a regular grid inside each window [windows, 4]."""
    at = (np.arange(_GRID) + 0.5) / _GRID
    x = (windows[:, :1] + windows[:, 2:3] * at) * _SIDE - 0.5
    y = (windows[:, 1:2] + windows[:, 3:4] * at) * _SIDE - 0.5
    rows, columns = (np.broadcast_to(v, (len(windows), _GRID, _GRID)) for v in (y[:, :, None], x[:, None, :]))
    return map_coordinates(grey, [rows, columns], order=1, mode="nearest").reshape(len(windows), -1)


def _centred(values: np.ndarray) -> np.ndarray:
    values = values - values.mean(axis=1, keepdims=True)
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-6)
