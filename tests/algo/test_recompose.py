"""Which rollouts RoRecomp trains on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algo.made import scores
from vlrl.algo.recompose import BATCHES, rorecomp, whole


def trained(groups, lengths, step=6, **options):
    return rorecomp(scores(groups, lengths=lengths, step=step), **{"decay": 1, **options}).tolist()


def test_by_hand():
    groups, lengths = [[1, 1, 1, 0, 0, None], [1, 1], [0]], [5, 3, 4, 7, 9, 1, 2, 6, 4]
    assert trained(groups, lengths) == [False, True, True, False, True, False, True, False, True]
    assert trained(groups, lengths, keep=0.0) == [False] * 9
    assert trained(groups, lengths, keep=1.0) == [True] * 5 + [False] + [True] * 3
    assert trained([[1, 1, 1]], [4, 4, 9], keep=0.3) == [True, True, False], "ties are kept"
    assert trained([[0.4, 0.6]], [1, 1], correct=0.7, keep=0.5) == [True, True]
    assert whole(scores([[1, None]])).all() and BATCHES["all"] is whole


def test_compensation_becomes_rare():
    """The area under (1 + cos) / 2 is half of its width; a step in which it passes a whole number is whole."""
    def steps(**options):
        return [t for t in range(60) if all(rorecomp(scores([[1, 1]], lengths=[1, 2], step=t), **options).tolist())]

    found = steps(decay=40)
    assert len(found) == 20 and max(found) < 40
    assert len([t for t in found if t < 10]) > len([t for t in found if 20 <= t < 30])
    assert steps(decay=1, floor=0.1)[:3] == [5, 15, 25] and len(steps(decay=1, floor=1.0)) == 60


@settings(max_examples=8, deadline=None)
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


def test_the_schedule_has_no_state():
    s = scores([[1, 0, 1]], lengths=[1, 2, 3], step=7)
    assert rorecomp(s).tolist() == pytest.approx(rorecomp(s).tolist())
