"""Advantages against values worked out by hand, and what must hold for any rewards."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algo.made import scores
from tests.tables import each
from vlrl.algo.tables import ADVANTAGES
from vlrl.methods.objectives import advantage as group_advantage
from vlrl.methods.objectives import turn_advantage
from vlrl.methods.objectives.advantage import EmaStd
from vlrl.methods.tree import advantage as tree_advantage
from vlrl.methods.tree.search_tree import SearchNode, as_extra

ROOT = math.sqrt
STD = ROOT(14 / 3) + 1e-4  # rewards 1 2 3 6: mean 3, deviations -2 -1 0 3, squares 14, Bessel variance 14/3
PARTS = {"parts": {"a": [0, 1, 1, 0, 5], "b": [2, 4, 3, 3, None]}, "part_weights": {"a": 1.0, "b": 0.5}}
S1 = 0.5 / (ROOT(0.5) + 1e-4) + 0.5 * 1 / (ROOT(2) + 1e-4)  # |S| of the first group: both parts differ
S2 = 0.5 / (ROOT(0.5) + 1e-4)  # of the second one: b is settled
SSTD = ROOT((2 * S1**2 + 2 * S2**2) / 3) + 1e-4

CASES = {
    "grpo": ("grpo", {}, [[1, 2, 3, 6]], {}, [-2 / STD, -1 / STD, 0, 3 / STD]),
    "grpo, eps": ("grpo", {"eps": 1.0}, [[0, 1]], {}, [-0.5 / (ROOT(0.5) + 1), 0.5 / (ROOT(0.5) + 1)]),
    "dr_grpo": ("dr_grpo", {}, [[1, 2, 3, 6], [1, None, 2]], {}, [-2, -1, 0, 3, -0.5, 0, 0.5]),
    # 1 2 3 6 0 0: mean 2, squares 1 0 1 16 4 4 = 26, Bessel variance 5.2
    "batch_std": ("batch_std", {}, [[1, 2, 3, 6], [0, 0]], {}, [d / (ROOT(5.2) + 1e-4) for d in (-2, -1, 0, 3, 0, 0)]),
    "gdpo": ("gdpo", {}, [[1, 2], [3, 4, None]], PARTS, [-S1 / SSTD, S1 / SSTD, S2 / SSTD, -S2 / SSTD, 0]),
    # weights 1 and 3 of one part: S = -z, 3z, mean z
    "gdpo, weights": ("gdpo", {"eps": 0.0}, [[0, 1]], {"parts": {"a": [0, 1]}, "part_weights": {"a": [1, 3]}},
                      [-2 / ROOT(8), 2 / ROOT(8)]),
    "rloo": ("rloo", {}, [[1, 2, 3, 6], [1, None, 2]], {}, [-8 / 3, -4 / 3, 0, 4, -1, 0, 1]),
    "rloo, normalize": ("rloo", {"normalize": True}, [[0, 2], [0, 4]], {},
                        [d / (ROOT(40 / 3) + 1e-4) for d in (-2, 2, -4, 4)]),
    # x = -1 on one token, 1 on three: mean 0.5, squares 2.25 + 3 * 0.25 = 3 over 4 - 1
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {}, [[0, 2]], {"lengths": [1, 3]}, [-1.5, 0.5]),
    "remax": ("remax", {}, [[1, 0], [1, None]], {"greedy": [0.25, 0.25, None, None]}, [0.75, -0.25, 0, 0]),
    "gpg": ("gpg", {}, [[0, 1], [1, 1], [2, 2, None]], {}, [-1.5, 1.5, 0, 0, 0, 0, 0]),  # 6 scorable, 2 in valid groups
    "gpg, unscorable": ("gpg", {}, [[0, 1, None]], {}, [-0.5, 0.5, 0]),
    "gpg, f_norm": ("gpg", {"f_norm": 2.0}, [[0, 1]], {}, [-0.25, 0.25]),
    "opo": ("opo", {}, [[0, 1, 1, None]], {"lengths": [1, 1, 2, 9]}, [-0.75, 0.25, 0.25, 0]),
    "opo, nothing trained": ("opo", {}, [[0, 1]], {"lengths": [0, 0]}, [-0.5, 0.5]),
    "pass_at_k": ("pass_at_k", {}, [[0.2, 0.9, 0.5], [1, 1, 0], [None, 3]], {}, [0, 0.4, 0, 0, 0, 0, 0, 0]),
    # 0.2 0.9 0.5: mean 1.6 / 3, squares 0.74 / 3, Bessel variance 0.37 / 3
    "pass_at_k, normalize": ("pass_at_k", {"normalize": True}, [[0.2, 0.9, 0.5]], {},
                             [0, 0.4 / (ROOT(0.37 / 3) + 1e-6), 0]),
    "maxrl": ("maxrl", {}, [[0, 0, 0, 1], [0, 0], [-1, -3]], {}, [-1, -1, -1, 3, 0, 0, 0, 0]),
    "w_reinforce": ("w_reinforce", {}, [[1, 0, None]], {}, [0.1, -1, 0]),
    "w_reinforce, options": ("w_reinforce", {"positive": 1.0, "correct": 1.5, "part": "a"}, [[9, 9]],
                             {"parts": {"a": [2, 1]}}, [1, -1]),
    "nsr": ("nsr", {}, [[1, 0, None]], {}, [0, -1, 0]),
}


def test_by_hand():
    for case, (name, options, groups, more, expected) in CASES.items():
        found = ADVANTAGES[name](scores(groups, **more), **options)
        assert found.dtype == torch.float64 and found.tolist() == pytest.approx(expected, abs=1e-7), case


def test_reinforce_pp_by_hand():
    more = {"tokens": [[5, 6], [7]]}
    # gamma 0.5: returns 0.5 1 | 0; mean 0.5, variance (0 + 0.25 + 0.25) / 2
    found = group_advantage.reinforce_pp(scores([[1, 0]], **more), gamma=0.5)
    assert [f.tolist() for f in found] == [pytest.approx([0, 1], abs=1e-6), pytest.approx([-1], abs=1e-6)]
    # kl 1 2 | 0 at 0.1: paid -0.1 0.8 | 0, returns 0.7 0.8 | 0; mean 0.5, squares 0.04 0.09 0.25 over 2
    found = group_advantage.reinforce_pp(scores([[1, 0]], **more, kl=[np.array([1.0, 2.0]), np.zeros(1)], kl_coef=0.1))
    assert torch.cat(found).tolist() == pytest.approx([d / ROOT(0.19) for d in (0.2, 0.3, -0.5)], abs=1e-6)
    masks = [np.array([True, False, True]), np.ones(1, bool), np.ones(2, bool)]
    s = scores([[1, 0, None]], tokens=[[5, 0, 6], [7], [8, 9]], masks=masks)
    assert [f.tolist() for f in group_advantage.reinforce_pp(s, gamma=0.5)] == [
        pytest.approx([0, 0, 1], abs=1e-6), pytest.approx([-1], abs=1e-6), [0, 0]]


def test_tempo_by_hand():
    found = tree_advantage.tempo(scores([[1, 0, 0, None]], tokens=[[1, 2, 3], [1, 2, 4], [1, 5], [1, 5]]))
    # V: 1/3 at the root and after 1; 1/2 after 1 2; 0 after 1 5; std of 1 0 0 is sqrt(1/3)
    expected = [[2 / 3, 2 / 3 + 1 / 6, 2 / 3 + 1 / 2], [-1 / 3, -1 / 3 + 1 / 6, -1 / 3 - 1 / 2], [-1 / 3, -2 / 3],
                [0, 0]]
    for values, wanted in zip(found, expected, strict=True):
        assert values.tolist() == pytest.approx([w / (ROOT(1 / 3) + 1e-4) for w in wanted], abs=1e-9)
    masked = scores([[1, 0]], tokens=[[1, 2], [1, 3]], masks=[np.array([True, False])] * 2)
    assert [v.tolist() for v in tree_advantage.tempo(masked)] == [
        pytest.approx([s / (ROOT(0.5) + 1e-4), 0]) for s in (0.5, -0.5)]


TREE = [[1, 2, 3, 3], [1, 2, 4], [1, 5], [6, 7, 8]]
"""Root: {1: {2: {3 3, 4}, 5}, 6 7 8}."""


def test_rose_and_treerl_by_hand():
    """Of the right answers of 4 and 2 tokens the long one is paid .8; what else it does is seen below."""
    found = tree_advantage.rose(scores([[1, 0, 1, 0]], tokens=TREE, lengths=[4, 3, 2, 3]))
    assert found[0].tolist() == pytest.approx([.6 - .45, .4 - .6, .4, .4], abs=1e-9)
    assert found[3].tolist() == pytest.approx([-.45] * 3, abs=1e-9)
    masks = [np.array([False, True, True, False]), np.ones(3, bool), np.ones(2, bool), np.ones(3, bool)]
    found = tree_advantage.treerl(scores([[1, 0, None, 0]], tokens=TREE, masks=masks))
    # without the third: V of the root 1/3, after 1 and after 1 2 1/2
    assert found[0].tolist() == pytest.approx([0, 2 / 6 / ROOT(2), 2 / 3 + 1 / 2, 0], abs=1e-9)
    assert found[2].tolist() == [0, 0]


def nodes(*found):
    """(end, value) of the nodes of an answer."""
    starts = [0, *(end for end, _ in found)]
    return as_extra([SearchNode(start, end, value, 1) for start, (end, value) in zip(starts, found, strict=False)])


def test_deepsearch_by_hand():
    tokens = [[1, 2, 3, 3], [1, 2, 4], [6, 7, 8], [9]]
    masks = [np.ones(4, bool), np.array([True, False, True]), np.ones(3, bool), np.ones(1, bool)]
    searched = {"extra": [nodes((2, 0.5), (4, 1.0)), nodes((2, 0.5), (3, -1.0)), nodes((1, -0.75), (3, -1.0)), {}]}
    s = scores([[1, 0, 0, 0]], tokens=tokens, masks=masks, **searched)
    # the ends: 1 -1 -1, and -1 for a wrong answer that was not searched for; mean -1/2
    found = tree_advantage.deepsearch(s, temperature=None)
    for values, wanted in zip(found, [[1, 1, 3 / 2, 3 / 2], [1, 0, -1 / 2], [-1 / 4, -1 / 2, -1 / 2], [-1 / 2]],
                              strict=True):
        assert values.tolist() == pytest.approx(wanted, abs=1e-9)
    soft = tree_advantage.deepsearch(s, temperature=0.5)
    assert soft[0].tolist() == pytest.approx([math.tanh(1) + 1 / 2] * 2 + [3 / 2] * 2, abs=1e-9)
    assert tree_advantage.deepsearch(s)[2].tolist()[0] == pytest.approx(math.tanh(-0.75) + 1 / 2, abs=1e-9)
    # without the third, which nobody can score: the mean is -1/3
    known = tree_advantage.deepsearch(replace(s, rewards=torch.tensor([1.0, 0.0, torch.nan, 0.0])), temperature=None)
    assert known[2].tolist() == [0, 0, 0] and known[0].tolist()[-1] == pytest.approx(4 / 3, abs=1e-9)
    # right and wrong alone: what the task says, not the reward
    plain = scores([[0.3, 0.9], [0, 0]], tokens=[[1], [2, 3], [4], [5]], outcome=torch.tensor([True, False] * 2))
    assert [v.tolist() for v in tree_advantage.deepsearch(plain)] == [[1], [-1, -1], [1], [-1]]


def test_credit_of_nodes_by_another_way():
    """Values of prefixes by looking them up: rose adds up to R - V(root), treerl is the same on each prefix."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        tokens = [rng.integers(0, 2, rng.integers(1, 7)).tolist() for _ in range(rng.integers(2, 8))]
        rewards = rng.integers(0, 3, len(tokens)) / 2
        s = scores([rewards.tolist()], tokens=tokens)
        s = replace(s, outcome=torch.zeros(len(tokens), dtype=torch.bool))
        def through(prefix, tokens=tokens, rewards=rewards):
            return [r for t, r in zip(tokens, rewards, strict=True) if t[:len(prefix)] == prefix]
        rose, treerl, root, everyone = tree_advantage.rose(s), tree_advantage.treerl(s), rewards.mean(), len(tokens)
        for i, own in enumerate(tokens):
            before, edge, leaves = root, root, everyone
            for t in range(len(own)):
                here = through(own[:t + 1])
                if len(here) < leaves:
                    # answers that end here go on to nowhere: the value before is that of all who came here
                    before, edge, leaves = np.mean(through(own[:t])), np.mean(here), len(here)
                parted = leaves < everyone
                wanted = [edge - before, (2 * edge - root - before) / np.sqrt(leaves)] if parted else [0, 0]
                assert [float(rose[i][t]), float(treerl[i][t])] == pytest.approx(wanted, abs=1e-9)


