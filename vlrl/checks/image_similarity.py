"""Pictures that look the same: resized, recompressed or cropped ones of each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import map_coordinates

from vlrl.progress import Progress, no_progress

_SIDE = 96  # of the grey thumbnail that is kept of a picture
_GRID = 32  # points a side at which two pictures are compared
_FLAT = 2.0  # standard deviation of grey values below which a picture has no structure to compare
_NEAR = 14  # bits of 64 in which hashes may differ for two pictures to be looked at
_ALIKE = 0.95  # least correlation of grey values of pictures that count as the same
Window = tuple[float, float, float, float]
"""Part of a picture: left, top, width and height as shares."""


class NearDuplicate(NamedTuple):
    """One held-out row that a row of train gives away; the surest reason, and the most alike row."""

    heldout: str
    """Its id, as `train`."""
    train: str
    kind: str
    likeness: float
    """In [0, 1]: correlation of grey values, share of n-grams, or cosine of words or of embedded texts."""


@dataclass(frozen=True, eq=False)
class ImageSignature:
    """One image or video of a row."""

    id: str
    sha256: str
    grey: np.ndarray | None = None
    """[_SIDE, _SIDE] of an image, whatever its shape; None for a video."""
    hashes: np.ndarray | None = None
    """[windows] uint64 perceptual hashes of the parts WINDOWS, the whole first; None without any structure."""


def _windows() -> list[Window]:
    """(left, top, width, height) as shares: the whole, and what a crop might have left of it."""
    windows = [(0.0, 0.0, 1.0, 1.0)]
    for width, height in itertools.product((0.9, 0.75, 0.6), repeat=2):
        steps = [np.linspace(0, 1 - size, round((1 - size) / 0.12) + 2) for size in (width, height)]
        windows += [(float(x), float(y), width, height) for x in steps[0] for y in steps[1]]
    return windows


WINDOWS = _windows()
_COSINES = np.cos(np.pi * np.arange(8)[:, None] * (np.arange(_GRID) + 0.5) / _GRID).astype(np.float32)


def image_signature(id: str, sha256: str, image: Image.Image, windows: Sequence[Window] = WINDOWS) -> ImageSignature:
    """Returns what is kept of an image to compare it; with the first of WINDOWS alone, as a whole."""
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), np.float32)
    return ImageSignature(id, sha256, grey, None if grey.std() < _FLAT else _hashes(_sampled(grey, np.array(windows))))


def _hashes(values: np.ndarray) -> np.ndarray:
    """Returns [windows] uint64 of grey values [windows, points]: which of the 64 lowest frequencies of the cosine
    transform are above their median, as imagehash.phash.
    """
    low = _COSINES @ values.reshape(-1, _GRID, _GRID) @ _COSINES.T
    bits = low.reshape(len(low), 64) > np.median(low.reshape(len(low), 64), axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def similar_images(train: Sequence[ImageSignature], heldout: Sequence[ImageSignature],
                   progress: Progress = no_progress) -> list[NearDuplicate]:
    """Returns the held-out pictures that are in train: the same bytes; grey values that correlate by at least 0.95 as a
    whole (`look`), or of a part of either with the whole of the other (`crop`).

    Only pairs are correlated of which some hash differs in at most 14 of 64 bits.
    """
    same = {one.sha256: one.id for one in reversed(train)}
    hashed = [one for one in train if one.hashes is not None]
    own_hashes = [one.hashes for one in hashed if one.hashes is not None]
    known = np.stack(own_hashes) if own_hashes else np.zeros((0, 1), np.uint64)
    matches: dict[str, NearDuplicate] = {}
    for done, own in enumerate(heldout):
        if done % 20 == 0:
            progress("comparing pictures", done, len(heldout))
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
    inside = np.bitwise_count(known ^ own.hashes[0])  # parts of train against the whole, and the other way round
    outside = np.stack([np.bitwise_count(known[:, 0] ^ part) for part in own.hashes], axis=1)
    for distance, turned in ((inside, False), (outside, True)):
        for place in np.flatnonzero(distance.min(axis=1) <= _NEAR).tolist():
            other = train[place]
            assert other.grey is not None
            window = WINDOWS[int(distance[place].argmin())]
            part, whole = (own.grey, other.grey) if turned else (other.grey, own.grey)
            likeness, window = _correlation(part, whole, window)
            if likeness >= _ALIKE:
                kind = "look" if min(window[2:]) >= 0.97 else "crop"
                yield NearDuplicate(own.id, other.id, kind, min(likeness, 1.0))


def _correlation(part: np.ndarray, whole: np.ndarray, window: Window
                 ) -> tuple[float, Window]:
    """Returns the largest correlation of `whole` with a window of `part` near to the one given, and that window."""
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
    """Returns [windows, points] grey values on an even grid inside each window [windows, 4]."""
    at = (np.arange(_GRID) + 0.5) / _GRID
    x = (windows[:, :1] + windows[:, 2:3] * at) * _SIDE - 0.5
    y = (windows[:, 1:2] + windows[:, 3:4] * at) * _SIDE - 0.5
    rows, columns = (np.broadcast_to(v, (len(windows), _GRID, _GRID)) for v in (y[:, :, None], x[:, None, :]))
    return map_coordinates(grey, [rows, columns], order=1, mode="nearest").reshape(len(windows), -1)


def _centred(values: np.ndarray) -> np.ndarray:
    values = values - values.mean(axis=1, keepdims=True)
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-6)
