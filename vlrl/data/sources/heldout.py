"""Holds a share of the training rows out for evaluation, if `data.heldout` is not set (data.heldout_share)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.row_fields import ground_truth
from vlrl.data.row_media import sources_of
from vlrl.data.row_samples import MEDIA_FIELDS
from vlrl.data.samples import Samples, SampleSequence, fingerprint_rows, readable, where
from vlrl.errors import ConfigError
from vlrl.types import Sample

MOST = 1000
"""Most rows that are held out."""
MOST_LABELS = 100
"""Most different ground truths that are held out in proportion."""


class SplitPart(SampleSequence):
    """Some of the samples of a data file, by their indices [N] in ascending order. `note` says how they were chosen."""

    def __init__(self, samples: Sequence[Sample], indices: Sequence[int], note: str = ""):
        self._samples, self._indices, self.note = samples, tuple(indices), note
        self.files: Sequence[Any] = getattr(samples, "files", ())
        self.quarantined: Sequence[Any] = getattr(samples, "quarantined", ())

    def __len__(self) -> int:
        return len(self._indices)

    def _at(self, index: int) -> Sample:
        return self._samples[self._indices[index]]

    def where(self, index: int) -> str | None:
        return where(self._samples, self._indices[index])

    def fingerprint_rows(self) -> Sequence[int]:
        if isinstance(self._samples, Samples):
            return range(len(self))
        count = len(fingerprint_rows(self._samples))
        return sorted({round(i * (len(self) - 1) / max(count - 1, 1)) for i in range(count)})

    def raw_record(self, index: int) -> tuple[str, Any] | None:
        return self._samples.raw_record(self._indices[index]) if isinstance(self._samples, SampleSequence) else None


def part_of(samples: Sequence[Sample], split: str, share: float, seed: int, name: str) -> SplitPart:
    """Returns the training or held-out part of the samples of a file: about `share` of them, at most MOST, are held
    out, chosen by `seed`. Rows with the same `group_key`, or else the same media, are in the same part. Each ground
    truth has about the same share held out, if there are few of them, such as the labels of classes.

    Reads every row once. Raises ConfigError if one of the parts would be empty. `name` is the file, for messages."""
    members: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    truths: dict[str, str] = {}
    for i in range(len(samples)):
        sample = readable(samples, i)
        key = _group(sample, i)
        members.setdefault(key, []).append(i)
        names.setdefault(key, _name(sample, i))
        truths.setdefault(key, str(ground_truth(sample.row))[:100] if sample else "")
    labels = truths if len({*truths.values()}) <= MOST_LABELS else dict.fromkeys(truths, "")
    order = _spread(labels, names, seed)
    wanted, out = min(MOST, max(1, round(share * len(samples)))), list[int]()
    for key in order:
        if len(out) >= wanted:
            break
        out += members[key]
    if len(out) >= len(samples):
        raise ConfigError(f"data.heldout_share={share:g}: all {len(samples)} rows of {name} share a picture or "
                          "group_key, so none can be held out. Set data.heldout to a file of other rows")
    chosen = set(out)
    kept = sorted(chosen) if split == "heldout" else [i for i in range(len(samples)) if i not in chosen]
    return SplitPart(samples, kept, f"held out for evaluation: {len(out):,} of {len(samples):,} rows of {name} "
                                    f"(data.heldout_share={share:g}, chosen by data.seed={seed})")


def _spread(labels: Mapping[str, str], names: Mapping[str, str], seed: int) -> list[str]:
    """The keys of `labels` (key -> label) in a random order of which every beginning has the labels in proportion. The
    order depends on the seed and on `names` (key -> name)."""
    def rank(text: str) -> bytes:
        return hashlib.sha256(f"{seed}/{text}".encode("utf-8", "replace")).digest()

    by_label: dict[str, list[str]] = {}
    for key in sorted(labels, key=lambda key: rank(names[key])):
        by_label.setdefault(labels[key], []).append(key)
    place = {key: ((i + rank(label)[0] / 256) / len(keys), rank(names[key])) for label, keys in by_label.items()
             for i, key in enumerate(keys)}
    return sorted(labels, key=lambda key: place[key])


def _group(sample: Sample | None, index: int) -> str:
    if sample is None:
        return f"row {index}"
    key = sample.get("group_key")
    media = [str(source) for one in sample.media for source in sources_of(one)]
    return f"key {key}" if key not in (None, "") else f"media {media}" if media else f"id {sample.id}"


def _name(sample: Sample | None, index: int) -> str:
    """The name by which a group is drawn: its media as the row names them, so that it does not depend on the folder."""
    if sample is None:
        return f"row {index}"
    key = sample.get("group_key")
    media = [sample.get(field) for field in MEDIA_FIELDS if sample.get(field) is not None]
    return f"key {key}" if key not in (None, "") else f"media {media}" if media else f"id {sample.id}"