def test_ema_std_by_hand():
    ema = EmaStd(decay=0.9, eps=0.0)
    # first step: m1 = m2 = 0.5, std 0.5
    assert ema(scores([[0, 1], [1, 0, None]])).tolist() == pytest.approx([-1, 1, 1, -1, 0])
    # 1 1 1 0: m1 = 0.45 + 0.075, m2 the same
    std = ROOT(0.525 - 0.525**2)
    assert ema(scores([[1, 1], [1, 0]])).tolist() == pytest.approx([0, 0, 0.5 / std, -0.5 / std])
    # rewards 0 and 100: |A| > 5, so its own std, 50
    wild = EmaStd(decay=0.999999)
    wild.moments = {"x": (0.0, 0.01)}
    assert wild(scores([[0, 100], [0.1, 0.3]])).tolist()[:2] == pytest.approx([-1, 1], abs=1e-6)
    again, s = EmaStd(decay=0.9, eps=0.0), scores([[0.3, 0.4]])
    again.load_state_dict(ema.state_dict())
    assert again(s).tolist() == ema(s).tolist() and again.state_dict() == ema.state_dict()
    # tasks are kept apart, and a settled one has no infinite advantage
    two = EmaStd(eps=0.0)
    s = scores([[0, 1], [0, 10]], task=torch.tensor([0, 0, 1, 1]), task_names=["a", "b"])
    assert two(s).tolist() == pytest.approx([-1, 1, -1, 1])
    assert {k: round(v[0], 6) for k, v in two.moments.items()} == {"a": 0.5, "b": 5.0}
    settled = EmaStd()
    assert settled(scores([[0.1] * 3])).tolist() == [0, 0, 0]
    assert all(math.isfinite(a) for a in settled(scores([[0.1, 0.1, 0.1001]])))


