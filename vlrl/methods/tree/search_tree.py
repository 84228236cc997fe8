"""The tree of a search: the values of its nodes, and the choice of the node to expand next.

    tree = Tree(settings, empty)
    ends = tree.grow(pieces, most)                  # pieces generated from tree.current; most = token limit
    tree.judge(ends, [True, False])                 # backs up one of the ends; tree.current is the next node

A node is a piece of a completion, and stands for the completion up to the end of that piece. An end is a node at which
the completion ends. N of a node counts how often the node was generated (0 for an end), plus one for each backed-up end
at or below it. V is the sum of the values that these ends give to the node, and Q = V / N. DeepSearch (arXiv
2509.25454), sections 3.1 to 3.3, and its released code where the paper gives no detail. Equal pieces are one node,
which is our addition: otherwise N would be 1 on all new nodes, and the first node would always be chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vlrl.methods.tree.settings import SearchSettings
from vlrl.types import Completion


class SearchNode(NamedTuple):
    """A node on the path of a completion: tokens start .. end - 1, and the node's statistics."""

    start: int
    end: int
    value: float
    """V of the node: the sum of the values of backed-up completions through it; 1 or -1 for an end."""
    visits: int


def as_extra(nodes: Sequence[SearchNode]) -> dict[str, Any]:
    """Converts the nodes of a completion, in order, to Completion.extra. They are stored under the key "turns"."""
    return {"turns": [{"start": n.start, "end": n.end, "info": {"value": n.value, "visits": n.visits}} for n in nodes]}


def search_nodes(extra: Mapping[str, Any]) -> list[SearchNode]:
    """The nodes on the path of a completion, which cover all of its tokens, from Completion.extra; [] for a completion
    without search."""
    return [SearchNode(turn["start"], turn["end"], **turn["info"]) for turn in extra.get("turns", ())]


