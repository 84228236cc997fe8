import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.detection import (
    assign,
    average_precision,
    calibration,
    clipped,
    coco_map,
    greedy_matches,
    length_penalty,
    match_quality,
    mean_matched,
    weighted_sum,
)

MUG, CAT = {"box": [20, 10, 60, 50], "label": "mug"}, {"box": [100, 20, 140, 60], "label": "cat"}
HALF = {"box": [20, 10, 60, 30], "label": "mug"}  # IoU .5 with the mug
SIDE = st.integers(0, 200)


@st.composite
def detections(draw, most=6):
    out = []
    for _ in range(draw(st.integers(0, most))):
        x, y = draw(SIDE), draw(SIDE)
        out.append({"box": [x, y, x + draw(st.integers(1, 80)), y + draw(st.integers(1, 80))],
                    "label": draw(st.sampled_from(["mug", "cat", "dog"])),
                    "score": draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))})
    return out


def test_matching_by_hand():
    assert mean_matched([[1.0, 0.0], [0.0, 0.5]], 2, 2) == 0.75
    assert mean_matched([[1.0], [1.0], [1.0]], 3, 1) == pytest.approx(1 / 3)
    assert mean_matched([], 0, 0) == 1 and mean_matched([], 0, 2) == 0 and mean_matched([[], []], 2, 0) == 0
    shifted = {"box": [24, 10, 64, 50], "label": "mug"}
    assert match_quality([CAT, shifted], [MUG, CAT]) == pytest.approx([1, 36 / 44])
    assert match_quality([MUG, CAT], [MUG]) == [1]
    assert match_quality([], [MUG]) == []
    far = match_quality([{"box": [0, 0, 1, 1], "label": "mug"}], [CAT])
    assert -1 <= far[0] < 0
    close = {"box": [20, 10, 60, 42], "label": "mug", "score": 0.9}  # IoU .8
    exact = {**MUG, "score": 0.8}
    assert greedy_matches([exact, close], [MUG]) == [0, 0.8]  # the surer one takes the object
    assert greedy_matches([exact], [CAT]) == [0] and greedy_matches([], [CAT]) == []
    assert greedy_matches([{**HALF, "score": 1.0}], [MUG]) == [0]  # .5 is not above .5
    assert calibration([exact, close], [0, 0.8]) == pytest.approx((0.2 + 0.9) / 2)
    assert calibration([], []) == 0


@settings(max_examples=15)
@given(detections(), detections())
def test_average_precision_is_that_of_pycocotools(found, truths):
    if truths:
        expected = coco_map([found], [truths])
        assert average_precision(found, truths) == pytest.approx(expected["map"] if found else 0, abs=1e-6)
        assert average_precision(found, truths, (0.5,)) == pytest.approx(expected["map@.5"] if found else 0, abs=1e-6)


def test_map_of_a_split_and_its_crowds():
    assert coco_map([], []) == {} and coco_map([[MUG]], [[]]) == {}
    assert coco_map([[MUG], []], [[MUG], [CAT]]) == pytest.approx({"map": 0.5, "map@.5": 0.5}, abs=1e-9)
    assert coco_map([[]], [[MUG]]) == {"map": 0, "map@.5": 0}
    # The wrong one comes first: precision 1/2 at every recall, unless it is not counted.
    other = {"box": [100, 20, 140, 60], "label": "mug"}
    assert coco_map([[other, MUG]], [[MUG]])["map"] == pytest.approx(0.5)
    assert coco_map([[other, MUG]], [[MUG]], [[{**other, "box": [90, 0, 200, 90]}]])["map"] == pytest.approx(1)
    assert coco_map([[other, MUG]], [[MUG]], [[{**CAT, "box": [90, 0, 200, 90]}]])["map"] == pytest.approx(0.5)
    assert coco_map([[{**other, "box": [140, 20, 100, 60]}, MUG]], [[MUG]])["map"] == pytest.approx(1)


test_assignment = by_hand(assign, [
    ([], []), ([[]], []), ([[5]], [(0, 0)]), ([[3, 1, 2]], [(0, 1)]), ([[3], [1]], [(1, 0)]),
    ([[1, 2], [1, 9]], [(0, 1), (1, 0)]),  # 3 in all; the greedy pair (0, 0) would cost 10
])
test_average_precision_by_hand = by_hand(average_precision, [
    ([MUG, CAT], [MUG, CAT], 1), ([CAT, MUG], [MUG, CAT], 1), ([MUG], [MUG, CAT], 0.5), ([], [MUG], 0), ([MUG], [], 0),
    ([], [], 1), ([HALF], [MUG], 0.1),  # at .5 alone, of ten thresholds
    ([HALF, CAT], [MUG, CAT], 0.55), ([{**MUG, "label": "dog"}], [MUG], 0), ([MUG, MUG], [MUG], 1),
    ([{**CAT, "label": "mug"}, MUG], [MUG], 0.5),  # the first of equal score is wrong: precision 1/2 at every recall
], abs=1e-09)
test_length_penalty = by_hand(length_penalty, [(0, 0, 1), (1, 2, 1), (2, 2, 1), (4, 2, 0.5), (100, 1, 0.01)])
test_clipped = by_hand(
    lambda value: clipped(value, 0.5, 0.75), [(0.4, 0), (0.5, 0.5), (0.7, 0.7), (0.75, 0.75), (0.8, 1), (-1, 0)])


@settings(max_examples=40)
@given(detections(), detections())
def test_all_stay_bounded(found, truths):
    assert 0 <= average_precision(found, truths) <= 1
    assert all(-1 <= q <= 1 for q in match_quality(found, truths))
    matched = greedy_matches(found, truths)
    assert len(matched) == len(found) and all(0 <= m <= 1 for m in matched)
    assert 0 <= calibration(found, matched) <= 1 and math.isfinite(sum(matched))


@settings(max_examples=50)
@given(detections(), detections())
def test_weighted_sum_stays_in_bounds_and_knows_the_truth(found, truths):
    paid = weighted_sum(found, truths)
    assert 0 <= paid <= 1
    assert weighted_sum(truths, truths) == pytest.approx(1) or len({tuple(t["box"]) for t in truths}) < len(truths)
    if truths:
        assert weighted_sum([*truths, *truths], truths) < 1
