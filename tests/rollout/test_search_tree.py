"""The tree of a search: choices, values and advantages worked out by hand, and by another way on random trees."""

import math

import numpy as np
import pytest

from tests.algo.made import scores
from vlrl.methods.tree.advantage import deepsearch
from vlrl.methods.tree.search_tree import Node, Tree, search_nodes
from vlrl.methods.tree.settings import SearchSettings
from vlrl.types import Completion

MOST = 8
PAPER = {"explore": 2.0, "by_value": 0.4, "by_entropy": 0.0, "by_depth": 0.01, "least": 0.1}


def piece(before, ids, entropy=1.0, ends=False):
    """An answer that goes on with `ids`, each of log-probability -entropy."""
    known = np.concatenate([before.logprobs, np.full(len(ids), -entropy, np.float32)])
    tokens = np.concatenate([before.tokens, np.array(ids, np.int64)])
    return Completion(tokens=tokens, logprobs=known, loss_mask=np.ones(len(tokens), bool), text=str(tokens),
                      finish_reason="stop" if ends else "length")


EMPTY = Completion(tokens=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32), loss_mask=np.zeros(0, bool), text="",
                   finish_reason="length")


def tree_of(**options):
    return Tree(SearchSettings(**{"width": 2, "depth": 4, **PAPER, **options}), EMPTY)


def grow(tree, *pieces):
    """Grows the current node by (ids, entropy, right), right = "" for what has not ended; returns its children."""
    node = tree.current
    made = [piece(node.written, ids, entropy, right != "") for ids, entropy, right in pieces]
    ends = tree.grow(made, MOST)
    judged = {str(c.tokens): right for c, (_, _, right) in zip(made, pieces, strict=True)}
    tree.judge(ends, [judged[end.written.text] for end in ends])
    return node.children


def searched():
    """The tree of the golden values, and its nodes by letter."""
    tree = tree_of()
    a, b = grow(tree, ([1, 1], 1.0, ""), ([2, 2], 1.0, ""))
    assert tree.current is a  # both have Q = 0 while the root has no visit: the first
    c, d = grow(tree, ([3, 3], 1.0, ""), ([4, 4], 1.0, False))
    # d: -1, a: -2/3, root: -1/3. c: .4 tanh(-1/3) + .01 sqrt(2/4) = -.1215; b: .4 tanh(-1/3) + .01 sqrt(1/4) = -.1236
    assert tree.promise(c) == pytest.approx(-0.121534, abs=1e-6)
    assert tree.promise(b) == pytest.approx(-0.123605, abs=1e-6) and tree.current is c
    e, f = grow(tree, ([5, 5], 2.0, True), ([6, 6], 0.5, True))
    # f, of the lower entropy: 1, c: 3/4, and in place of what was negative: a 1/2, root 1/4
    assert (f.backed_up, e.backed_up) == (True, False) and tree.current is b
    g, h = grow(tree, ([1, 7], 1.0, ""), ([1, 8], 1.0, ""))
    assert tree.current is g
    i, j = grow(tree, ([5, 5], 0.3, False), ([6, 6], 0.2, False))
    # j: -1, g: -3/4, b: -1/2; the root stays at 1/4
    return tree, dict(zip("abcdefghij", (a, b, c, d, e, f, g, h, i, j), strict=True))


def test_a_search_by_hand():
    tree, nodes = searched()
    assert tree.current is nodes["h"]
    assert [next(k for k, n in nodes.items() if n is end) for end in tree.ends] == ["d", "f", "j"]
    value = {"a": 1 / 2, "b": -1 / 2, "c": 3 / 4, "d": -1, "e": 0, "f": 1, "g": -3 / 4, "h": 0, "i": 0, "j": -1}
    visits = {"a": 3, "b": 2, "c": 2, "d": 1, "e": 0, "f": 1, "g": 2, "h": 1, "i": 0, "j": 1}
    assert {k: n.value for k, n in nodes.items()} == pytest.approx(value)
    assert {k: n.visits for k, n in nodes.items()} == visits
    assert (tree.root.value, tree.root.visits) == (0.25, 3) and nodes["a"].q == pytest.approx(1 / 6)
    answer = tree.ends[1].completion()
    assert [(n.start, n.end, n.value, n.visits) for n in search_nodes(answer.extra)] == [
        (0, 2, pytest.approx(1 / 2), 3), (2, 4, pytest.approx(3 / 4), 2), (4, 6, 1.0, 1)]
    assert answer.tokens.tolist() == [1, 1, 3, 3, 6, 6] and answer.turns == ()


def credited(tree, temperature, rewards=None):
    answers = [end.completion() for end in tree.ends]
    rewards = rewards or [float(end.right) for end in tree.ends]
    s = scores([rewards], tokens=[c.tokens for c in answers], extra=[c.extra for c in answers])
    return [values.tolist() for values in deepsearch(s, temperature)]


