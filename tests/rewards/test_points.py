import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.rewards.boxes import centre, edge_similarity
from vlrl.rewards.points import distance_reward, gaussian_coverage, gaussian_point, inside

BOX = [20, 10, 60, 50]
NUMBER = st.floats(-1e9, 1e9)
ANY_BOX = st.lists(NUMBER, min_size=4, max_size=4)


@pytest.mark.parametrize(("point", "within", "strictly"), [
    ((40, 30), True, True), ((20, 10), True, False), ((60, 50), True, False), ((61, 30), False, False)])
def test_inside(point, within, strictly):
    assert inside(point, BOX) is within and inside(point, BOX, strict=True) is strictly


@pytest.mark.parametrize(("box", "point", "coverage"), [
    (BOX, 1, 1), ([40, 10, 80, 50], math.exp(-0.5), math.exp(-0.125)),  # one sigma off in x
    ([30, 20, 50, 40], 1, 0.8),  # half the sides: 250 / 200 on both axes, exp(-ln 1.25)
    ([60, 50, 20, 10], 1, 0),  # inverted: the centre is still there
    ([40, 30, 40, 30], 1, 0), ([120, 10, 160, 50], math.exp(-12.5), math.exp(-3.125))])
def test_gaussians(box, point, coverage):
    assert gaussian_point(box, BOX) == pytest.approx(point)
    assert gaussian_coverage(box, BOX) == pytest.approx(coverage, abs=1e-6)


@pytest.mark.parametrize(("point", "expected"), [
    ((40, 30), 2), ((60, 30), 2 - 0.01 / 1.13), ((100, 30), 1 - 0.09 / 1.13), ((40, 130), 0.0 + 1 - 1 / 1.13),
    ((40, 131), 0)])
def test_distance_reward(point, expected):
    assert distance_reward(point, BOX, 200, 100) == pytest.approx(expected)


@pytest.mark.parametrize(("box", "expected"), [
    (BOX, 1), ([20, 10, 60, 30], 4 / (3 + 1 / 0.8)), ([0, 0, 200, 100], 4 / (2 / 0.9 + 1 / 0.3 + 2)),
    ([60, 50, 20, 10], 4 / (2 / 0.8 + 2 / 0.6)), ([220, 10, 60, 50], 0), ([1000, 10, 60, 50], 0)])
def test_edge_similarity(box, expected):
    assert edge_similarity(box, BOX, 200, 100) == pytest.approx(expected)


@settings(max_examples=50)
@given(ANY_BOX, st.tuples(NUMBER, NUMBER))
def test_bounded_whatever_the_numbers(box, point):
    assert 0 <= gaussian_point(box, BOX) <= 1 and 0 <= gaussian_coverage(box, BOX) <= 1
    assert 0 <= edge_similarity(box, BOX, 200, 100) <= 1 and 0 <= distance_reward(point, BOX, 200, 100) <= 2
    assert all(map(math.isfinite, centre(box)))
