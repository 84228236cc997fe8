"""Scores of several models as one reward, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.ensembles import ENSEMBLES, combined, spread

SCORES = (1.0, 2.0, 6.0)  # mean 3, variance (4 + 1 + 9) / 3


test_each_by_hand = by_hand(lambda name, lam: ENSEMBLES[name](SCORES, lam), [
    ("mean", 0.5, 3), ("min", 0.5, 1), ("less_variance", 0.5, 3 - 7 / 3), ("less_variance", 0.0, 3),
    ("less_deviation", 1.0, 3 - math.sqrt(14 / 3))], abs=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.floats(0, 10), st.integers(1, 5))
def test_caution_never_pays_more_and_equal_members_change_nothing(scores, lam, count):
    assert all(ENSEMBLES[name](scores, lam) <= ENSEMBLES["mean"](scores, lam) + 1e-6 for name in ENSEMBLES)
    same = [scores[0]] * count
    assert all(function(same, lam) == pytest.approx(scores[0], rel=1e-9, abs=1e-6) for function in ENSEMBLES.values())


def test_without_lam_each_has_that_of_its_paper():
    assert spread(SCORES) == pytest.approx(math.sqrt(14 / 3), abs=1e-9)
    assert combined("less_deviation", SCORES) == pytest.approx(3 - math.sqrt(14 / 3))
    assert combined("less_variance", SCORES) == pytest.approx(3 - 0.1 * 14 / 3)
    assert combined("less_deviation", SCORES, 0.5) == pytest.approx(3 - 0.5 * math.sqrt(14 / 3))
