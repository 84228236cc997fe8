"""Shaped rewards and the rollouts that are trained on, by hand and for any answers; faults of other projects."""

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
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.grouped import every_rollout
from vlrl.algo.tables import ADVANTAGES, BATCHES, SHAPINGS
from vlrl.methods.objectives.recompose import pf_ppo, rest, right, rorecomp
from vlrl.methods.objectives.shaping import CallCost

HALF = (1 + math.cos(math.pi / 2)) / 2  # 0.5
SHAPED = {
    # limit 10, buffer 2: free up to 8 tokens, -1 at 10
    "overlong": ("overlong", {}, [[1, 1, 0, 1, None]], {"lengths": [8, 9, 10, 4, 9]}, [1, 0.5, -1, 1, None]),
    "overlong, options": ("overlong", {"weight": 2.0, "limit": 20, "buffer": 8}, [[1, 1]], {"lengths": [16, 30]},
                          [0, -1]),
    "kimi_length": ("kimi_length", {}, [[1, 1, 0, 0, None], [1, 1]], {"lengths": [2, 6, 4, 10, 99, 3, 3]},
                    [1.5, 1, 0, -0.5, None, 1, 1]),
    "kimi_length, weight": ("kimi_length", {"weight": 0.5}, [[1, 1]], {"lengths": [2, 6]}, [1.25, 0.75]),
    "kimi_length, not yet": ("kimi_length", {"after": 4}, [[1, 1]], {"lengths": [2, 6], "step": 3}, [1, 1]),
    "kimi_length, begun": ("kimi_length", {"after": 4}, [[1, 1]], {"lengths": [2, 6], "step": 4}, [1.5, 0.5]),
    "length_bonus": ("length_bonus", {}, [[1, 0.05, 0.2, 1, None], [1, 0]],
                     {"lengths": [320, 400, 512, 513, 400, 400, 400]}, [1.2, 0.05, 0.4, 1, None, 1, 0]),
    "cosine": ("cosine", {"limit": 8}, [[1, 0, 1, 0, None]], {"lengths": [4, 4, 0, 8, 4]}, [1.5, -5, 2, -10, None]),
    "cosine, truncated": ("cosine", {"limit": 8, "exceed": -3.0}, [[1, 1]],
                          {"lengths": [8, 4], "truncated": torch.tensor([False, True])}, [1, -3]),
    # p 0.5, mean length of the correct 4, limit 10: budget 7; l = -3/7 and 1/7 and -6/7
    "dast": ("dast", {}, [[1, 0], [1, 1], [0, None]], {"lengths": [4, 8, 5, 5, 5, 5]},
             [1 + 1.5 / 7 + 0.5, -0.1, 1.5, 1.5, 0.9 * -0.5 - 0.1, None]),
    "dast, long": ("dast", {"limit": 100}, [[1, 1]], {"lengths": [2, 28]}, [1 + 0.5 * 13 / 15 + 0.5, 1.1]),
    "step_pruner": ("step_pruner", {}, [[1, 1, 0.4, -1, None], [0, 1]],
                    {"texts": ["a\n\nb<answer>x\n\ny", "a\n\nb\n\n c\n \nd", "a", "a", "a", "", ""]},
                    [1, 1 - 0.5 * 0.5, 0, -1, None, 0, 1]),
    # one cluster: 1 and 3 segments, z = -+1/sqrt(2)
    "grsp": ("grsp", {"clusters": 1}, [[1, 1]], {"texts": ["one two", "one. Wait two. But three"]},
             [1 + 0.1 / math.sqrt(2), 1 - 0.1 / math.sqrt(2)]),
    # short segments weigh 2/3, long ones 1/3: (2 short, 0 long) against (0 short, 2 long)
    "grsp, clusters": ("grsp", {"clusters": 2, "weight": 1.0}, [[1, 1, None]],
                       {"texts": ["a\n\nb", "a b c d\n\na b c d", "x"]},
                       [1 - (2 / 3 - 1 / 3) / math.sqrt(2), 1 + (2 / 3 - 1 / 3) / math.sqrt(2), None]),
    # roots 0, 1, 2, 3, 4; with quantiles of .25 low = 1 and high = 3: C = 1, 1, .5, 0, 0; a wrong form stays
    "call_cost": ("call_cost", {"alpha": 0.5, "quantile": 0.25}, [[1, 0, 1], [1, -1, None]],
                  {"parts": {"cost": [0, 1, 4, 9, 16, 100]}}, [1, 0.5, 0.75, 0.5, -1, None]),
    "call_cost, defaults": ("call_cost", {}, [[1, 0.5]], {"parts": {"cost": [0, 1]}}, [0.4 + 0.6, 0.2]),
    "call_cost, equal": ("call_cost", {}, [[1, 0]], {"parts": {"cost": [4, 4]}}, [0.7, 0.3]),
    "call_cost, a task without": ("call_cost", {"part": "price"}, [[1, 0.5]], {"parts": {"price": [4, None]}},
                                  [0.7, 0.5]),
    "grsp, wrong answers": ("grsp", {"clusters": 1}, [[0, 1, 0]], {"texts": ["a", "a\n\nb", "a\n\nb\n\nc"]}, [0, 1, 0]),
}