REWARD = st.one_of(st.none(), st.floats(-10, 10), st.sampled_from([0.0, 1.0]))
GROUPS = st.lists(st.lists(REWARD, min_size=1, max_size=6), min_size=1, max_size=4)
CENTRED = ("grpo", "dr_grpo", "batch_std", "rloo", "gpg", "ema_std")
"""Their sum over every group is 0."""
NO_BASELINE = ("w_reinforce", "nsr", "remax", "reinforce_pp", "reinforce_pp_baseline")
"""Equal rewards of a group may still have an advantage."""


def rollouts(groups, draw=0):
    """Scores with all that any function looks at."""
    rng = random.Random(draw)
    flat = [r for g in groups for r in g]
    tokens = [[rng.randrange(3) for _ in range(rng.randint(1, 5))] for _ in flat]
    return scores(groups, lengths=[len(t) for t in tokens], greedy=[0.25] * len(flat), tokens=tokens,
                  parts={"all": flat}, part_weights={"all": 1.0},
                  steps=[[(0, len(t), 0.1 * sum(t))] for t in tokens])


WITHOUT_CRITIC = [name for name in ADVANTAGES if not name.endswith("gae")]  # see test_gae.py


def values(name, s):
    """[R] advantages; the sum over its tokens where they differ."""
    found = ADVANTAGES[name]
    found = found()(s) if isinstance(found, type) else found(s)
    return found.tolist() if isinstance(found, torch.Tensor) else [float(f.sum()) for f in found]


