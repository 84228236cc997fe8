"""Splits rows into train and held-out rows that share no group, no image and no similar image. Does not import torch.

Rows that must stay together are joined into groups by union-find over what they share: the value of `group_key`, a
media file, its content, or a near-duplicate image. Groups are then chosen at random for the held-out rows, so that each
category keeps its share as far as the groups allow. The result depends on rows and seed, not on the order of rows."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.checks.image_similarity import WINDOWS, ImageSignature
from vlrl.config.schema import LimitsSettings
from vlrl.data import write_rows
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.progress import Progress, no_progress
from vlrl.tools.datasets.check import printable
from vlrl.tools.datasets.convert import UsableRow, refuse_existing, relocated, sound_rows
from vlrl.tools.datasets.signatures import read_signatures

FILES = ("train.jsonl", "heldout.jsonl")
MOST_DISTANCE = 16
"""Largest allowed value of `distance`, the number of bits in which the 64-bit hashes of similar images may differ. The
hashes of unrelated images differ in about 32 bits."""
_TRIES = 8  # random orders that are tried; the one closest to the wanted shares is taken
_MOST_IN_ONE = 0.8  # share of rows in one group above which a split is meaningless


@dataclass(frozen=True)
class Split:
    """The train rows and the held-out rows, with statistics of the groups that were kept together."""

    train: tuple[UsableRow, ...]
    heldout: tuple[UsableRow, ...]
    wanted: int  # requested number of held-out rows
    groups: int
    largest: int
    near: tuple[tuple[str, ...], ...]  # groups of different image files that look alike
    unread: int  # missing media files; such files are compared only by their paths

    def shares(self) -> dict[str, tuple[int, int]]:
        """Category -> (number of train rows, number of held-out rows), the largest category first."""
        sides = [Counter(printable(str(r.row.get("category") or "(none)")) for r in side)
                 for side in (self.train, self.heldout)]
        return {name: (sides[0][name], sides[1][name]) for name, _ in (sides[0] + sides[1]).most_common()}


def split_file(path: Path, folder: Path, heldout: float = 0.1, by: str = "group_key", seed: int = 0, *,
               near_duplicates: bool = True, distance: int = 4, root: Path | None = None, format: str = "auto",
               columns: Mapping[str, str] | None = None, boxes: str = "auto", limits: LimitsSettings | None = None,
               force: bool = False, progress: Progress = no_progress) -> Split:
    """Splits the rows of a file as `split` does, and writes train.jsonl and heldout.jsonl to `folder`. Media paths
    become relative to `root` if given, else to `folder`. `columns` maps canonical fields to columns; `boxes` is as in
    data.boxes.

    Raises DataError at the first bad row, and if the files exist and `force` is not set. Raises the errors of `split`
    as well."""
    targets = [folder / name for name in FILES]
    if os.path.exists(folder) and not folder.is_dir():
        raise DataError(f"{folder} is a file. Give a folder for {' and '.join(FILES)}")
    refuse_existing(targets, force)
    if not (rows := sound_rows(path, format, root, columns, boxes)):
        raise DataError(f"{path} has no usable row")
    result = split(rows, heldout, by, seed, near_duplicates=near_duplicates, distance=distance, limits=limits,
                   progress=progress)
    both = [[relocated(row, root or path.parent, root or folder) for row in side]
            for side in (result.train, result.heldout)]
    for target, side in zip(targets, both, strict=True):
        write_rows(target, side)
    return result


def split(rows: Sequence[UsableRow], heldout: float = 0.1, by: str = "group_key", seed: int = 0, *,
          near_duplicates: bool = True, distance: int = 4, limits: LimitsSettings | None = None,
          progress: Progress = no_progress) -> Split:
    """Splits rows into train and held-out rows such that no group has rows in both.

    `heldout` is the share of held-out rows if it is below 1, otherwise their number. Rows belong to one group if they
    have the same value of the field `by` (in the row or its `meta`), show the same file, or show files of the same
    content. With `near_duplicates`, rows with images whose perceptual hashes differ in at most `distance` of 64 bits
    also belong to one group. A row that shares nothing with other rows is a group by itself.

    Raises ConfigError for values out of range. Raises DataError for missing or unreadable media (near duplicates only),
    and if one group holds nearly all rows."""
    wanted = _wanted(heldout, len(rows))
    if not 0 <= distance <= MOST_DISTANCE:
        raise ConfigError(f"--distance {distance} must be a number of bits from 0 to {MOST_DISTANCE}")
    joined = _Groups(len(rows))
    _join_by_field(joined, rows, by)
    media = {one.source: (row, one) for row in rows for one in row.media}
    windows = WINDOWS[:1] if near_duplicates else ()
    signatures = read_signatures([*media.values()], limits or LimitsSettings(), progress, windows)
    near = _join_media(joined, rows, dict(zip(media, signatures, strict=True)), distance)
    groups = joined.members()
    largest = max(groups, key=len)
    if len(largest) > _MOST_IN_ONE * len(rows):
        raise DataError(_too_large(largest, rows, by, near))
    chosen = _draw(groups, rows, wanted, seed)
    sides = [tuple(r for i, r in enumerate(rows) if (i in chosen) == in_heldout) for in_heldout in (False, True)]
    if not all(sides):
        raise DataError(f"about {wanted} of {len(rows)} rows cannot be held out without dividing a group: the largest "
                        f"of the {len(groups)} groups has {len(largest)} rows, the smallest {min(map(len, groups))}. "
                        "Choose another --heldout.")
    unread = sum(not signature.sha256 for signature in signatures)
    return Split(sides[0], sides[1], wanted, len(groups), len(largest), near, unread)


def _wanted(heldout: float, rows: int) -> int:
    if not (math.isfinite(heldout) and heldout > 0 and (heldout < 1 or heldout == int(heldout))):
        raise ConfigError(f"--heldout {heldout:g} must be a share such as 0.1 or a number of rows such as 200")
    wanted = max(1, round(heldout * rows)) if heldout < 1 else int(heldout)
    if wanted >= rows:
        raise ConfigError(f"--heldout {heldout:g} of {rows} rows leaves no rows to train on")
    return wanted


# --- what belongs together --------------------------------------------------------------------------------------------


class _Groups:
    """Union-find over row indices."""

    def __init__(self, count: int):
        self._parent = list(range(count))
        self._first: dict[Hashable, int] = {}

    def root(self, i: int) -> int:
        while self._parent[i] != i:
            self._parent[i] = i = self._parent[self._parent[i]]
        return i

    def join(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        self._parent[max(a, b)] = min(a, b)

    def mark(self, i: int, key: Hashable) -> None:
        self.join(i, self._first.setdefault(key, i))

    def members(self) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for i in range(len(self._parent)):
            groups.setdefault(self.root(i), []).append(i)
        return list(groups.values())


def _join_by_field(groups: _Groups, rows: Sequence[UsableRow], by: str) -> None:
    values = [_field(row, by) for row in rows]
    if by != "group_key" and all(value is None for value in values):
        known = sorted({name for row in rows for name in row.row})
        raise ConfigError(f"--by {by}: no row has this field.{did_you_mean(by, known)} The rows have: "
                          f"{', '.join(known)}")
    for i, value in enumerate(values):
        if value is not None:
            groups.mark(i, ("field", json.dumps(value, sort_keys=True)))


def _field(row: UsableRow, by: str) -> Any:
    meta = row.row.get("meta")
    value = row.row.get(by)
    return meta.get(by) if value is None and isinstance(meta, dict) else value


def _join_media(groups: _Groups, rows: Sequence[UsableRow], signatures: Mapping[Path, ImageSignature], distance: int
                ) -> tuple[tuple[str, ...], ...]:
    """Joins the groups of rows that share media or whose images look alike. Returns the clusters of images that look
    alike but have different content, as tuples of their paths."""
    shown: dict[int, list[int]] = {}
    names: dict[int, dict[str, str]] = {}
    for i, row in enumerate(rows):
        for media in row.media:
            signature = signatures[media.source]
            groups.mark(i, media.source)
            if signature.sha256:
                groups.mark(i, signature.sha256)
            if signature.hashes is not None:
                look = int(signature.hashes[0])
                shown.setdefault(look, []).append(i)
                names.setdefault(look, {}).setdefault(signature.sha256, str(media.source))
    looks = sorted(shown)
    alike = _Groups(len(looks))
    for a, b in near_pairs(np.array(looks, np.uint64), distance):
        alike.join(int(a), int(b))
    clusters = []
    for members in alike.members():
        for i in (same := [i for m in members for i in shown[looks[m]]]):
            groups.join(same[0], i)
        contents = [name for m in members for name in names[looks[m]].values()]
        if len(contents) > 1:
            clusters.append(tuple(sorted(contents)))
    return tuple(sorted(clusters))


def near_pairs(hashes: np.ndarray, distance: int) -> Iterable[tuple[int, int]]:
    """Pairs of indices in `hashes` [N] uint64 whose hashes differ in at most `distance` bits; a pair may occur twice.

    Two such hashes are equal in at least one of `distance + 1` bands of bits. So the hashes are sorted by each band,
    and a hash is only compared with those after it that are equal in this band."""
    for band in np.array_split(np.arange(64, dtype=np.uint64), distance + 1):
        mask = np.bitwise_or.reduce(np.left_shift(np.uint64(1), band))
        order = np.argsort(hashes & mask, kind="stable")
        ordered, keys = hashes[order], (hashes & mask)[order]
        left, step = np.arange(len(order)), 0
        while left.size:
            step += 1
            left = left[left + step < len(order)]
            left = left[keys[left] == keys[left + step]]
            close = left[np.bitwise_count(ordered[left] ^ ordered[left + step]) <= distance]
            yield from zip(order[close].tolist(), order[close + step].tolist(), strict=True)


def _too_large(group: Sequence[int], rows: Sequence[UsableRow], by: str, near: Sequence[Sequence[str]]) -> str:
    own = [rows[i] for i in group]
    values = Counter(json.dumps(v) for row in own if (v := _field(row, by)) is not None).most_common(1)
    files = Counter(str(media.source) for row in own for media in row.media).most_common(1)
    reasons = [f"{by}={value} is in {n} of them" for value, n in values]
    reasons += [f"{name} is shown by {n}" for name, n in files if n > 1]
    reasons += [f"{len(cluster)} images look alike (use a smaller --distance, or --no-near-duplicates)"
                for cluster in sorted(near, key=len)[-1:]]
    return (f"one group holds {len(group)} of {len(rows)} rows, so a split by groups is meaningless: "
            f"{'; '.join(reasons)}. Remove what these rows have in common, or choose another field with --by.")


# --- which groups are held out ----------------------------------------------------------------------------------------


def _draw(groups: Sequence[Sequence[int]], rows: Sequence[UsableRow], wanted: int, seed: int) -> set[int]:
    """Chooses the groups whose rows are held out. Returns the indices of these rows: about `wanted` rows, among which
    each category has its share.

    A group is chosen if its rows bring the counts per category, and the total, closer to their goals."""
    category = [str(row.row.get("category") or "") for row in rows]
    goal = {**_goal(Counter(category), wanted, seed), None: wanted}
    counts = [(min(rows[i].id for i in group), group, Counter([*(category[i] for i in group), *[None] * len(group)]))
              for group in groups]
    best: tuple[int, set[int]] | None = None
    for attempt in range(_TRIES):
        missing, picked = Counter(goal), set()
        for _, group, own in sorted(counts, key=lambda entry: _order(f"{seed}/{attempt}/{entry[0]}")):
            if sum(abs(missing[c] - n) - abs(missing[c]) for c, n in own.items()) < 0:
                picked.update(group)
                missing.subtract(own)
        off = sum(map(abs, missing.values()))
        if picked and (best is None or off < best[0]):
            best = off, picked
        if off == 0:
            break
    if best is None:  # every group has more than twice the wanted rows: the smallest is the nearest
        return set(min(counts, key=lambda entry: (len(entry[1]), _order(f"{seed}/{entry[0]}")))[1])
    return best[1]


def _goal(categories: Counter[str], wanted: int, seed: int) -> dict[str, int]:
    """Category -> number of held-out rows. The numbers are proportional to the categories' sizes and add up to
    `wanted`; they are rounded by largest remainders, with ties broken by the seed."""
    total = categories.total()
    exact = {name: wanted * n / total for name, n in categories.items()}
    goal = {name: int(share) for name, share in exact.items()}
    rest = sorted(exact, key=lambda name: (goal[name] - exact[name], _order(f"{seed}/{name}")))
    for name in rest[:wanted - sum(goal.values())]:
        goal[name] += 1
    return goal


def _order(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
