"""Boxes, points and regions of a picture, and detections: by hand, against pycocotools and a grid of pixels."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards import boxes, detection
from vlrl.rewards.points import distance_reward, gaussian_coverage, gaussian_point, inside
from vlrl.rewards.regions import clip_to_image, region_consistency, region_vote

SIDE = st.floats(-1e4, 1e4)


@st.composite
def any_boxes(draw):
    x, y = draw(SIDE), draw(SIDE)
    return [x, y, x + draw(st.floats(0.01, 1e4)), y + draw(st.floats(0.01, 1e4))]


@given(any_boxes(), any_boxes())
def test_iou_and_giou_are_bounded_and_symmetric(a, b):
    assert boxes.iou(a, a) == pytest.approx(1) and boxes.giou(a, a) == pytest.approx(1)
    assert 0 <= boxes.iou(a, b) <= 1 and boxes.iou(a, b) == pytest.approx(boxes.iou(b, a))
    assert -1 <= boxes.giou(a, b) <= boxes.iou(a, b) + 1e-9


def test_boxes_and_numbers_by_hand():
    assert boxes.parse_boxes("a [1, 2, 3, 4] b [5,6,7] c [5, 6, 7, 8]") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert boxes.parse_boxes("none") == []
    assert all(map(boxes.is_number, (0, -1, 1.5, 10**300)))
    assert not any(map(boxes.is_number, (True, None, "1", math.nan, math.inf, 10**400, [1], 1j)))
    assert boxes.format_box([1, 2.0, 3.25, -0.00001]) == "[1, 2, 3.25, 0]"


@given(st.text() | st.text("[]0123456789., -{}", max_size=200))
def test_parsers_never_raise(text):
    box = boxes.parse_box(text)
    assert box is None or (len(box) == 4 and all(math.isfinite(v) for v in box))
    assert box == next(iter(boxes.parse_boxes(text)), None)
    assert boxes.box_format(text) in (0, 1)


@given(any_boxes())
def test_a_written_box_is_read_back(box):
    assert boxes.parse_box(boxes.format_box(box)) == pytest.approx(box, abs=1e-4)
    assert boxes.box_format(boxes.format_box(box)) == 1


test_iou = by_hand(boxes.iou, [
    ([0, 0, 10, 10], [0, 0, 10, 10], 1.0), ([0, 0, 10, 10], [20, 20, 30, 30], 0.0),
    ([0, 0, 10, 10], [10, 0, 20, 10], 0.0),  # they only touch
    ([0, 0, 10, 10], [5, 5, 15, 15], 25 / 175), ([0, 0, 4, 4], [1, 1, 3, 3], 4 / 16),
    ([0, 0, 2, 2], [1.5, 0, 3.5, 2], 1 / 7),  # an overlap half a pixel wide counts: plain continuous IoU
    ([-3, -2, 1, 2], [-1, -2, 3, 2], 8 / 24), ([10, 10, 0, 0], [0, 0, 10, 10], 0.0),  # inverted
    ([5, 0, 5, 10], [5, 0, 5, 10], 0.0),  # without area
    ([0, 0, math.nan, 10], [0, 0, 10, 10], 0.0), ([0, 0, math.inf, 10], [0, 0, 10, 10], 0.0),
    ([0, 0, 10], [0, 0, 10, 10], 0.0), ([], [0, 0, 10, 10], 0.0),
    ([0, 0, 10**400, 10], [0, 0, 10, 10], 0.0),  # no float holds it
    ([0, 0, 10**200, 10**200], [0, 0, 10, 10], 0.0)], turned=True, abs=1e-05)
test_giou = by_hand(boxes.giou, [
    ([0, 0, 10, 10], [0, 0, 10, 10], 1.0), ([0, 0, 1, 1], [2, 0, 3, 1], -1 / 3),  # union 2 of a hull of 3
    ([0, 0, 1, 1], [2, 2, 3, 3], 2 / 9 - 1), ([0, 0, 2, 2], [1, 1, 3, 3], 1 / 7 - 2 / 9),  # union 7 of a hull of 9
    ([0, 0, 4, 4], [1, 1, 3, 3], 0.25),  # one inside the other: the hull is the union
    ([1, 1, 0, 0], [0, 0, 1, 1], -1.0), ([0, 0, 10**400, 1], [0, 0, 1, 1], -1.0),
    ([0, 0, 10**200, 10**200], [0, 0, 1, 1], -1.0)], turned=True, abs=1e-05)
test_parse_box = by_hand(boxes.parse_box, [
    ("[1, 2, 3, 4]", [1, 2, 3, 4]), ("[1,2,3,4]", [1, 2, 3, 4]), ("[ 1 ,\n2, 3 , 4 ]", [1, 2, 3, 4]),
    ("[1.5, -2, .25, +4.]", [1.5, -2, 0.25, 4]), ("It is at [1, 2, 3, 4] or at [5, 6, 7, 8].", [1, 2, 3, 4]),
    ('```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]\n```', [10, 20, 30, 40]),
    ("[[1, 2, 3, 4]]", [1, 2, 3, 4]), ("[1, 2, 3] then [1, 2, 3, 4, 5] then [9, 8, 7, 6]", [9, 8, 7, 6]),
    ("[1, 2, [5, 6, 7, 8]", [5, 6, 7, 8]), ("[1, 2, 3, 4", None), ("1, 2, 3, 4", None), ("(1, 2, 3, 4)", None),
    ("[1, 2, 3, x]", None), ("[1 2 3 4]", None), ("[1, 2, 3, 1e999]", None), ("[nan, inf, 1, 2]", None),
    ("[" + "9" * 400 + ", 1, 2, 3]", None), ("[١, ٢, ٣, ٤]", None),  # other digits than 0-9
    ("", None)])
test_parse_whole_box = by_hand(boxes.parse_integer_box, [
    ("[1, 2, 3, 4]", [1, 2, 3, 4]), ("[1,2,3,4] [5,6,7,8]", [1, 2, 3, 4]), ("[1.5, 2, 3, 4]", None),
    ("[-1, 2, 3, 4]", None), ("[1, 2, 3]", None), ("[١, ٢, ٣, ٤]", None), ("", None)])
test_box_format = by_hand(boxes.box_format, [
    ("[1, 2, 3, 4]", 1), (" [1,2,3,4]\n", 1), ("[1, 2, 3, 4].", 0), ("[1, 2, 3, 4] [1, 2, 3, 4]", 0), ("", 0),
    ("the box is [1, 2, 3, 4]", 0)])


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
test_edge_similarity = by_hand(lambda box: boxes.edge_similarity(box, BOX, 200, 100), [
    (BOX, 1), ([20, 10, 60, 30], 4 / (3 + 1 / 0.8)), ([0, 0, 200, 100], 4 / (2 / 0.9 + 1 / 0.3 + 2)),
    ([60, 50, 20, 10], 4 / (2 / 0.8 + 2 / 0.6)), ([220, 10, 60, 50], 0), ([1000, 10, 60, 50], 0)])


LEFT, SHIFTED = [0, 0, 10, 10], [5, 0, 15, 10]
PLACE = st.integers(0, 29)


@st.composite
def small_boxes(draw):
    x, y = draw(PLACE), draw(PLACE)
    return [x, y, draw(st.integers(x + 1, 30)), draw(st.integers(y + 1, 30))]


def test_consistency_and_vote_by_hand():
    # columns 0-5 have 2 votes, 5-10 have 3, 10-15 have 1
    assert region_consistency([LEFT, LEFT, SHIFTED]) == pytest.approx([250 / 300, 250 / 300, 200 / 300])
    assert region_consistency([LEFT, None, LEFT]) == [1, 0, 1]
    assert region_consistency([LEFT, [50, 50, 60, 60]]) == [1, 1]  # nothing shared: the largest vote is 1
    assert region_consistency([None, None]) == [0, 0] and region_consistency([]) == []
    assert region_vote([LEFT, LEFT, SHIFTED]) == [5, 0, 10, 10]
    assert region_vote([LEFT, [20, 20, 40, 40]]) == [20, 20, 40, 40]  # of two regions with one vote the larger
    assert region_vote([LEFT, [10, 10, 12, 12], [10, 0, 20, 10]]) == [0, 0, 20, 12]  # regions that touch are one
    assert region_vote([]) is None


@settings(max_examples=40)
@given(st.lists(small_boxes(), min_size=1, max_size=8))
def test_consistency_is_that_of_a_grid_of_pixels(given):
    grid = np.zeros((30, 30), dtype=int)
    for x1, y1, x2, y2 in given:
        grid[y1:y2, x1:x2] += 1
    expected = [grid[y1:y2, x1:x2].sum() / (grid.max() * (y2 - y1) * (x2 - x1)) for x1, y1, x2, y2 in given]
    assert region_consistency(given) == pytest.approx(expected)
    assert region_consistency(given[::-1]) == pytest.approx(expected[::-1])


test_clipping = by_hand(lambda box: clip_to_image(box, 200, 100), [
    ([1.9, 2.9, 10.9, 5.1], (1, 2, 10, 5)), ([-50, -50, 300, 300], (0, 0, 200, 100)), ([10, 10, 5, 20], None),
    ([250, 0, 260, 10], None), ([5, 5, 5.9, 20], None)])


MUG, CAT = {"box": [20, 10, 60, 50], "label": "mug"}, {"box": [100, 20, 140, 60], "label": "cat"}
HALF = {"box": [20, 10, 60, 30], "label": "mug"}  # IoU .5 with the mug
PLACES = st.integers(0, 200)


@st.composite
def detections(draw, most=6):
    out = []
    for _ in range(draw(st.integers(0, most))):
        x, y = draw(PLACES), draw(PLACES)
        out.append({"box": [x, y, x + draw(st.integers(1, 80)), y + draw(st.integers(1, 80))],
                    "label": draw(st.sampled_from(["mug", "cat", "dog"])),
                    "score": draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))})
    return out


def test_matching_by_hand():
    assert detection.mean_matched([[1.0, 0.0], [0.0, 0.5]], 2, 2) == 0.75
    assert detection.mean_matched([[1.0], [1.0], [1.0]], 3, 1) == pytest.approx(1 / 3)
    assert [detection.mean_matched(*of) for of in (([], 0, 0), ([], 0, 2), ([[], []], 2, 0))] == [1, 0, 0]
    shifted = {"box": [24, 10, 64, 50], "label": "mug"}
    assert detection.match_quality([CAT, shifted], [MUG, CAT]) == pytest.approx([1, 36 / 44])
    assert detection.match_quality([MUG, CAT], [MUG]) == [1]
    assert detection.match_quality([], [MUG]) == []
    far = detection.match_quality([{"box": [0, 0, 1, 1], "label": "mug"}], [CAT])
    assert -1 <= far[0] < 0
    close = {"box": [20, 10, 60, 42], "label": "mug", "score": 0.9}  # IoU .8
    exact = {**MUG, "score": 0.8}
    assert detection.greedy_matches([exact, close], [MUG]) == [0, 0.8]  # the surer one takes the object
    assert detection.greedy_matches([exact], [CAT]) == [0] and detection.greedy_matches([], [CAT]) == []
    assert detection.greedy_matches([{**HALF, "score": 1.0}], [MUG]) == [0]  # .5 is not above .5
    assert detection.calibration([exact, close], [0, 0.8]) == pytest.approx((0.2 + 0.9) / 2)
    assert detection.calibration([], []) == 0


@settings(max_examples=15)
@given(detections(), detections())
def test_average_precision_is_that_of_pycocotools(found, truths):
    if truths:
        expected = detection.coco_map([found], [truths])
        for name, bars in (("map", ()), ("map@.5", ((0.5,),))):
            assert detection.average_precision(found, truths, *bars) == pytest.approx(
                expected[name] if found else 0, abs=1e-6)


def test_map_of_a_split_and_its_crowds():
    assert detection.coco_map([], []) == {} and detection.coco_map([[MUG]], [[]]) == {}
    assert detection.coco_map([[MUG], []], [[MUG], [CAT]]) == pytest.approx({"map": 0.5, "map@.5": 0.5}, abs=1e-9)
    assert detection.coco_map([[]], [[MUG]]) == {"map": 0, "map@.5": 0}
    # The wrong one comes first: precision 1/2 at every recall, unless it is not counted.
    other = {"box": [100, 20, 140, 60], "label": "mug"}
    assert detection.coco_map([[other, MUG]], [[MUG]])["map"] == pytest.approx(0.5)
    for crowd, expected in ((other, 1), (CAT, 0.5)):
        found = detection.coco_map([[other, MUG]], [[MUG]], [[{**crowd, "box": [90, 0, 200, 90]}]])
        assert found["map"] == pytest.approx(expected)
    assert detection.coco_map([[{**other, "box": [140, 20, 100, 60]}, MUG]], [[MUG]])["map"] == pytest.approx(1)


test_assignment = by_hand(detection.assign, [
    ([], []), ([[]], []), ([[5]], [(0, 0)]), ([[3, 1, 2]], [(0, 1)]), ([[3], [1]], [(1, 0)]),
    ([[1, 2], [1, 9]], [(0, 1), (1, 0)]),  # 3 in all; the greedy pair (0, 0) would cost 10
])
test_average_precision_by_hand = by_hand(detection.average_precision, [
    ([MUG, CAT], [MUG, CAT], 1), ([CAT, MUG], [MUG, CAT], 1), ([MUG], [MUG, CAT], 0.5), ([], [MUG], 0), ([MUG], [], 0),
    ([], [], 1), ([HALF], [MUG], 0.1),  # at .5 alone, of ten thresholds
    ([HALF, CAT], [MUG, CAT], 0.55), ([{**MUG, "label": "dog"}], [MUG], 0), ([MUG, MUG], [MUG], 1),
    ([{**CAT, "label": "mug"}, MUG], [MUG], 0.5),  # the first of equal score is wrong: precision 1/2 at every recall
], abs=1e-09)
test_length_penalty = by_hand(detection.length_penalty, [(0, 0, 1), (1, 2, 1), (2, 2, 1), (4, 2, 0.5), (100, 1, 0.01)])
test_clipped = by_hand(
    lambda value: detection.clipped(value, 0.5, 0.75),
    [(0.4, 0), (0.5, 0.5), (0.7, 0.7), (0.75, 0.75), (0.8, 1), (-1, 0)])


@settings(max_examples=50)
@given(detections(), detections())
def test_weighted_sum_stays_in_bounds_and_knows_the_truth(found, truths):
    paid = detection.weighted_sum(found, truths)
    assert 0 <= paid <= 1
    if len({tuple(t["box"]) for t in truths}) == len(truths):
        assert detection.weighted_sum(truths, truths) == pytest.approx(1)
    if truths:
        assert detection.weighted_sum([*truths, *truths], truths) < 1