@each("name", WITHOUT_CRITIC)
@settings(max_examples=8)
@given(groups=GROUPS, seed=st.integers(0, 99))
def test_for_any_rewards(name, groups, seed):
    s = rollouts(groups, seed)
    found = values(name, s)
    assert all(math.isfinite(a) for a in found)
    at = 0
    for group in groups:
        own, at = found[at:at + len(group)], at + len(group)
        assert all(a == 0 for a, r in zip(own, group, strict=True) if r is None)
        if name not in (*NO_BASELINE, "rose", "clip_delta") and len({r for r in group if r is not None}) < 2:
            assert not any(own), "a group without preference"  # to rose lengths are one
        if name in CENTRED:
            assert abs(sum(own)) < 1e-6 * max(1, *map(abs, own)), "the sum of a group"
    order = random.Random(seed).sample(range(len(found)), len(found))
    order.sort(key=lambda i: int(s.group[i]))
    moved = replace(s, rewards=s.rewards[order], lengths=s.lengths[order], tokens=[s.tokens[i] for i in order],
                    masks=[s.masks[i] for i in order], turns=[s.turns[i] for i in order],
                    steps=[s.steps[i] for i in order], parts={"all": s.parts["all"][order]})
    assert values(name, moved) == pytest.approx([found[i] for i in order], rel=1e-6, abs=1e-7)