@dataclass(eq=False)
class Node:
    """A node of the search tree: a piece of a completion. The root is an empty piece."""

    written: Completion
    """The completion from its beginning to the end of this piece."""
    parent: Node | None = None
    depth: int = 0
    ended: bool = False
    """Whether the completion ends at this node."""
    right: bool | None = None
    """For an end: whether the completion is correct; None = unknown."""
    backed_up: bool = False
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    value: float = 0.0

    @property
    def q(self) -> float:
        return self.value / self.visits if self.visits else 0.0

    @property
    def start(self) -> int:
        """Position of the first token of this piece in the completion."""
        return len(self.parent.written.tokens) if self.parent else 0

    @property
    def entropy(self) -> float:
        """Mean -log p of the sampled tokens of this piece, as an estimate of the policy entropy."""
        return _entropy(self.written, self.start)

    def path_to_root(self) -> Iterator[Node]:
        """Yields the node and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """Yields the node and its descendants, each before its children."""
        open_: list[Node] = [self]
        while open_:
            node = open_.pop()
            yield node
            open_.extend(reversed(node.children))

    def completion(self) -> Completion:
        """The whole completion, if it ends at this node, with the nodes on its path in `extra`."""
        nodes = [SearchNode(n.start, len(n.written.tokens), n.value, n.visits) for n in [*self.path_to_root()][-2::-1]]
        return Completion(tokens=self.written.tokens, logprobs=self.written.logprobs, loss_mask=self.written.loss_mask,
                          text=self.written.text, finish_reason=self.written.finish_reason, extra=as_extra(nodes))


class Tree:
    """A tree search for completions of one prompt."""

    def __init__(self, settings: SearchSettings, empty: Completion):
        self.settings = settings
        self.root = Node(empty)
        self.current: Node | None = self.root
        """The node to expand next; None if no node is left to expand."""
        self.ends: list[Node] = []
        """The backed-up ends, in the order in which they were backed up."""
        self.grown = 0

    def grow(self, pieces: Sequence[Completion], most: int) -> list[Node]:
        """Adds the pieces generated from the current node as its children. Returns the new ends; a completion ends by
        itself, or when it has `most` tokens."""
        node, new = self.current, dict[bytes, Node]()
        assert node is not None
        ends = [Node(c, node, node.depth + 1, ended=True) for c in pieces if _ends(c, most)]
        for c in pieces:
            if not _ends(c, most):
                new.setdefault(c.tokens.tobytes(), Node(c, node, node.depth + 1)).visits += 1
        node.children += [*new.values(), *ends]
        self.grown += 1
        return ends

    def judge(self, ends: Sequence[Node], right: Sequence[bool | None]) -> None:
        """Records for each new end whether it is correct (`right`), backs up one end, and chooses the next node to
        expand."""
        for node, correct in zip(ends, right, strict=True):
            node.right = correct
        if ends:
            self._back_up(_best_end(ends))
        self.current = self._next(bool(ends))

    def back_up_waiting(self) -> bool:
        """Backs up an end that is not backed up yet, after the last expansion. Returns False if there was none."""
        waiting = [node for node in self.root.subtree() if node.ended and not node.backed_up]
        if waiting:
            self._back_up(_best_end(waiting))
        return bool(waiting)

    def restart(self) -> None:
        """Makes the root the current node if no node is left to expand."""
        self.current = self.current or self.root

    def uct(self, node: Node) -> float:
        """UCT score for the choice among new nodes: Q + explore * sqrt(ln N(parent) / N), or Q if N is 0 for the node
        or its parent."""
        assert node.parent is not None
        if not node.parent.visits or not node.visits:
            return node.q
        return node.q + self.settings.explore * math.sqrt(math.log(node.parent.visits) / node.visits)

    def promise(self, node: Node) -> float:
        """Score for the choice among all nodes that are neither ends nor expanded: by_value * tanh(Q(parent)) +
        by_entropy * entropy of the piece + by_depth * sqrt(depth of the node / maximum depth)."""
        assert node.parent is not None
        s = self.settings
        return (s.by_value * math.tanh(node.parent.q) + s.by_entropy * node.entropy
                + s.by_depth * math.sqrt(node.depth / s.depth))

    def _next(self, ended: bool) -> Node | None:
        """Returns the node to expand next. If a completion has `ended` in this expansion, that is the node with the
        highest `promise` among all nodes that are neither ends nor expanded; None if there are none. Otherwise it is
        the new node with the highest `uct`. On ties, the first node is returned."""
        open_ = [n for n in self.root.subtree() if n.parent and not n.ended and not n.children]
        if ended:
            return max(open_, key=self.promise, default=None)
        return max((n for n in open_ if n.parent is self.current), key=self.uct)

    def _back_up(self, end: Node) -> None:
        """Backs up an end: adds +-max((d + 1) / (D + 1), least) to V of each node on the path to the end, where d is
        the depth of the node and D the depth of the end. The sign is + if the completion is correct, else -. N of
        these nodes rises by 1.

        If V is negative and the completion is correct, V is set to the added value instead. If V is positive and the
        completion is wrong, V stays unchanged. A completion that could not be judged changes only N."""
        end.backed_up = True
        self.ends.append(end)
        worth = {True: 1.0, False: -1.0, None: 0.0}[end.right]
        for node in end.path_to_root():
            node.visits += 1
            gain = worth * max((node.depth + 1) / (end.depth + 1), self.settings.least)
            if node.value * gain >= 0:
                node.value += gain
            elif gain > 0:
                node.value = gain


def _ends(answer: Completion, most: int) -> bool:
    return answer.finish_reason == "stop" or len(answer.tokens) >= most


def _best_end(ends: Sequence[Node]) -> Node:
    """Chooses the end to back up: a correct one if there is any, else a wrong one, else one of unknown correctness.
    Among several, chooses the one whose completion has the lowest mean entropy."""
    return min(ends, key=lambda node: ({True: 0, False: 1, None: 2}[node.right], _entropy(node.written)))


def _entropy(answer: Completion, start: int = 0) -> float:
    known = answer.logprobs[start:][answer.loss_mask[start:]]
    return -float(np.nan_to_num(known, nan=0.0).mean(dtype=np.float64)) if len(known) else 0.0
