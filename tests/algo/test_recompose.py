"""Which rollouts RoRecomp trains on."""


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algo.made import scores
from vlrl.algo.grouped import every_rollout
from vlrl.algo.tables import BATCHES
from vlrl.methods.objectives.recompose import pf_ppo, rest, right, rorecomp


def trained(groups, lengths, step=6, **options):
    return rorecomp(scores(groups, lengths=lengths, step=step), **{"decay": 1, **options}).tolist()


def test_by_hand():
    groups, lengths = [[1, 1, 1, 0, 0, None], [1, 1], [0]], [5, 3, 4, 7, 9, 1, 2, 6, 4]
    assert trained(groups, lengths) == [False, True, True, False, True, False, True, False, True]
    assert trained(groups, lengths, keep=0.0) == [False] * 9
    assert trained(groups, lengths, keep=1.0) == [True] * 5 + [False] + [True] * 3
    assert trained([[1, 1, 1]], [4, 4, 9], keep=0.3) == [True, True, False], "ties are kept"
    assert trained([[0.4, 0.6]], [1, 1], correct=0.7, keep=0.5) == [True, True]
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
        return dict(zip(map(id, rows), trained([[r for r, _ in rows]], [n for _, n in rows], keep=keep), strict=True))
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


@pytest.mark.parametrize(("policy", "expected"), [
    ("best_random", [1 / 6, 4 / 6, 1 / 6]), ("square", [1 / 6, 4 / 6, 1 / 6]), ("best_worst", [0, 0.5, 0.5])])
def test_policy_filtration_draws_by_its_weights(policy, expected):
    """One of three: by .1, .4, .1; by 1, 4, 1; by 0, 1, 1."""
    counts = sum(pf_ppo(scores([[1.0, 2.0, -1.0]], step=step), policy, keep=0.1).double() for step in range(400))
    assert counts.sum() == 400
    assert (counts / 400).tolist() == pytest.approx(expected, abs=0.085)  # 3.5 standard errors
    other = [pf_ppo(scores([[1.0, 2.0, -1.0]], seed=seed), policy, keep=0.1).tolist() for seed in range(20)]
    assert len({*map(tuple, other)}) > 1, "the seed counts"
