import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards.tracks import mean_overlap, overlaps, read_keyed_boxes, read_track, success_rate

A, B, FAR = [0, 0, 10, 10], [5, 0, 15, 10], [90, 90, 99, 99]  # A and B share a third


@each("track truth each", [
    ([A, B], [A, B], [1, 1]), ([A, A], [A, B], [1, 1 / 3]), ([A, None], [A, B], [1, 0]),
    ([A, B], [A, None], [1]),  # unseen: whatever is said
    ([A, None], [A, None], [1]), ([A], [A, B], [0, 0]),  # another number of frames
    ([A, B, B], [A, B], [0, 0]), ([], [A], [0]), ([A], [None], []),
    ([[10, 10, 0, 0], FAR], [A, A], [0, 0])])
def test_by_hand(track, truth, each):
    assert overlaps(track, truth) == pytest.approx(each)
    assert mean_overlap(track, truth) == pytest.approx(sum(each) / max(1, len(each)))
    assert success_rate(track, truth) == pytest.approx(sum(v > 0.5 for v in each) / max(1, len(each)))


def test_success_lies_above_its_threshold():
    assert success_rate([[0, 0, 5, 10]], [A]) == 0 and success_rate([[0, 0, 5, 10]], [A], 0.49) == 1


test_tracks_as_text = by_hand(read_track, [
    ("[[0.1, 0.5, 0.3, 0.55], [0, 0, 1, 1]]", 2, [[0.1, 0.5, 0.3, 0.55], [0, 0, 1, 1]]),
    ("[[0, 0, 1, 1], null]", 2, [[0, 0, 1, 1], None]), ("[[0, 0, 1, 1], None]", 2, [[0, 0, 1, 1], None]),
    ("[[0, 0, 1, 1]]", 2, None), ("[[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]", 2, None),
    ("[[0, 0, 1], [0, 0, 1, 1]]", 2, None), ("[[[0, 0, 1, 1]], [0, 0, 1, 1]]", 2, None), ("[0, 0, 1, 1]", 4, None),
    ("[[0, 0, 1, NaN]]", 1, None), ("[[0, 0, 1, 1e999]]", 1, None), ("[[0, 0, 1, " + "9" * 5000 + "]]", 1, None),
    ('[["0", "0", "1", "1"]]', 1, None), ("[[0, 0, 1, True]]", 1, None), ("[[0, 0, 1, 1]] so", 1, None),
    ("[[0, 0, 1, 1]", 1, None), ("[" * 5000 + "]" * 5000, 1, None), ("", 0, None)])
test_boxes_by_second = by_hand(read_keyed_boxes, [
    ({"1": A, "2": B}, {"1": A, "2": B}), ({}, {}), ({"1": [A]}, None), ({"1": A, "2": [1, 2]}, None), ([A], None),
    (None, None), ({str(i): A for i in range(1001)}, None)])


@settings(max_examples=100)
@given(st.lists(st.none() | st.lists(st.floats(), max_size=5), max_size=4), st.text(max_size=40))
def test_bounded_whatever_the_boxes(track, text):
    truth = [A, None, B, A][:len(track)]
    assert 0 <= mean_overlap(track, truth) <= 1 and 0 <= success_rate(track, truth) <= 1
    json.dumps(read_track(text, 1), allow_nan=False)
