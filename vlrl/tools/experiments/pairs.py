"""Pairs the samples of two evaluations by content, never by id alone. Does not import torch.

    found = pair(items(a.rollouts(50, split="heldout", columns=COLUMNS).to_pylist()), items(...))
    [(one.value, other.value) for one, other in found.pairs], found.notes("a", "b")

The content of a sample is what was shown (hashes of its images and videos), what was asked (the rendered prompt) and
what is correct (the target). With another data.seed or data file the same id may stand for another image, so ids only
decide between samples of equal content. For an episode the id is part of the content, because an environment may hide
its state."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from vlrl.tools.evaluation.rows import NOT_CONTENT

COLUMNS = ("sample_id", "prompt", "target", "sample", "media", "turns", "episode_id")
"""Columns of rollout files (vlrl.store.SCHEMA) that `items` needs. Rows may have other columns, which are kept."""
_NOT_CONTENT = frozenset({*NOT_CONTENT, "image", "images", "video", "fps", "frames", "frame_times", "duration"})
"""Fields of a data row that are not part of the sample's content. They describe the row's origin or use, or repeat the
sample's media or prompt."""

Reason = Literal["missing", "changed", "duplicate"]
WORDS: Mapping[Reason, str] = {
    "missing": "without a counterpart on the other side",
    "changed": "with the id of a sample on the other side, but different content",
    "duplicate": "a duplicate of a sample that was counted",
}
"""Reason why a sample has no counterpart -> the wording of this reason in notes."""


class Item(NamedTuple):
    """One sample of an evaluation. `value` is any object that belongs to the sample, such as the list of its answers.
    Pairing two samples pairs their values."""

    id: str
    media: tuple[str, ...] = ()  # sha256 of each image and video in the prompt, in order
    prompt: str = ""
    target: str = "null"
    row: str = "{}"  # the fields of the data row that belong to its content, as JSON; "{}" if they are unknown
    episode: bool = False
    value: Any = None

    @property
    def content(self) -> tuple[Any, ...]:
        """A key that two items share if they are the same sample: media, target, prompt and, for an episode, the id."""
        return self.media, self.target, self.prompt, self.id if self.episode else None


class LeftOut(NamedTuple):
    """A sample of one evaluation that was not paired with a sample of the other evaluation, with the reason."""

    item: Item
    reason: Reason
    differs: tuple[str, ...] = ()
    """If the reason is "changed": which of media, target, prompt and row differ from the other evaluation's sample with
    the same id."""


@dataclass(frozen=True)
class Pairing:
    """The result of pairing the samples of two evaluations. `pairs` is in the order of the first evaluation, and
    contains each sample at most once."""

    pairs: tuple[tuple[Item, Item], ...]
    first: tuple[LeftOut, ...]  # samples of the first evaluation that have no counterpart, in its order
    second: tuple[LeftOut, ...]
    reworded: int = 0
    """Number of pairs whose prompts differ in wording or chat template, while id, media, target and row are equal."""

    @property
    def unpaired(self) -> int:
        """Number of samples without a counterpart, in both evaluations together."""
        return len(self.first) + len(self.second)

    def notes(self, first: str = "the first", second: str = "the second") -> list[str]:
        """Sentences for the user about samples without a counterpart and about differing prompts. `first` and `second`
        are the names of the evaluations."""
        lines = []
        for name, left in ((first, self.first), (second, self.second)):
            for reason, n in sorted(Counter[Reason](one.reason for one in left).items()):
                what = Counter(word for one in left if one.reason == reason for word in one.differs)
                differs = f" ({', '.join(f'{word} {k:,}' for word, k in what.most_common())})" if what else ""
                lines.append(f"{n:,} of {name} left out: {WORDS[reason]}{differs}")
        if any(one.reason == "changed" for one in (*self.first, *self.second)):
            lines.append("Some samples have equal ids but different content, because data.seed or the data file "
                         "differs. Evaluate both sides with the same data.heldout and data.seed.")
        if self.reworded:
            lines.append(f"{self.reworded:,} pairs were worded differently (another task.prompt, or a model with "
                         "another chat template)")
        return lines