def shape(name, s, **options):
    """What a function, or a fresh object, makes of the rewards."""
    found = SHAPINGS[name]
    return found(**options)(s) if isinstance(found, type) else found(s, **options)


def test_by_hand():
    for case, (name, options, groups, more, expected) in SHAPED.items():
        found = shape(name, scores(groups, **more), **options).tolist()
        assert found == pytest.approx([math.nan if e is None else e for e in expected], abs=1e-9, nan_ok=True), case


def test_reasoning_is_what_counts_and_a_step_may_be_empty():
    texts = ["<think>a\n\nb</think>c\n\nd\n\ne<answer>x</answer>", "a\n\nb"]
    assert SHAPINGS["step_pruner"](scores([[1, 1]], texts=texts)).tolist() == [1, 1]
    assert all(len(shape(name, scores([], texts=[], parts={"cost": []}))) == 0 for name in SHAPINGS)


TEXT = st.lists(st.sampled_from(["a", "b", " ", "\n", "\n\n", ".", "but ", "so "]), max_size=20).map("".join)


@each("name", SHAPINGS)
@settings(max_examples=6)
@given(rows=st.lists(st.lists(st.tuples(st.one_of(st.none(), st.floats(-2, 2)), st.integers(0, 12), TEXT), min_size=1,
                              max_size=5), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_for_any_answers(name, rows, seed):
    """Finite; unscorable stays unscorable; order inside a group does not matter; other groups do not either."""
    flat = [row for group in rows for row in group]
    s = scores([[r for r, _, _ in g] for g in rows], lengths=[n for _, n, _ in flat], texts=[t for *_, t in flat],
               parts={"cost": [n for _, n, _ in flat]})
    found = shape(name, s)
    assert torch.equal(found.isnan(), s.rewards.isnan()) and not found.isinf().any()
    assert (found - s.rewards).nan_to_num().abs().max() < 15
    order = sorted(random.Random(seed).sample(range(len(flat)), len(flat)), key=lambda i: int(s.group[i]))
    moved = replace(s, rewards=s.rewards[order], lengths=s.lengths[order], texts=[s.texts[i] for i in order],
                    parts={"cost": s.parts["cost"][order]})
    assert torch.allclose(shape(name, moved), found[order], equal_nan=True)
    if name == "call_cost":  # what other groups cost is its measure
        return
    first = scores([[r for r, _, _ in rows[0]]], lengths=[n for _, n, _ in rows[0]], texts=[t for *_, t in rows[0]])
    assert torch.allclose(shape(name, first), found[:len(rows[0])], equal_nan=True)


def test_costs_are_measured_by_those_before_also_after_a_resume():
    """Roots 0 and 2; then 1 lies in their middle. Of a window of two the first costs are forgotten."""
    def at(cost):
        return scores([[1.0]], parts={"cost": [cost]})
    whole, short = CallCost(1.0, quantile=0.0), CallCost(1.0, window=2, quantile=0.0)
    for made in (whole, short):
        made(scores([[1.0, 1.0]], parts={"cost": [0, 4]}))
    resumed = CallCost(1.0, quantile=0.0)
    resumed.load_state_dict(whole.state_dict())
    assert whole(at(1)).tolist() == resumed(at(1)).tolist() == [0.5]
    assert short(at(1)).tolist() == [1.0]  # what it knows is 2 and 1
    assert resumed.state_dict() == {"seen": [0, 2, 1]}
    with pytest.raises(ValueError, match="no reward part 'cost'; the reward parts are: price"):
        CallCost()(scores([[1]], parts={"price": [1]}))
    with pytest.raises(ValueError, match="'cost' is -2, but a cost must be at least 0"):
        CallCost()(scores([[1]], parts={"cost": [-2]}))
    with pytest.raises(ValueError, match=r"quantile=0.5 must be below 0.5"):
        CallCost(quantile=0.5)


def recomposed(groups, lengths, step=6, **options):
    return rorecomp(scores(groups, lengths=lengths, step=step), **{"decay": 1, **options}).tolist()


def test_rorecomp_by_hand():
    groups, lengths = [[1, 1, 1, 0, 0, None], [1, 1], [0]], [5, 3, 4, 7, 9, 1, 2, 6, 4]
    assert recomposed(groups, lengths) == [False, True, True, False, True, False, True, False, True]
    assert recomposed(groups, lengths, keep=0.0) == [False] * 9
    assert recomposed(groups, lengths, keep=1.0) == [True] * 5 + [False] + [True] * 3
    assert recomposed([[1, 1, 1]], [4, 4, 9], keep=0.3) == [True, True, False], "ties are kept"
    assert recomposed([[0.4, 0.6]], [1, 1], correct=0.7, keep=0.5) == [True, True]
    assert every_rollout(scores([[1, None]])).all() and BATCHES["all"] is every_rollout
    # The area under (1 + cos) / 2 is half of its width; a step in which it passes a whole number is whole.
    def steps(**options):
        return [t for t in range(60) if all(rorecomp(scores([[1, 1]], lengths=[1, 2], step=t), **options).tolist())]
    found = steps(decay=40)
    assert len(found) == 20 and max(found) < 40
    assert len([t for t in found if t < 10]) > len([t for t in found if 20 <= t < 30])
    assert steps(decay=1, floor=0.1)[:3] == [5, 15, 25] and len(steps(decay=1, floor=1.0)) == 60


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, None]), st.integers(0, 9)), min_size=1, max_size=8),
       st.floats(0, 1), st.randoms())
