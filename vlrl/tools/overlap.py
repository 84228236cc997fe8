"""What held-out rows share with those of train: pictures, resized, recompressed or cropped, and texts. No torch
unless an embedder is named.

    report = overlap(Path("train.jsonl"), Path("heldout.jsonl"))
    report.shared[0]      # Shared(heldout="7", train="12", kind="crop", likeness=0.97)
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import map_coordinates
from scipy.sparse import csr_array

from vlrl.config.schema import LimitsSettings
from vlrl.data.media import load
from vlrl.errors import DataError
from vlrl.store.files import file_sha256
from vlrl.tools.dataconvert import UsableRow, usable_rows
from vlrl.types import Media

KINDS = ("same", "look", "crop", "text", "words", "meaning")
"""One file; a picture that looks the same; one that is part of the other; the same text, or half of its 13-grams in one
row; nearly the same words; near each other in an embedder."""
N = 13
"""Words of an n-gram, as in evaluations of large language models (2005.14165, appendix C)."""
_TEXTS = ("question", "instruction", "expression", "caption", "text", "problem", "options")
_SIDE = 96  # of the grey thumbnail that is kept of a picture
_GRID = 32  # points a side at which two pictures are compared
_FLAT = 2.0  # standard deviation of grey values below which a picture has no structure to compare
_NEAR = 14  # bits of 64 in which hashes may differ for two pictures to be looked at
_ALIKE = 0.95  # least correlation of grey values of pictures that count as the same
_WORDS = 0.8  # least cosine of word vectors of texts that count as the same
_FEW = 8  # words below which texts are only compared whole
ALIKE = 0.9
"""Least cosine of embedded texts that count as the same."""
_COMMON = 0.01  # share of train rows in which an n-gram belongs to a template
Tell = Callable[[str, int, int], None]


class Shared(NamedTuple):
    """One held-out row that a row of train gives away; the surest reason, and the most alike row."""

    heldout: str
    """Its id, as `train`."""
    train: str
    kind: str
    likeness: float
    """In [0, 1]: correlation of grey values, share of n-grams, or cosine of words or of embedded texts."""


@dataclass(frozen=True)
class Overlap:
    """What two files share."""

    train: int
    heldout: int
    """Rows."""
    shared: tuple[Shared, ...]
    """At most one of KINDS of pictures and one of texts for a held-out row, in its order."""

    @property
    def share(self) -> float:
        """Returns the share of held-out rows that are given away."""
        return len({one.heldout for one in self.shared}) / self.heldout if self.heldout else 0.0


def overlap(train: Path, heldout: Path, *, root: Path | None = None, format: str = "auto",
            columns: Mapping[str, str] | None = None, limits: LimitsSettings | None = None,
            tell: Tell | None = None, embedder: Path | None = None, alike: float = ALIKE) -> Overlap:
    """Compares the rows of two files: pictures by their looks, videos by their bytes, texts by their words, and with
    `embedder`, the folder of a text model, those that are left by a cosine of at least `alike`.

    Rows with media are given away by them; texts count for rows without media, and where they are long, as a picture
    is asked the same questions as others. Raises DataError for a bad row and for media that cannot be read.
    """
    sides = []
    for path in (train, heldout):
        rows, bad = usable_rows(path, format, root, columns=columns)
        if bad:
            raise DataError(f"{bad[0].where}: {bad[0].reason} (vlrl data check lists every bad row)")
        sides.append(rows)
    tell = tell or (lambda what, done, total: None)
    known, own = (_pictures(rows, limits or LimitsSettings(), tell) for rows in sides)
    pictures = of_pictures(known, own, tell)
    said = [[(row.id, _text(row), bool(row.media)) for row in rows] for rows in sides]
    texts = of_texts(*said)
    if embedder:
        given_away = {one.heldout for one in texts}
        texts += of_meanings(said[0], [one for one in said[1] if one[0] not in given_away], embedder, alike)
    order = {row.id: i for i, row in enumerate(sides[1])}
    return Overlap(len(sides[0]), len(sides[1]), tuple(sorted([*pictures, *texts], key=lambda s: order[s.heldout])))


# --- pictures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Picture:
    """One image or video of a row."""

    id: str
    sha256: str
    grey: np.ndarray | None = None
    """[_SIDE, _SIDE] of an image, whatever its shape; None for a video."""
    hashes: np.ndarray | None = None
    """[windows] uint64 perceptual hashes of the parts WINDOWS, the whole first; None without any structure."""


def _windows() -> list[tuple[float, float, float, float]]:
    """(left, top, width, height) as shares: the whole, and what a crop might have left of it."""
    windows = [(0.0, 0.0, 1.0, 1.0)]
    for width, height in itertools.product((0.9, 0.75, 0.6), repeat=2):
        steps = [np.linspace(0, 1 - size, round((1 - size) / 0.12) + 2) for size in (width, height)]
        windows += [(float(x), float(y), width, height) for x in steps[0] for y in steps[1]]
    return windows


WINDOWS = _windows()
_COSINES = np.cos(np.pi * np.arange(8)[:, None] * (np.arange(_GRID) + 0.5) / _GRID).astype(np.float32)


def picture(id: str, sha256: str, image: Image.Image) -> Picture:
    """Returns what is kept of an image to compare it."""
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), np.float32)
    return Picture(id, sha256, grey, None if grey.std() < _FLAT else _hashes(_sampled(grey, np.array(WINDOWS))))


def _hashes(values: np.ndarray) -> np.ndarray:
    """Returns [windows] uint64 of grey values [windows, points]: which of the 64 lowest frequencies of the cosine
    transform are above their median, as imagehash.phash.
    """
    low = _COSINES @ values.reshape(-1, _GRID, _GRID) @ _COSINES.T
    bits = low.reshape(len(low), 64) > np.median(low.reshape(len(low), 64), axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def of_pictures(train: Sequence[Picture], heldout: Sequence[Picture], tell: Tell | None = None) -> list[Shared]:
    """Returns the held-out pictures that are in train: the same bytes; grey values that correlate by at least 0.95 as a
    whole (`look`), or of a part of either with the whole of the other (`crop`).

    Only pairs are correlated of which some hash differs in at most 14 of 64 bits.
    """
    same = {one.sha256: one.id for one in reversed(train)}
    hashed = [one for one in train if one.hashes is not None]
    own_hashes = [one.hashes for one in hashed if one.hashes is not None]
    known = np.stack(own_hashes) if own_hashes else np.zeros((0, 1), np.uint64)
    matches: dict[str, Shared] = {}
    for done, own in enumerate(heldout):
        if tell and done % 20 == 0:
            tell("comparing pictures", done, len(heldout))
        if own.sha256 in same:
            best = Shared(own.id, same[own.sha256], "same", 1.0)
        else:
            best = max(_alike(own, hashed, known), key=lambda s: s.likeness, default=None)
        if best and (own.id not in matches or matches[own.id].likeness < best.likeness):
            matches[own.id] = best
    return list(matches.values())


def _alike(own: Picture, train: Sequence[Picture], known: np.ndarray) -> Iterator[Shared]:
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
                yield Shared(own.id, other.id, kind, min(likeness, 1.0))


def _correlation(part: np.ndarray, whole: np.ndarray, window: tuple[float, float, float, float]
                 ) -> tuple[float, tuple[float, float, float, float]]:
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


def _pictures(rows: Sequence[UsableRow], limits: LimitsSettings, tell: Tell) -> list[Picture]:
    media = [(row, one) for row in rows for one in row.media]
    pictures = []
    pool = ThreadPoolExecutor(4)
    try:
        for one in pool.map(lambda pair: _picture(pair[0], pair[1], limits), media):
            pictures.append(one)
            tell("reading media", len(pictures), len(media))
    finally:
        pool.shutdown(cancel_futures=True)
    return pictures


def _picture(row: UsableRow, media: Media, limits: LimitsSettings) -> Picture:
    try:
        if media.kind == "image":
            loaded = load(media, limits)
            return picture(row.id, loaded.sha256, loaded.frames[0])
        return Picture(row.id, file_sha256(media.source))
    except (DataError, OSError) as error:
        raise DataError(f"{row.where}: row '{row.id}': {error}") from None


# --- texts ------------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Returns the words of a text, without case, accents, punctuation and forms of the same letter."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))


def of_texts(train: Sequence[tuple[str, str, bool]], heldout: Sequence[tuple[str, str, bool]]) -> list[Shared]:
    """Returns the held-out texts that are in train, each (id, text, whether a picture belongs to it).

    `text`: the same words, or at least half of its 13-grams in one text of train, those of a template (in more than
    1 % of train, 3 texts at least) left out. `words`: a cosine of at least 0.8 of word counts weighted by rarity, so
    words in another order, or a few others. Texts with a picture, or below 8 words, count only by n-grams.
    """
    known = [(id, words(text), shown) for id, text, shown in train]
    whole = {tuple(own): id for id, own, shown in reversed(known) if not shown and own}
    grams, common = _grams(known)
    cosines = _Cosines([(id, own) for id, own, shown in known if not shown and len(own) >= _FEW])
    matches = []
    for id, text, shown in heldout:
        own = words(text)
        if not shown and tuple(own) in whole:
            matches.append(Shared(id, whole[tuple(own)], "text", 1.0))
        elif (best := _of_grams(own, grams, common)) and best[1] >= 0.5:
            matches.append(Shared(id, best[0], "text", best[1]))
        elif not shown and len(own) >= _FEW and (near := cosines.best(own)) and near[1] >= _WORDS:
            matches.append(Shared(id, near[0], "words", near[1]))
    return matches


def of_meanings(train: Sequence[tuple[str, str, bool]], heldout: Sequence[tuple[str, str, bool]], embedder: Path,
                alike: float = ALIKE) -> list[Shared]:
    """Returns the held-out texts of 8 words and more without a picture whose vector has a cosine of at least `alike`
    with that of such a text of train, as `meaning`; each with the nearest.
    """
    from vlrl.tools.embedder import embedded  # torch, for this alone

    known, own = ([one for one in side if not one[2] and len(words(one[1])) >= _FEW] for side in (train, heldout))
    if not known or not own:
        return []
    table, matches = embedded(embedder, [text for _, text, _ in known]), []
    for (id, _, _), vector in zip(own, embedded(embedder, [text for _, text, _ in own]), strict=True):
        cosines = table @ vector
        if (nearest := float(cosines.max())) >= alike:
            matches.append(Shared(id, known[int(cosines.argmax())][0], "meaning", min(nearest, 1.0)))
    return matches


def _ngrams(own: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(own[i:i + N]) for i in range(len(own) - N + 1)}


def _grams(known: Sequence[tuple[str, list[str], bool]]) -> tuple[dict[tuple[str, ...], list[str]], set]:
    """Returns n-gram -> ids of train, and the n-grams of a template."""
    ids_of: dict[tuple[str, ...], list[str]] = {}
    for id, own, _ in known:
        for gram in _ngrams(own):
            ids_of.setdefault(gram, []).append(id)
    most = max(3, _COMMON * len(known))
    return ids_of, {gram for gram, ids in ids_of.items() if len(ids) > most}


def _of_grams(own: Sequence[str], grams: Mapping[tuple[str, ...], Sequence[str]], common: set
              ) -> tuple[str, float] | None:
    """Returns the text of train with the most n-grams of a text, and their share."""
    telling = _ngrams(own) - common
    counts = Counter(id for gram in telling for id in grams.get(gram, ()))
    if not counts:
        return None
    id, n = counts.most_common(1)[0]
    return id, n / len(telling)


class _Cosines:
    """Texts of train as unit vectors of words, each weighted by log(texts / texts with it) + 1."""

    def __init__(self, texts: Sequence[tuple[str, list[str]]]):
        self.ids = [id for id, _ in texts]
        having = Counter(word for _, own in texts for word in set(own))
        self.rarity = {word: math.log(len(texts) / n) + 1 for word, n in having.items()}
        self.unknown = math.log(len(texts) or 1) + 1
        self.place = {word: i for i, word in enumerate(having)}
        entries = [(row, self.place[word], value) for row, (_, own) in enumerate(texts)
                   for word, value in self._unit(own).items()]
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        self.table: Any = csr_array((values, (rows, columns)), shape=(len(texts), max(1, len(having))))

    def best(self, own: Sequence[str]) -> tuple[str, float] | None:
        if not self.ids:
            return None
        vector = np.zeros(max(1, len(self.place)))
        for word, value in self._unit(own).items():
            if word in self.place:
                vector[self.place[word]] = value
        cosines = self.table @ vector
        return self.ids[int(cosines.argmax())], float(min(cosines.max(), 1.0))

    def _unit(self, own: Sequence[str]) -> dict[str, float]:
        raw = {word: n * self.rarity.get(word, self.unknown) for word, n in Counter(own).items()}
        length = math.sqrt(sum(v * v for v in raw.values()))
        return {word: value / length for word, value in raw.items()}


def text_of(row: Mapping[str, Any]) -> str:
    """Returns all that a row asks, in the words of its fields."""
    parts = [row.get(name) for name in _TEXTS]
    return " ".join(" ".join(map(str, part)) if isinstance(part, list) else str(part) for part in parts if part)


def _text(row: UsableRow) -> str:
    return text_of(row.row)