def test_advantages_by_hand():
    tree, _ = searched()
    # the ends have -1, 1 and -1: mean -1/3
    a, b, c, g = 1 / 2 + 1 / 3, -1 / 2 + 1 / 3, 3 / 4 + 1 / 3, -3 / 4 + 1 / 3
    wanted = [[a, a, -2 / 3, -2 / 3], [a, a, c, c, 4 / 3, 4 / 3], [b, b, g, g, -2 / 3, -2 / 3]]
    for values, own in zip(credited(tree, None), wanted, strict=True):
        assert values == pytest.approx(own, abs=1e-9)
    soft = math.tanh(0.5 / 2) + 1 / 3
    assert credited(tree, 2.0)[0] == pytest.approx([soft, soft, -2 / 3, -2 / 3], abs=1e-9)
    # an answer that cannot be scored is in no mean, and has none
    known = credited(tree, None, [0.0, 1.0, None])
    assert known[2] == [0.0] * 6 and known[1][-1] == pytest.approx(1.0)


def test_the_choice_among_new_pieces_and_of_the_frontier():
    tree = tree_of(width=3)
    a, b = grow(tree, ([1], 1.0, ""), ([2], 1.0, ""), ([1], 3.0, ""))
    assert a.visits == 2 and b.visits == 1 and tree.current is a  # equal pieces are one; the root has no visit
    c, d = grow(tree, ([3], 1.0, ""), ([3], 1.0, ""), ([4], 1.0, ""))
    assert tree.uct(c) == pytest.approx(2 * math.sqrt(math.log(2) / 2)) and tree.current is d
    assert tree.uct(d) == pytest.approx(2 * math.sqrt(math.log(2)))
    d.value, d.visits, a.visits = 1.0, 2, 3
    assert tree.uct(d) == pytest.approx(0.5 + 2 * math.sqrt(math.log(3) / 2))
    assert tree_of(explore=0.0).uct(Node(EMPTY, a, 2, value=1.0, visits=4)) == 0.25
    tree = tree_of(by_entropy=1.0)
    _, c, _ = grow(tree, ([1], 1.0, ""), ([2], 3.0, ""), ([3], 1.0, False))
    assert tree.current is c and c.entropy == pytest.approx(3.0)
    assert Node(piece(c.written, [5, 6], 1.0), c, 2).entropy == pytest.approx(1.0)  # of its own piece


def test_which_end_is_backed_up():
    for ends, first in (([(1.0, False), (2.0, True), (3.0, True)], 1), ([(1.0, None), (2.0, False), (1.5, False)], 2),
                        ([(1.0, None), (0.5, None)], 1), ([(1.0, True), (1.0, True)], 0)):
        tree = tree_of(width=3)
        children = grow(tree, *(([i], entropy, right) for i, (entropy, right) in enumerate(ends, 1)))
        assert tree.ends == [children[first]] and tree.current is None
        assert (tree.root.visits, tree.root.value) == (1, {True: 1.0, False: -1.0, None: 0.0}[ends[first][1]] / 2)
    tree = tree_of(width=3)
    first, second, third = grow(tree, ([1], 2.0, False), ([2], 1.0, False), ([3], 3.0, True))
    assert tree.ends == [third] and tree.back_up_waiting() and tree.back_up_waiting() and not tree.back_up_waiting()
    assert tree.ends == [third, second, first] and tree.root.value == 0.5  # nothing negative replaces it
    tree.restart()
    assert tree.current is tree.root
    *_, again = grow(tree, ([1], 2.0, False))
    assert tree.ends[-1] is again and len(tree.root.children) == 4
    tree = tree_of()
    assert [node.ended for node in grow(tree, ([1] * (MOST - 1), 1.0, ""))] == [False]
    assert [end.ended for end in tree.grow([piece(tree.current.written, [1])], MOST)] == [True]


class Play:
    """What is written where, by the number of the piece alone."""

    def __init__(self, seed, width, depth):
        self.seed, self.width, self.depth = seed, width, depth

    def pieces(self, path, count):
        """[width] (token, entropy, ends, right) of the `count`-th growth in all, behind the tokens of `path`."""
        rng = np.random.default_rng([self.seed, count, *path])
        last = len(path) == self.depth - 1
        return [(int(rng.integers(1, 5)), float(np.float32(rng.random())), bool(last or rng.random() < 0.3),
                 [True, False, False, None][rng.integers(4)]) for _ in range(self.width)]


def ours(play, settings, wanted):
    tree, count = Tree(settings, EMPTY), 0
    while len(tree.ends) < wanted:
        node = tree.current
        drawn = play.pieces(node.written.tokens.tolist(), count)
        count += 1
        ends = tree.grow([piece(node.written, [token], entropy, ends) for token, entropy, ends, _ in drawn], 99)
        tree.judge(ends, [right for _, _, ended, right in drawn if ended])
        while len(tree.ends) < wanted and tree.current is None and tree.back_up_waiting():
            pass
        tree.restart()
    return tree