def test_for_any_group(rows, keep, rng):
    """Order does not matter; at least the share is kept, and unscorable answers never are."""
    def of(rows):
        kept = recomposed([[r for r, _ in rows]], [n for _, n in rows], keep=keep)
        return dict(zip(map(id, rows), kept, strict=True))
    moved = rng.sample(rows, len(rows))
    found = of(rows)
    assert of(moved) == found
    assert not any(found[id(row)] for row in rows if row[0] is None)
    for kind in (0.0, 1.0):
        own = [row for row in rows if row[0] == kind]
        assert sum(found[id(row)] for row in own) >= keep * len(own) - 1e-9


def test_what_is_left_over():
    groups, lengths = [[1, 1, 1, 0, 0, None], [1, 1], [0]], [5, 3, 4, 7, 9, 1, 2, 6, 4]
    s = scores(groups, lengths=lengths, step=0)
    assert rest(s).tolist() == [True, False, False, True, False, False, False, True, False]
    assert rorecomp(s, floor=1.0).tolist() == [True] * 9
    buffered = rorecomp(s, floor=1.0, buffered=True)
    scorable = ~s.rewards.isnan()
    assert (buffered ^ rest(s)).tolist() == scorable.tolist() and not (buffered & rest(s)).any()
    assert right(s).tolist() == [True, True, True, False, False, False, True, True, False]


def test_policy_filtration_by_hand():
    s = scores([[0.5, 2.0, -1.0, 1.0, None], [3.0, 3.0]], step=4, seed=9)
    assert pf_ppo(s, "best_worst", keep=1.0).tolist() == [False, True, True, False, False, True, True]
    assert pf_ppo(s, "best_worst", keep=0.2).sum() == 2, "one of each group"
    assert pf_ppo(s, "square", keep=1.0).tolist() == [True] * 4 + [False, True, True]
    assert pf_ppo(scores([[0.0, 1.0]]), "square", keep=1.0).tolist() == [False, True]
    assert (pf_ppo(s) == pf_ppo(s)).all()


