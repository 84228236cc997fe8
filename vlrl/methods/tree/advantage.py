"""Credit along the prefix tree of a group's completions: `Scores -> list of [T]`.

The value of a node is the mean reward of the completions through it; a node extends from one branching point to the
next. Most useful with rollout.branch, whose completions continue each other's text."""

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
    """The tokens from `start` on that `leaves` completions share."""

    start: int
    value: float
    """Mean reward of the completions through it."""
    before: float
    """Value of its parent."""
    leaves: int


Credit = Callable[[Node, float], float]
"""(node, value of the root) -> the advantage of its tokens."""


def nodes_of(rollouts: Sequence[int], tokens: Sequence[np.ndarray], rewards: Sequence[float]) -> dict[int, list[Node]]:
    """The nodes of each rollout below the root, unordered: one for each branching point of the token tree."""
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
    """V(node) - V(parent) on the tokens of each node; along a completion they add up to R - V(root).

    A correct completion's reward is multiplied by 1 - shorter * (L - min) / (max - min), L its length among the group's
    correct ones. ROSE, as described in its paper: segments end where completions branch, which
    rollout.branch.at=meaning chooses by the meanings of continuations."""
    right = grouped.correct(s)
    lengths = torch.where(right, s.lengths, torch.nan)
    low, high = grouped.smallest(lengths, s.group), -grouped.smallest(-lengths, s.group)
    longer = torch.where(high > low, (lengths - low) / (high - low), 0.0)
    paid = torch.where(right, s.rewards * (1 - shorter * longer), s.rewards)
    return _on_nodes(s, paid, lambda node, root: node.value - node.before)


@requires("local", "tokens")
def treerl(s: Scores) -> list[torch.Tensor]:
    """(V(node) - V(root) + V(node) - V(parent)) / sqrt(completions through the node) on its tokens.

    Global and local advantage of TreeRL (arXiv 2506.11902), section 3.2."""
    return _on_nodes(s, s.rewards,
                     lambda node, root: (2 * node.value - root - node.before) / node.leaves ** 0.5)


@requires("local", "tokens")
def tempo(s: Scores, eps: NonNegative = 1e-4) -> list[torch.Tensor]:
    """(R - mean + V_{t+1} - V_t) / (std + eps): V_t is the mean reward of the group's completions that begin with the
    tokens before t, V_{t+1} that of those that share token t too.

    The completions of a group form a prefix tree. Without branches the correction is 0, and this is grpo. TEMPO:
    Exploiting Tree Structure for Credit Assignment in RL Training of LLMs (arXiv 2509.18314), read so that values are
    divided like the reward."""
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
    """V(node) - mean of V(end) over the group on the tokens of each node, V from the search (search_tree.py).

    An end has V = 1 where its completion is correct, else -1. On other nodes tanh(V / temperature) replaces V; None = V
    unchanged. A completion without search is a single node, an end. DeepSearch (arXiv 2509.25454), section 3.5."""
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
            continue  # means of equal values need not be equal to the last bit
        root = sum(known[i] for i in rollouts) / len(rollouts)
        for i, nodes in nodes_of(rollouts, s.tokens, known).items():
            for node in sorted(nodes, key=lambda node: node.start):
                out[i][node.start:] = credit(node, root)
            out[i][~torch.from_numpy(np.asarray(s.masks[i], bool))] = 0.0
    return out


def scored_by_group(s: Scores) -> Iterator[list[int]]:
    """The rollouts of each group that have a reward."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, number in enumerate(s.group.tolist()):
        if not s.rewards[i].isnan():
            groups[number].append(i)
    yield from groups.values()