def theirs(play, s, wanted):
    """The same in plain records: parents by number, values as sums over a log of what was backed up."""
    nodes = [{"up": None, "path": (), "h": [], "end": False, "kids": False, "n": 0, "v": 0.0, "done": False}]
    order, now, growth = [], 0, 0

    def line(k):
        return [k] if nodes[k]["up"] is None else [*line(nodes[k]["up"]), k]

    def q(k):
        return nodes[k]["v"] / nodes[k]["n"] if nodes[k]["n"] else 0.0

    def back(choice):
        best = sorted(choice, key=lambda k: ([True, False, None].index(nodes[k]["right"]), np.mean(nodes[k]["h"])))[0]
        nodes[best]["done"] = True
        order.append(best)
        whole = line(best)
        for place, k in enumerate(whole, 1):
            nodes[k]["n"] += 1
            share = max(place / len(whole), s.least)
            if nodes[best]["right"] is True:
                nodes[k]["v"] = max(nodes[k]["v"], 0.0) + share
            elif nodes[best]["right"] is False and nodes[k]["v"] <= 0:
                nodes[k]["v"] -= share

    def open_nodes():
        def walk(k):
            below = [c for c in range(len(nodes)) if nodes[c]["up"] == k]
            return [k] + [x for c in sorted(below, key=lambda c: (nodes[c]["growth"], nodes[c]["end"], c))
                          for x in walk(c)]
        return [k for k in walk(0)[1:] if not nodes[k]["end"] and not nodes[k]["kids"]]

    while len(order) < wanted:
        fresh = []
        for token, entropy, ends, right in play.pieces(nodes[now]["path"], growth):
            path = (*nodes[now]["path"], token)
            twin = next((k for k in fresh if nodes[k]["path"] == path and not nodes[k]["end"] and not ends), None)
            if twin is None:
                nodes.append({"up": now, "path": path, "h": [*nodes[now]["h"], entropy], "end": ends, "right": right,
                              "kids": False, "n": int(not ends), "v": 0.0, "done": False, "growth": growth})
                fresh.append(len(nodes) - 1)
            else:
                nodes[twin]["n"] += 1
        nodes[now]["kids"], growth = True, growth + 1
        ended = [k for k in fresh if nodes[k]["end"]]
        if ended:
            back(ended)
            scored = [(s.by_value * math.tanh(q(nodes[k]["up"])) + s.by_entropy * nodes[k]["h"][-1]
                       + s.by_depth * (len(nodes[k]["path"]) / s.depth) ** 0.5, k) for k in open_nodes()]
        else:
            up = nodes[now]["n"]
            scored = [(q(k) + (s.explore * (math.log(up) / nodes[k]["n"]) ** 0.5 if up else 0.0), k) for k in fresh]
        top = max((value for value, _ in scored), default=None)
        now = next((k for value, k in scored if value == top), None)
        while now is None and len(order) < wanted and (
                left := [k for k in range(len(nodes)) if nodes[k]["end"] and not nodes[k]["done"]]):
            back(left)
        now = 0 if now is None else now
    return nodes, order, line


def test_another_way_finds_the_same():
    for seed in range(60):
        both_ways(seed, np.random.default_rng(seed))


def both_ways(seed, rng):
    s = SearchSettings(width=int(rng.integers(2, 5)), depth=int(rng.integers(2, 6)), explore=float(rng.random() * 3),
                       by_value=float(rng.random()), by_entropy=float(rng.random() * (seed % 2)),
                       by_depth=float(rng.random()), least=float(rng.random() / 2))
    play, wanted = Play(seed, s.width, s.depth), int(rng.integers(1, 9))
    tree, (nodes, order, line) = ours(play, s, wanted), theirs(play, s, wanted)
    assert [tuple(end.written.tokens.tolist()) for end in tree.ends] == [nodes[k]["path"] for k in order]
    worth = {True: 1.0, False: -1.0, None: 0.0}
    mean = np.mean([worth[nodes[k]["right"]] for k in order])
    for end, k, found in zip(tree.ends, order, credited(tree, 1.0, [0.0] * wanted), strict=True):
        mine, other = search_nodes(end.completion().extra), [nodes[x] for x in line(k)[1:]]
        assert [n.visits for n in mine] == [x["n"] for x in other]
        assert [n.value for n in mine] == pytest.approx([x["v"] for x in other], abs=1e-6)
        soft = [math.tanh(x["v"]) for x in other[:-1]] + [worth[nodes[k]["right"]]]
        assert found == pytest.approx([value - mean for value in soft], abs=1e-6)