@each("policy expected", [
    ("best_random", [1 / 6, 4 / 6, 1 / 6]), ("square", [1 / 6, 4 / 6, 1 / 6]), ("best_worst", [0, 0.5, 0.5])])
def test_policy_filtration_draws_by_its_weights(policy, expected):
    """One of three: by .1, .4, .1; by 1, 4, 1; by 0, 1, 1."""
    counts = sum(pf_ppo(scores([[1.0, 2.0, -1.0]], step=step), policy, keep=0.1).double() for step in range(200))
    assert counts.sum() == 200
    assert (counts / 200).tolist() == pytest.approx(expected, abs=0.12)  # 3.5 standard errors
    other = [pf_ppo(scores([[1.0, 2.0, -1.0]], seed=seed), policy, keep=0.1).tolist() for seed in range(20)]
    assert len({*map(tuple, other)}) > 1, "the seed counts"


LENGTHS = [40.0, 90.0, 200.0, 400.0, 350.0, 120.0]
TEXTS = ["\n\n".join(["so then"] * n) + "<answer>1</answer>" for n in (1, 2, 3, 5, 4, 2)]
OF_ACCURACY = sorted({*SHAPINGS} - {"overlong", "call_cost"})
"""Shapings that pay right and wrong answers differently."""
ELSEWHERE = {"w_reinforce": "a right answer has a constant", "deepsearch": "reads right and wrong of a search alone"}
"""Advantages that do not compare rewards."""


def shaped(name, right):
    (shape,) = Algorithm(config.load("configs/quickstart.yaml", [f"algo.shaping=[{name}]"])).shaping
    s = scores([[float(r) for r in right]], lengths=LENGTHS, max_length=512, step=150, texts=TEXTS,
               outcome=torch.tensor(right), truncated=torch.zeros(6, dtype=torch.bool))
    return shape(s).tolist()


def test_a_reward_of_length_moves_with_the_accuracy():
    """VLM-R1#247: the length term was scaled by a constant in place of the accuracy."""
    for name in OF_ACCURACY:
        earned = [shaped(name, [i < right for i in range(6)]) for right in range(7)]
        assert all(len({round(rewards[i], 6) for rewards in earned}) > 1 for i in range(6)), name
        # being right never pays less than being wrong among the same others
        assert all(earned[i + 1][i] > earned[i][i] for i in range(6)), name


@each("name", sorted({*ADVANTAGES} - {*ELSEWHERE}))
def test_a_group_of_equal_fractions_has_advantage_zero(name):
    """slime, geo3k_vlm: nine tenths less the mean of nine tenths is not 0 where it is rounded."""
    critic = {"macro_gae": ["algo.critic={}", "algo.loss=ppo_macro"]}.get(name, ["algo.critic={}"])
    words = [f"algo.advantage={name}", *(critic if name.endswith("gae") else ())]
    algorithm = Algorithm(config.load("configs/quickstart.yaml", words))
    for size in (6, 7, 12, 24):
        lengths = [3 + (i % 4 if name != "rose" else 0) for i in range(size)]  # rose pays right answers by length
        given = algorithm.advantage(scores(
            [[0.9] * size], lengths=lengths, greedy=[0.9] * size, parts={"iou": [0.9] * size},
            part_weights={"iou": 1.0}, max_length=8, outcome=torch.ones(size, dtype=torch.bool),
            tokens=[np.arange(n) + 10 * i for i, n in enumerate(lengths)], masks=[np.ones(n, bool) for n in lengths],
            steps=[[(0, n, 0.9)] for n in lengths], per_token=[{"values": np.full(n, 0.9)} for n in lengths]))
        given = getattr(given, "advantages", given)
        flat = given if torch.is_tensor(given) else torch.cat([torch.as_tensor(a).flatten() for a in given])
        assert len(flat) >= size and bool((flat == 0).all()), size
