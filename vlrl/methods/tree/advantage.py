"""Advantage estimators on the prefix tree of a group's completions: each maps `Scores` to one array [T] per completion.

A node of the tree is the text between two branching points, and its value is the mean reward of the completions that
pass through it. Most useful with rollout.branch, where completions continue prefixes of each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vlrl.algo import grouped
from vlrl.algo.effect import reads
from vlrl.algo.inputs import Scores, requires
from vlrl.config.base import Fraction, NonNegative, Rate
from vlrl.methods.tree.search_tree import SearchNode, search_nodes


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of text that begins at token `start` and is shared by a number of completions (`leaves`)."""

    start: int
    value: float
    """Mean reward of the completions that pass through this node."""
    before: float
    """Value of the parent node."""
    leaves: int


Credit = Callable[[Node, float], float]
"""A function (node, value of the root) -> advantage of the tokens of the node."""


def nodes_of(rollouts: Sequence[int], tokens: Sequence[np.ndarray], rewards: Sequence[float]) -> dict[int, list[Node]]:
    """Finds the nodes of the prefix tree of the completions with the indices `rollouts` in `tokens` and `rewards`.
    Returns a dict from each index to the nodes on the completion's path, without the root and in any order. A node
    begins at a token that only some of the parent's completions have."""
    nodes: dict[int, list[Node]] = {i: [] for i in rollouts}
    open_ = [(0, list(rollouts))]
    while open_:
        t, through = open_.pop()
        value = sum(rewards[i] for i in through) / len(through)
        children: dict[int, list[int]] = defaultdict(list)
        for i in through:
            if t < len(tokens[i]):
                children[int(tokens[i][t])].append(i)
        for child in children.values():
            if len(child) < len(through):
                node = Node(t, sum(rewards[i] for i in child) / len(child), value, len(child))
                for i in child:
                    nodes[i].append(node)
            if len(child) > 1:
                open_.append((t + 1, child))
    return nodes


@requires("local", "tokens")
def rose(s: Scores, shorter: Fraction = 0.2) -> list[torch.Tensor]:
    """The advantage V(node) - V(parent) on the tokens of each node. Along a completion these differences add up to R -
    V(root).

    The reward of a correct completion is first multiplied by 1 - shorter * (L - min) / (max - min), where L is its
    length, and min and max are over the group's correct completions. ROSE, as described in its paper. Segments end
    where completions branch; rollout.branch.at=meaning chooses these points by the meanings of continuations."""
    right = grouped.correct(s)
    lengths = torch.where(right, s.lengths, torch.nan)
    low, high = grouped.smallest(lengths, s.group), -grouped.smallest(-lengths, s.group)
    longer = torch.where(high > low, (lengths - low) / (high - low), 0.0)
    paid = torch.where(right, s.rewards * (1 - shorter * longer), s.rewards)
    return _on_nodes(s, paid, lambda node, root: node.value - node.before)


@requires("local", "tokens")
def treerl(s: Scores) -> list[torch.Tensor]:
    """The advantage (V(node) - V(root) + V(node) - V(parent)) / sqrt(number of completions through the node), on the
    tokens of each node.

    Global and local advantage of TreeRL (arXiv 2506.11902), section 3.2."""
    return _on_nodes(s, s.rewards,
                     lambda node, root: (2 * node.value - root - node.before) / node.leaves ** 0.5)


@requires("local", "tokens")
def tempo(s: Scores, eps: NonNegative = 1e-4) -> list[torch.Tensor]:
    """The advantage (R - mean + V_{t+1} - V_t) / (std + eps) on token t. V_t is the mean reward of the group's
    completions that begin with the same tokens before t, and V_{t+1} the mean reward of those that also have the
    same token t.

    The completions of a group form a prefix tree. On tokens at which the tree does not branch, V_{t+1} - V_t is 0, and
    the advantage is that of grpo. TEMPO: Exploiting Tree Structure for Credit Assignment in RL Training of LLMs (arXiv
    2509.18314). That V_{t+1} - V_t is divided by std + eps too is our reading of the paper."""
    base = grouped.centred(s.rewards, s.group)
    scale, flat = grouped.std(s.rewards, s.group) + eps, grouped.all_equal(s.rewards, s.group).tolist()
    out = [torch.zeros(len(tokens), dtype=torch.float64) for tokens in s.tokens]
    for rollouts in scored_by_group(s):
        if flat[rollouts[0]]:
            continue
        for i, nodes in nodes_of(rollouts, s.tokens, s.rewards.tolist()).items():
            mask = torch.from_numpy(np.asarray(s.masks[i], bool))
            values = torch.full((len(mask),), float(base[i]), dtype=torch.float64)
            for node in nodes:
                values[node.start] += node.value - node.before
            out[i] = torch.where(mask, values / scale[i], 0.0)
    return out


@reads("outcome", alone={})
@requires("local", "nodes")
def deepsearch(s: Scores, temperature: Rate | None = 1.0) -> list[torch.Tensor]:
    """The advantage V(node) - mean of V(end) over the group, on the tokens of each node, where V is from the tree
    search (search_tree.py).

    An end is the last node of a completion; it has V = 1 if the completion is correct, else -1. For other nodes V is
    replaced by tanh(V / temperature), or unchanged with temperature=null. A completion that was generated without
    search is a single end node. DeepSearch (arXiv 2509.25454), section 3.5."""
    right = grouped.correct(s).tolist()
    nodes = [search_nodes(extra) or [SearchNode(0, len(mask), 1.0 if correct else -1.0, 1)]
             for extra, mask, correct in zip(s.extra or [{}] * len(right), s.masks, right, strict=True)]
    out = [torch.zeros(len(mask), dtype=torch.float64) for mask in s.masks]
    for rollouts in scored_by_group(s):
        mean = sum(nodes[i][-1].value for i in rollouts) / len(rollouts)
        for i in rollouts:
            for node in nodes[i]:
                soft = temperature if node is not nodes[i][-1] else None
                value = node.value if soft is None else math.tanh(node.value / soft)
                out[i][node.start:node.end] = value - mean
            out[i][~torch.from_numpy(np.asarray(s.masks[i], bool))] = 0.0
    return out


def _on_nodes(s: Scores, rewards: torch.Tensor, credit: Credit) -> list[torch.Tensor]:
    out = [torch.zeros(len(tokens), dtype=torch.float64) for tokens in s.tokens]
    for rollouts in scored_by_group(s):
        known = rewards.tolist()
        if len({known[i] for i in rollouts}) == 1:
            continue  # the mean of equal values may differ from them in the last bit
        root = sum(known[i] for i in rollouts) / len(rollouts)
        for i, nodes in nodes_of(rollouts, s.tokens, known).items():
            for node in sorted(nodes, key=lambda node: node.start):
                out[i][node.start:] = credit(node, root)
            out[i][~torch.from_numpy(np.asarray(s.masks[i], bool))] = 0.0
    return out


def scored_by_group(s: Scores) -> Iterator[list[int]]:
    """Yields the indices of each group's rollouts that have a reward."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, number in enumerate(s.group.tolist()):
        if not s.rewards[i].isnan():
            groups[number].append(i)
    yield from groups.values()
