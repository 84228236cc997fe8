import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.boxes import centre, edge_similarity
from vlrl.rewards.points import distance_reward, gaussian_coverage, gaussian_point, inside

BOX = [20, 10, 60, 50]
NUMBER = st.floats(-1e9, 1e9)
ANY_BOX = st.lists(NUMBER, min_size=4, max_size=4)


test_inside = by_hand(lambda point: (inside(point, BOX), inside(point, BOX, strict=True)), [
    ((40, 30), True, True), ((20, 10), True, False), ((60, 50), True, False), ((61, 30), False, False)], values=2)
test_gaussians = by_hand(lambda box: (gaussian_point(box, BOX), gaussian_coverage(box, BOX)), [
    (BOX, 1, 1), ([40, 10, 80, 50], math.exp(-0.5), math.exp(-0.125)),  # one sigma off in x
    ([30, 20, 50, 40], 1, 0.8),  # half the sides: 250 / 200 on both axes, exp(-ln 1.25)
    ([60, 50, 20, 10], 1, 0),  # inverted: the centre is still there
    ([40, 30, 40, 30], 1, 0), ([120, 10, 160, 50], math.exp(-12.5), math.exp(-3.125))], values=2, abs=1e-06)
test_distance_reward = by_hand(lambda point: distance_reward(point, BOX, 200, 100), [
    ((40, 30), 2), ((60, 30), 2 - 0.01 / 1.13), ((100, 30), 1 - 0.09 / 1.13), ((40, 130), 0.0 + 1 - 1 / 1.13),
    ((40, 131), 0)])
test_edge_similarity = by_hand(lambda box: edge_similarity(box, BOX, 200, 100), [
    (BOX, 1), ([20, 10, 60, 30], 4 / (3 + 1 / 0.8)), ([0, 0, 200, 100], 4 / (2 / 0.9 + 1 / 0.3 + 2)),
    ([60, 50, 20, 10], 4 / (2 / 0.8 + 2 / 0.6)), ([220, 10, 60, 50], 0), ([1000, 10, 60, 50], 0)])


@settings(max_examples=50)
@given(ANY_BOX, st.tuples(NUMBER, NUMBER))
def test_bounded_whatever_the_numbers(box, point):
    assert 0 <= gaussian_point(box, BOX) <= 1 and 0 <= gaussian_coverage(box, BOX) <= 1
    assert 0 <= edge_similarity(box, BOX, 200, 100) <= 1 and 0 <= distance_reward(point, BOX, 200, 100) <= 2
    assert all(map(math.isfinite, centre(box)))
