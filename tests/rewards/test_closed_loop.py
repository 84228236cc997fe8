"""Rewards of driving in closed loop, against values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards import closed_loop as rules

shares = st.floats(0, 1)
numbers = st.floats(-1e6, 1e6)


@given(st.lists(shares, min_size=1, max_size=20), st.data())
def test_an_episode_earns_at_most_its_completion(places, data):
    """With factors of 1 just that; and no order of infractions earns more."""
    way = sorted(places)
    factors = [data.draw(st.lists(shares, max_size=3)) for _ in way]
    free = sum(rules.carl(a, b, ()) for a, b in zip([0.0, *way], way, strict=False))
    paid = sum(rules.carl(a, b, f) for a, b, f in zip([0.0, *way], way, factors, strict=False))
    assert free == pytest.approx(way[-1]) and 0 <= paid <= free + 1e-12


def test_the_factors_that_are_one_or_a_half():
    assert [rules.gap_factor(t) for t in (0.0, 0.94, 0.95, math.inf)] == [0.5, 0.5, 1.0, 1.0]
    assert [rules.comfort_factor(*a) for a in (((), ()), ((-4.05, 2.4), (4.89, -4.89)), ((-4.06,), ()), ((2.41,), ()),
                                               ((0.0,), (-4.9,)))] == [1.0, 1.0, 0.5, 0.5, 0.5]


test_completion_gained_times_soft_penalties = by_hand(rules.carl, [
    (0.2, 0.35, [], 0.15), (0.2, 0.35, [1, 0.5], 0.075), (0.2, 0.35, [0.5, 0.5, 0.8], 0.03), (0.0, 1.0, [0], 0.0),
    (0.5, 0.4, [1], 0.0)], abs=1e-09)
test_the_factor_of_speeding = by_hand(rules.speed_factor, [
    (0, 10, 1.0), (10, 10, 1.0), (11, 10, 1.0), (13, 10, 0.5), (12, 10, 0.75), (15, 10, 0.0), (99, 10, 0.0)], abs=1e-09)
test_time_to_a_collision = by_hand(rules.time_to_collision, [
    (20, 5, 4.0), (20, 0, math.inf), (20, -3, math.inf), (-1, 2, 0.0), (0, 2, 0.0)])
test_the_wanted_speed_falls_with_the_gap = by_hand(lambda gap: rules.target_speed(12, gap), [
    (60, 12.0), (24, 12.0), (14, 6.0), (9, 3.0), (4, 0.0), (-2, 0.0)], abs=1e-09)
test_the_shaped_sum = by_hand(lambda state: rules.shaped(*state), [
    ((10, 10, 10, 0, 0, False), 1.0), ((6, 10, 10, 0, 0, False), 0.6), ((6, 10, 10, -0.4, 0.1, False), 0.3),
    ((0, 10, 10, 9, 0, False), -0.5), ((10, 10, 10, 0, -7, False), 0.0), ((5, 10, 10, 0, 0, True), -1.5)], abs=1e-09)


@given(st.floats(0, 40), st.floats(0.1, 40), numbers, numbers, numbers, st.booleans())
def test_bounds(speed, limit, gap, aside, turned, ended):
    wanted = rules.target_speed(limit, gap)
    assert 0 <= wanted <= limit and 0 <= rules.speed_factor(speed, limit) <= 1
    assert -2.5 - speed / limit <= rules.shaped(speed, wanted, limit, aside, turned, ended) <= 1
    assert rules.time_to_collision(gap, aside) >= 0
