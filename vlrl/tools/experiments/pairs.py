"""Pairs the held-out answers of two evaluations by content, never by id alone. No torch.

    found = pair(items(a.rollouts(50, split="heldout", columns=COLUMNS).to_pylist()), items(...))
    [(one.value, other.value) for one, other in found.pairs], found.notes("a", "b")

The content of a sample is what was shown (hashes of its images and videos), what was asked (the rendered prompt) and
what is right (the target). An id is another picture with another data.seed or in another file, so it decides only
between samples of equal content. Of an episode the id is part of the content, as an environment may hide its state.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vlrl.tools.evaluation.rows import NOT_CONTENT

COLUMNS = ("sample_id", "prompt", "target", "sample", "media", "turns", "episode_id")
"""Columns of rollout files (vlrl.store.SCHEMA) that `items` reads; further ones stay in the rows."""
_NOT_CONTENT = frozenset({*NOT_CONTENT, "image", "images", "video", "fps", "frames", "frame_times", "duration"})
"""Fields of a row that say where it comes from or how it is used, or that repeat its media and prompt."""

Reason = Literal["missing", "changed", "duplicate"]
WORDS: Mapping[Reason, str] = {
    "missing": "not on the other side",
    "changed": "with the id of a sample on the other side, but other content",
    "duplicate": "a copy of a sample that was counted",
}
"""Reason for leaving a sample out -> its text."""


class Item(NamedTuple):
    """One sample of an evaluation, with anything to be paired as `value`."""

    id: str
    media: tuple[str, ...] = ()
    """sha256 of each image and video of the prompt, in order."""
    prompt: str = ""
    """The rendered prompt."""
    target: str = "null"
    """JSON."""
    row: str = "{}"
    """JSON of the fields of the row that belong to its content; "{}" where they are unknown."""
    episode: bool = False
    value: Any = None

    @property
    def content(self) -> tuple[Any, ...]:
        """The part that two items of the same sample have in common."""
        return self.media, self.target, self.prompt, self.id if self.episode else None


class LeftOut(NamedTuple):
    """A sample of one side without a pair."""

    item: Item
    reason: Reason
    differs: tuple[str, ...] = ()
    """For a changed sample: which of media, target, prompt and row differ from the sample with its id on the other
    side.
    """


@dataclass(frozen=True)
class Pairing:
    """Samples of two evaluations, each in at most one pair, in the order of the first."""

    pairs: tuple[tuple[Item, Item], ...]
    first: tuple[LeftOut, ...]
    """Samples of the first evaluation without a pair, in its order."""
    second: tuple[LeftOut, ...]
    reworded: int = 0
    """Pairs with equal id, media, target and row whose prompts differ in wording or chat template."""

    @property
    def unpaired(self) -> int:
        """The number of samples of both sides without a pair."""
        return len(self.first) + len(self.second)

    def notes(self, first: str = "the first", second: str = "the second") -> list[str]:
        """Notes on samples without a pair and on differing prompts, one sentence each; [] where every sample is paired.
        """
        lines = []
        for name, left in ((first, self.first), (second, self.second)):
            for reason, n in sorted(Counter[Reason](one.reason for one in left).items()):
                what = Counter(word for one in left if one.reason == reason for word in one.differs)
                differs = f" ({', '.join(f'{word} {k:,}' for word, k in what.most_common())})" if what else ""
                lines.append(f"{n:,} of {name} left out: {WORDS[reason]}{differs}")
        if any(one.reason == "changed" for one in (*self.first, *self.second)):
            lines.append("Equal ids with other content: another data.seed, or another file of rows. Evaluate both "
                         "sides with the same data.heldout and data.seed.")
        if self.reworded:
            lines.append(f"{self.reworded:,} pairs were worded differently (another task.prompt, or a model with "
                         "another chat template)")
        return lines


def items(rows: Iterable[Mapping[str, Any]]) -> list[Item]:
    """One item for each sample, from rows of rollout files with COLUMNS; its value is the list of its rows, one for
    each answer.

    Answers belong to one sample when id and content are equal. Media shown in later turns of an episode are not part of
    it.
    """
    rows_by_item: dict[Item, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_item.setdefault(_item(row), []).append(row)
    return [item._replace(value=own) for item, own in rows_by_item.items()]


def pair(first: Sequence[Item], second: Sequence[Item]) -> Pairing:
    """The pairs of two evaluations, and the samples left out with the reason.

    Items of equal content are paired, first those with equal row and id, and never items whose rows contradict each
    other (the spans of two clips of one video). Of the rest, items with equal id, media, target and row are paired even
    if their prompts are worded differently, unless both media and row are empty. Of several pairs with equal content
    and row only one counts, so that a copied sample does not weigh double.
    """
    pairs: list[tuple[Item, Item]] = []
    left, right = list(first), list(second)
    for key in _PASSES:
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
_PASSES: tuple[_Key, ...] = (
    lambda i: (i.content, i.row, i.id),
    lambda i: (i.content, i.id),
    lambda i: (i.content, i.row),
    lambda i: i.content,
    lambda i: (i.media, i.target, i.row, i.id, i.episode) if i.media or i.row != "{}" else None,
)
"""Keys by which items are paired, the most certain first; None for an item that may not be paired."""


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
    """Pairs of equal keys in order, and the items of both sides that are left."""
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
    """Whether two rows have equal values in all fields that both have."""
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
