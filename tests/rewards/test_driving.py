"""Plans, trajectories, driving in closed loop and contrast rewards: by hand and against their definitions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards import closed_loop as rules
from vlrl.rewards import driving
from vlrl.rewards.contrast import contrast_goal, goal_baseline, linear_falloff, speed_term, vlm_rl_reward

SETS = st.lists(st.sets(st.sampled_from(list(driving.HEADS["speed"])), max_size=2), min_size=1, max_size=9)
AHEAD = [[5, 0, 0.5], [10, 0, 1.0]]
CAR = (4.0, 2.0)


def test_plans_by_hand():
    assert driving.word_f1({"KEEP"}, ["KEEP", "STOP"]) == pytest.approx(2 / 3)
    assert driving.word_f1([], []) == driving.word_f1(["KEEP"], []) == driving.word_f1(["KEEP"], ["STOP"]) == 0
    assert driving.mean_weight(["KEEP", "STOP"], driving.HEADS["speed"]) == 0.9 and driving.mean_weight([], {}) == 0
    assert driving.diversity([["KEEP"]]) == [0.8]
    assert driving.diversity([["KEEP"]] * 7 + [["STOP"]] + [[]]) == pytest.approx([0.8] * 7 + [0.875, 1])
    assert driving.diversity([["KEEP", "STOP"], ["STOP", "KEEP"], ["KEEP"]]) == pytest.approx([0.8] * 3)
    five = [[word] for word in "ABCDEFGH"]
    assert driving.diversity(five) == [1 - 1 / 8] * 8
    pairs = [(["KEEP"], ["KEEP"]), (["KEEP"], ["STOP"]), ([], ["KEEP"]), (["STOP", "KEEP"], ["STOP"])]
    assert driving.class_f1(pairs) == {"KEEP": 2 / 5, "STOP": 2 / 3}
    assert driving.class_f1([(["DECELERATE"], ["KEEP"])]) == {"KEEP": 0}


@settings(max_examples=50)
@given(SETS)
def test_the_bonus_is_its_mean_over_all_orders(answers):
    """The released rule, applied to every order, where the order of up to five answers can be tried."""
    answers = answers[:5]
    total = np.zeros(len(answers))
    orders = list(itertools.permutations(range(len(answers))))
    for order in orders:
        seen: set[str] = set()
        for i in order:
            total[i] += 0.4 if answers[i] and not answers[i] & seen else -0.4
            seen |= answers[i]
    assert driving.first_occurrence(answers) == pytest.approx(list(total / len(orders)))


@settings(max_examples=50)
@given(SETS, st.permutations(range(9)))
def test_the_order_of_a_group_does_not_matter(answers, order):
    order = [i for i in order if i < len(answers)]
    for rule in (driving.diversity, driving.first_occurrence):
        found = rule(answers)
        assert rule([answers[i] for i in order]) == [found[i] for i in order]


def test_ways_by_hand():
    positions = driving.positions_at(AHEAD, [0, 0.25, 0.5, 0.75, 9])
    assert positions.tolist() == [[0, 0], [2.5, 0], [5, 0], [7.5, 0], [10, 0]]
    assert driving.distances([[5, 3, 0.5], [10, 4, 1]], AHEAD).tolist() == [3, 4]
    assert driving.distances([[10, 0, 1]], AHEAD).tolist() == [0, 0]  # straight between its points
    assert driving.distances([[2, 0, 0.5]], AHEAD, [1.0]).tolist() == [8]  # it waits at its last point
    assert driving.distance_score([[5, 3, 0.5], [10, 4, 1]], AHEAD, 2.0) == pytest.approx(math.exp(-3.5 / 2))
    assert driving.sample_times(1.0).tolist() == [0.25, 0.5, 0.75, 1]
    assert driving.sample_times(0.3).tolist() == [0.15, 0.3]
    times = driving.sample_times(3.0)
    assert driving.collides(driving.footprints([[60, 0, 3]], CAR, times), [{"center": [33, 0], "size": [4, 2]}], times)
    times = np.array([1.0, 2.0, 3.0])
    boxes = driving.footprints([[10, 0, 1], [10, 10, 2], [10.01, 10, 3]], CAR, times)
    assert [tuple(np.round(box.bounds, 6)) for box in boxes] == [(8, -1, 12, 1), (9, 8, 11, 12), (9.01, 8, 11.01, 12)]
    above = [[0, -10, 100], [-10, 0, 200], [0, 0, 1]]  # ten pixels a metre, ahead is up
    assert driving.project([[0, 0], [5, 1]], above) == [[100, 200], [90, 150]]
    camera = [[50, -100, 0, 0], [40, 0, -100, 150], [1, 0, 0, 0]]  # 1.5 m high, focal length 100, middle at 50, 40
    assert driving.project([[10, 0], [10, 2], [-5, 0], [1e-9, 1]], camera) == [[50, 55], [30, 55]]


@each("obstacle expected", [  # the vehicle's front is 2 m ahead of its middle, which is at 10 after a second
    ({"center": [14.1, 0], "size": [4, 2]}, False), ({"center": [13.9, 0], "size": [4, 2]}, True),
    ({"center": [10, 2.1], "size": [4, 2]}, False), ({"center": [10, 1.9], "size": [4, 2]}, True),
    ({"center": [15, 0], "size": [4, 2], "velocity": [-2, 0]}, True),
    ({"center": [13, 0], "size": [4, 2], "velocity": [2, 0]}, False),
    ({"center": [14.1, 0], "size": [2, 4], "heading": math.pi / 2}, False),
    ({"center": [13.2, 2.5], "size": [4, 2], "heading": math.pi / 4}, True),  # its long side cuts the corner
    ({"center": [13.2, 2.5], "size": [4, 2], "heading": -math.pi / 4}, False),
    ({"size": [4, 2], "track": [[20, 0, 0, 0], [12, 0, 0, 1]]}, True),
    ({"size": [4, 2], "track": [[20, 0, 0, 0], [20, 5, 0, 1]]}, False),
    ({"size": [4, 2], "track": [[2.5, 2.9, 3.1, 0], [2.5, 2.9, -3.1, 1]]}, False),  # turns by .08, not nearly round
    ({"polygon": [[11, -1], [13, 0], [11, 1]]}, True), ({"polygon": [[12.5, -1], [13, 0], [12.5, 1]]}, False),
    ({"polygon": [[16, -1], [17, 0], [16, 1]], "velocity": [-5, 0]}, True),
    ({"center": [5, 0], "size": [0.2, 0.2]}, True),  # met on the way
    ({"center": [-3, 0], "size": [1, 1]}, False)])
def test_collisions_by_hand(obstacle, expected):
    assert driving.obstacle_problem(obstacle) is None
    times = driving.sample_times(1.0)
    assert driving.collides(driving.footprints(AHEAD, CAR, times), [obstacle], times) is expected


test_words_of_a_plan = by_hand(lambda text: tuple(driving.read_plan(text).values()), [
    ("KEEP, STRAIGHT", ["KEEP"], ["STRAIGHT"]), ("LEFT_TURN STOP", ["STOP"], ["LEFT_TURN"]),
    ("STOP, KEEP, KEEP", ["KEEP", "STOP"], []), ("keep, straight", [], []), ("KEEPING UNSTOPPABLE STOP_", ["STOP"], []),
    ("LEFT_TURN_LATER, LEFT TURN", [], []), ("", [], []), ("A" * 100_000, [], []), ("KEEP\0STRAIGHT\ud800", ["KEEP"],
                                                                                   ["STRAIGHT"])], values=2)
test_format_of_a_plan = by_hand(driving.plan_format, [
    ("KEEP, STRAIGHT", 1), (" KEEP ,STRAIGHT\n", 1), ("KEEP, STOP, LEFT_TURN, STRAIGHT", 1), ("STRAIGHT, KEEP", 0),
    ("KEEP STRAIGHT", 0), ("KEEP, KEEP, STRAIGHT", 0), ("KEEP", 0), ("STRAIGHT", 0), ("KEEP, STRAIGHT, fast", 0),
    ("KEEP, STRAIGHT.", 0), ("", 0), ("KEEP, STRAIGHT, STOP", 0), (", ".join([*driving.HEADS["speed"], "STRAIGHT"]), 0),
    ("<answer>KEEP, STRAIGHT</answer>", 0)])
test_way_points = by_hand(driving.read_trajectory, [
    ("[[1, 2, 0.5], [3.5, -4, 1]]", [[1, 2, 0.5], [3.5, -4, 1]]), ("way: [(1, 2, 0.5)] done", [[1, 2, 0.5]]),
    ("```json\n[[1, 2, 3]]\n```", [[1, 2, 3]]), ("[[1, 2, 1], [3, 4, 1]]", None), ("[[1, 2, 0]]", None), ("[]", None),
    ("[[1, 2]]", None), ("[1, 2, 3]", None), ("[[[1, 2, 3]]]", None), ("[[1, 2, NaN]]", None),
    ("[[1e999, 2, 1]]", None), ("[[1001, 0, 1]]", None), ("[[1, 2, 61]]", None), ("[[true, 2, 1]]", None),
    ('[["1", 2, 1]]', None), ("", None), (f"[{', '.join(f'[0, 0, {i}]' for i in range(1, 103))}]", None),
    ("[[1, 2, 1]] [[3, 4, 1]]", None), ("[[1, 2, 1]", None), ("{}", None), ("[" * 100_000, None)])
test_leaving_the_road_by_hand = by_hand(
    lambda drivable: driving.leaves(driving.footprints(AHEAD, CAR, driving.sample_times(1.0)), drivable), [
    ([[[-3, -2], [13, -2], [13, 2], [-3, 2]]], False), ([[[-3, -2], [11, -2], [11, 2], [-3, 2]]], True),
    ([[[-3, -2], [6, -2], [6, 2], [-3, 2]], [[5, -2], [13, -2], [13, 2], [5, 2]]], False),  # two that overlap
    ([[[-3, -2], [6, -2], [6, 2], [-3, 2]], [[6, -2], [13, -2], [13, 2], [6, 2]]], False),  # two that touch
    ([[[-3, -2], [6, -2], [6, 2], [-3, 2]], [[8, -2], [13, -2], [13, 2], [8, 2]]], True),  # a gap of 2 m
    ([[[-3, -0.995], [13, -0.995], [13, 2], [-3, 2]]], False),  # by less than a hundredth
    ([[[-3, -0.9], [13, -0.9], [13, 2], [-3, 2]]], True),
    ([[[-3, -2], [13, 2], [13, -2], [-3, 2]]], True),  # crosses itself
    ([[[0, 0], [1, 1], [2, 2]]], True)])


@each("obstacle", [
    5, {}, {"center": [1, 2]}, {"center": [1, 2], "size": [0, 1]}, {"center": "x", "size": [4, 2]},
    {"center": [1, 2], "size": [4, 2], "velocity": 3}, {"center": [1, 2], "size": [4, 2], "heading": None},
    {"polygon": [[1, 2], [3, 4]]}, {"polygon": 3}, {"size": [4, 2], "track": []},
    {"size": [4, 2], "track": [[1, 2, 0, 1], [1, 2, 0, 1]]}, {"size": [4, 2], "track": [[1, 2, 0]]},
    {"center": [1, float("nan")], "size": [4, 2]}])
def test_obstacles_that_are_none(obstacle):
    assert driving.obstacle_problem(obstacle)


NUMBERS = st.floats(-2000, 2000)


@pytest.mark.slow
@settings(max_examples=50)
@example([(0.0, 0.0)], [[[0.0, 0.0], [-1.4e-291, 0.0], [-1.4e-291, 1.0], [-2.3e-309, -1.0]]])
@example([(0.0, 0.0)], [[[0.0, 0.0], [0.0, 0.0], [-1.4e-291, 0.0]], [[0.0, 0.0], [-1.4e-291, 1.0], [-2.3e-309, -1.0]]])
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), st.lists(st.lists(
    st.tuples(NUMBERS, NUMBERS).map(list), min_size=3, max_size=5), min_size=1, max_size=3))
def test_any_shapes_can_be_compared(points, polygons):
    way = [[x, y, i + 1.0] for i, (x, y) in enumerate(points)]
    times = driving.sample_times(way[-1][2])
    vehicle = driving.footprints(way, CAR, times)
    driving.leaves(vehicle, polygons)
    driving.collides(vehicle, [{"polygon": p, "velocity": [1e6, -1e6]} for p in polygons], times)


shares = st.floats(0, 1)
anything = st.floats(-1e6, 1e6)


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


UNIT = st.lists(st.floats(-1, 1), min_size=4, max_size=4).map(np.array).filter(
    lambda v: np.linalg.norm(v) > 0.1).map(lambda v: v / np.linalg.norm(v))


def test_spans_and_synthesis_by_hand():
    assert contrast_goal(0.3, 0.2, span=0.4) == pytest.approx(0.75)
    assert speed_term(10, 1, 20) == 0.5 and speed_term(10, 0.5, 20) == 1 and speed_term(0, 0, 20) == 1
    assert speed_term(60, 0, 20) == -2
    assert [linear_falloff(v, 2) for v in (0, -0.5, 2, 5)] == [1, 0.75, 0, 0]
    assert vlm_rl_reward(0.3, 10, 1, 20, 0.5, 0.8, 1) == pytest.approx(0.2)
    assert vlm_rl_reward(-10, 10, 1, 20, 0.5) == -10 and vlm_rl_reward(0, 10, 0.5, 20) == 1


test_contrasting_goal = by_hand(contrast_goal, [
    (0.20, 0.20, 1), (0.20, 0.25, 1), (0.215, 0.20, 0.5), (0.23, 0.20, 0), (0.30, 0.10, 0), (-0.1, -0.13, 0),
    (0.206, 0.20, 0.8), (1, -1, 0), (-1, 1, 1)])
test_goal_and_baseline = by_hand(goal_baseline, [
    (0.3, 0.9, 0.5, 0, 0.3),  # the cosine alone
    (1, 0, 0, 1, 1),  # at the goal
    (0, 1, 0, 1, 0), (0, 1, 0, 0.5, 0),  # at the baseline: the whole distance lies on the line
    (0, 0, 0, 1, 0.75),  # beside the line, between the two
    (0, 0, 0, 0.5, 1 - (0.5 + 0.25 * 1.5) / 2), (0.6, 0.6, 1, 1, 1), (0.6, 0.6, 1, 0, 0.6)])


@settings(max_examples=50)
@given(UNIT, UNIT, UNIT, st.floats(0, 1))
def test_goal_and_baseline_is_its_definition(state, goal, baseline, alpha):
    line = goal - baseline
    if line @ line < 1e-3:
        return
    on_line = baseline + (state - baseline) @ line / (line @ line) * line
    expected = 1 - np.sum((alpha * on_line + (1 - alpha) * state - goal) ** 2) / 2
    assert goal_baseline(state @ goal, state @ baseline, goal @ baseline, alpha) == pytest.approx(expected, abs=1e-6)