def items(rows: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Converts rows of rollout files (with COLUMNS) to one item per sample; the item's value is the list of its rows,
    one per answer.

    Answers belong to the same sample if id and content are equal. Media shown in later turns of an episode do not count
    as content."""
    rows_by_item: dict[Item, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_item.setdefault(_item(row), []).append(row)
    return [item._replace(value=own) for item, own in rows_by_item.items()]


def pair(first: Sequence[Item], second: Sequence[Item]) -> Pairing:
    """Pairs the samples of two evaluations, and gives the reason for each sample that is not paired.

    Items of equal content are paired, preferably those that also have equal row and id. Items whose rows contradict
    each other are never paired (such as rows with two different clips of one video). Among the remaining items, those
    with equal id, media, target and row are paired although their prompts are worded differently, unless media and row
    are both empty. Of several pairs with equal content and row, only the first counts."""
    pairs: list[tuple[Item, Item]] = []
    left, right = list(first), list(second)
    for key in _KEYS:
        more, left, right = _matched(left, right, key)
        pairs += more
    rewords = {id(one) for one, other in pairs if one.prompt != other.prompt}
    place = {id(item): i for i, item in enumerate(first)}
    pairs.sort(key=lambda two: place[id(two[0])])
    unique: dict[Any, tuple[Item, Item]] = {}
    for two in pairs:
        unique.setdefault((two[0].content, two[0].row), two)
    counted = {id(item) for two in unique.values() for item in two}
    sides = [_left_out(own, other, counted) for own, other in ((first, second), (second, first))]
    return Pairing(tuple(unique.values()), *sides, reworded=sum(id(one) in rewords for one, _ in unique.values()))


# --- details ----------------------------------------------------------------------------------------------------------

_Key = Callable[[Item], Any]
_KEYS: tuple[_Key, ...] = (
    lambda i: (i.content, i.row, i.id),
    lambda i: (i.content, i.id),
    lambda i: (i.content, i.row),
    lambda i: i.content,
    lambda i: (i.media, i.target, i.row, i.id, i.episode) if i.media or i.row != "{}" else None,
)
"""Functions that return a key of an item. Items with equal keys are paired, by the first function first, because it is
the most reliable. A key of None means that the function cannot pair the item."""


def _item(row: Mapping[str, Any]) -> Item:
    shown = [m if isinstance(m, str) else m["hash"] for m in row.get("media") or ()]
    turns = row.get("turns") or ()
    later = sum(len(turn["media"] or ()) for turn in turns if turn["role"] == "observation")
    episode = bool(row.get("episode_id")) or any(turn["role"] == "observation" for turn in turns)
    return Item(str(row["sample_id"]), tuple(shown[:len(shown) - later]), row.get("prompt") or "",
                row.get("target") or "null", _row_content(row.get("sample")), episode)


def _row_content(text: str | None) -> str:
    try:
        row = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return "{}"
    own = {k: v for k, v in row.items() if k not in _NOT_CONTENT} if isinstance(row, dict) else {}
    return json.dumps(own, sort_keys=True)


def _matched(first: Sequence[Item], second: Sequence[Item], key: _Key
             ) -> tuple[list[tuple[Item, Item]], list[Item], list[Item]]:
    """Pairs items with equal keys whose rows do not contradict each other. Returns three lists: the pairs, the unpaired
    items of `first`, and the unpaired items of `second`, each in the original order."""
    waiting: dict[Any, list[Item]] = {}
    for item in second:
        if (name := key(item)) is not None:
            waiting.setdefault(name, []).append(item)
    pairs, left = [], []
    for item in first:
        others = waiting.get(key(item), [])
        partner = next((n for n, other in enumerate(others) if _agree(item.row, other.row)), None)
        if partner is None:
            left.append(item)
        else:
            pairs.append((item, others.pop(partner)))
    used = {id(other) for _, other in pairs}
    return pairs, left, [item for item in second if id(item) not in used]


def _agree(one: str, other: str) -> bool:
    """Whether two data rows (as JSON) have equal values in all fields that both rows have."""
    if one == other:
        return True
    a, b = json.loads(one), json.loads(other)
    return all(a[name] == b[name] for name in a.keys() & b.keys())


def _left_out(own: Sequence[Item], other: Sequence[Item], counted: set[int]) -> tuple[LeftOut, ...]:
    contents = {item.content for item in (*own, *other) if id(item) in counted}
    there = {item.id: item for item in other}
    out = []
    for item in own:
        if id(item) in counted:
            continue
        if item.content in contents:
            out.append(LeftOut(item, "duplicate"))
        elif item.id in there:
            differs = [name for name in ("media", "target", "prompt", "row")
                       if getattr(item, name) != getattr(there[item.id], name)]
            out.append(LeftOut(item, "changed", tuple(differs)))
        else:
            out.append(LeftOut(item, "missing"))
    return tuple(out)


VALUE_COLUMNS = ("reward", "correct", "parts", "metrics", "token_ids", "truncated")
"""Columns of rollout files (vlrl.store.SCHEMA) that `values` reads."""


def values(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields (metric, value) for each metric of one answer. `row` is the answer's row in a rollout file."""
    own = (("reward/mean", row["reward"]), ("correct_frac", row["correct"]),
           ("completion/length_mean", len(row["token_ids"] or ())), ("completion/truncated_frac", row["truncated"]))
    for name, value in (*own, *(row["parts"] or ()), *(row["metrics"] or ())):
        if value is not None and math.isfinite(value):
            yield name, float(value)


def sample_means(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Metric -> mean over `rows`: the rows of a rollout file that hold the answers to one sample."""
    by_metric: dict[str, list[float]] = {}
    for row in rows:
        for name, value in values(row):
            by_metric.setdefault(name, []).append(value)
    return {name: float(np.mean(own)) for name, own in by_metric.items()}
