"""Finds common prefixes of a prompt's completions, and arranges the completions as a tree that holds each common token
once.

A node is a run of tokens: a prefix that several completions share, or the remaining tokens of one completion. Shared
nodes have at least SHORTEST tokens, because every node costs an attention call over all its descendants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vlrl.types import Prompt

SHORTEST = 32  # minimum number of common tokens that make a shared node


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens in the tree: the tokens start..stop of the completion with index `answer`. `place` is the
    position after the prompt at which the node starts, and `end` the position at which its last descendant ends."""

    answer: int
    start: int
    stop: int
    place: int
    end: int


@dataclass(frozen=True, eq=False)
class Tree:
    """The completions of a prompt as a prefix tree."""

    nodes: tuple[Node, ...]  # all nodes, each before its descendants
    positions: tuple[np.ndarray, ...]  # for each completion, the positions [T] of its tokens after the prompt

    @property
    def tokens(self) -> int:
        return sum(node.stop - node.start for node in self.nodes)

    @property
    def shared(self) -> bool:
        """Whether any token belongs to more than one completion."""
        return self.tokens < sum(map(len, self.positions))


def tree_of(answers: Sequence[np.ndarray], shown: Sequence[Prompt | None] = (), shortest: int | None = None) -> Tree:
    """The prefix tree of completions, each given as token ids [T]. For `shown` see packing.Piece. Completions share
    tokens that have the same ids, rotary positions and media. A completion shares nothing if its media cannot be
    assigned to observations (`Prompt.inserted`). shortest: least tokens of a shared node; None = SHORTEST."""
    grower = _Grower(answers, shown or (None,) * len(answers), shortest or SHORTEST)
    grower.grow([*range(len(answers))], 0, 0)
    return Tree(tuple(node for node in grower.nodes if node), tuple(grower.places))


class _Grower:
    def __init__(self, answers: Sequence[np.ndarray], shown: Sequence[Prompt | None], shortest: int):
        self.answers, self.shown, self.shortest = answers, shown, shortest
        self.nodes: list[Node | None] = []
        self.places = [np.zeros(len(answer), np.int64) for answer in answers]

    def grow(self, members: list[int], depth: int, at: int) -> int:
        """Adds nodes at position `at` for the completions `members`, beginning after their first `depth` tokens, which
        are equal. Returns the next free position."""
        alike: dict[Any, list[int]] = {}
        for m in members:
            begins = self.answers[m][depth:depth + self.shortest]
            if len(begins):
                alike.setdefault(begins.tobytes() if len(begins) == self.shortest else m, []).append(m)
        for rest in alike.values():
            while rest:
                first = rest[0]
                common = {m: n for m in rest[1:] if (n := self._common(first, m)) >= depth + self.shortest}
                stop, number = min(common.values(), default=len(self.answers[first])), len(self.nodes)
                own, behind = [first, *common], at + stop - depth
                for m in own:
                    self.places[m][depth:stop] = np.arange(at, behind)
                self.nodes.append(None)
                end = self.grow(own, stop, behind)
                self.nodes[number] = Node(first, depth, stop, at, end)
                at, rest = end, [m for m in rest[1:] if m not in common]
        return at

    def _common(self, a: int, b: int) -> int:
        n = min(len(self.answers[a]), len(self.answers[b]))
        n = _first_true(self.answers[a][:n] != self.answers[b][:n])
        one, other = self.shown[a], self.shown[b]
        return n if one is None and other is None else common_prefix(one, other, n)


def common_prefix(a: Prompt | None, b: Prompt | None, n: int) -> int:
    """The number of leading tokens, at most `n`, that two completions share, with equal positions and media. The first
    `n` ids of both must be equal. `a` and `b` are the completions' entries in packing.Piece.shown; if one of them is
    None, the result is 0."""
    if a is None or b is None or not (_rows_known(a) and _rows_known(b)):
        return 0
    n = _first_true((a.positions[:, :n] != b.positions[:, :n]).any(0))
    for one, other in zip((*a.inserted, None), (*b.inserted, None), strict=False):
        begins = min((part.start for part in (one, other) if part), default=n)
        if begins >= n:
            return n
        if one is None or other is None or one != other or one.stop > n or not _same(
                media_of(a, one.start, one.stop), media_of(b, other.start, other.stop)):
            return begins
    return n


def slice_prompt(shown: Prompt, start: int, stop: int) -> Prompt:
    """Tokens start..stop of the completion `shown`, with the media of the observations among them. No observation may
    be cut."""
    if start == 0 and stop == len(shown):
        return shown
    inside = [part for part in shown.inserted if start <= part.start and part.stop <= stop]
    before = sum(part.visuals for part in shown.inserted if part.stop <= start)
    return replace(shown, ids=shown.ids[start:stop], positions=shown.positions[:, start:stop],
                   aligned={name: values[start:stop] for name, values in shown.aligned.items()},
                   mm=media_of(shown, start, stop), media=(), processed_sizes=(), visual_tokens=(),
                   visuals=shown.visuals[before:before + sum(part.visuals for part in inside)],
                   inserted=tuple(replace(part, start=part.start - start, stop=part.stop - start) for part in inside))


def media_of(shown: Prompt, start: int, stop: int) -> Mapping[str, torch.Tensor]:
    """The media tensors of the observations in tokens start..stop of the completion `shown`."""
    out = {}
    for name, tensor in shown.mm.items():
        first = sum(part.rows.get(name, 0) for part in shown.inserted if part.stop <= start)
        rows = sum(part.rows.get(name, 0) for part in shown.inserted if start <= part.start and part.stop <= stop)
        if rows:
            out[name] = tensor[first:first + rows]
    return out


def _rows_known(shown: Prompt) -> bool:
    rows = {name: sum(part.rows.get(name, 0) for part in shown.inserted) for name in shown.mm}
    return all(isinstance(tensor, torch.Tensor) and len(tensor) == rows[name] for name, tensor in shown.mm.items())


def _same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _first_true(differs: np.ndarray) -> int:
    return int(differs.argmax()) if differs.any() else len(differs)