def test_clip_delta_by_hand(caplog):
    """eta = .5, the mean of .2, .8, .5; what is above it, or of an unscorable answer, earns nothing."""
    s = scores([[1, 0, None]], masks=[np.array(m, bool) for m in ([1, 1, 0, 1, 1], [1, 1], [1])],
               steps=[[(0, 2, 0.2), (2, 4, 0.8)], [(0, 1, 0.5)], [(0, 1, -9.0)]])
    found = group_advantage.clip_delta(s, normalize=False)
    assert [a.tolist() for a in found] == [pytest.approx([0.5 - 0.03] * 2 + [0, 0.5, 0.5]), [-0.5, -0.5], [0]]
    raised = group_advantage.clip_delta(s, scale=2.0, eta=0.6, eps=0.0)
    a = 0.5 / 0.5 ** 0.5
    assert [x.tolist() for x in raised[:2]] == [pytest.approx([a - 0.8] * 2 + [0, a, a]), pytest.approx([-a - 0.2, -a])]
    once, often = (scores([[1, 0]], masks=[np.ones(6, bool)] * 2, steps=[steps, [(0, 6, 0.1)]])
                   for steps in ([(0, 6, 0.9)], [(0, 2, 0.9), (2, 4, 0.9), (4, 6, 0.9)]))
    assert [group_advantage.clip_delta(s, eta=0.5)[0].tolist() for s in (once, often)] == [
        group_advantage.clip_delta(replace(once, steps=[[], []]), eta=0.5)[0].tolist()] * 2
    turn_advantage._warned.clear()
    group_advantage.clip_delta(replace(once, steps=[[], []]))
    assert "no answer has step values" in caplog.text


def test_a_step_without_rollouts_and_an_unknown_part():
    empty = scores([], tokens=[], parts={}, greedy=[])
    assert all(values(name, empty) == [] for name in WITHOUT_CRITIC)
    with pytest.raises(ValueError, match="no reward part 'iou'; the reward parts are: a"):
        group_advantage.w_reinforce(scores([[1]], parts={"a": [1]}), part="iou")
