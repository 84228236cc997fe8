"""Spans of a video and tracks of boxes, by hand and by brute force: what they share, and how they are read."""


import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards import spans
from vlrl.rewards.tracks import mean_overlap, overlaps, read_keyed_boxes, read_track, success_rate

INF, NAN = float("inf"), float("nan")
WHOLE = st.integers(-5, 40).map(float)
SPANS = st.lists(st.tuples(WHOLE, WHOLE).map(list), max_size=6)


@settings(max_examples=60)
@given(SPANS, SPANS)
def test_unions_equal_cells_of_a_grid(a, b):
    grid = np.arange(-5, 40) + 0.5
    cells = [np.any([(s <= grid) & (grid < e) for s, e in spans] or [grid != grid], axis=0) for spans in (a, b)]
    both, either = (cells[0] & cells[1]).sum(), (cells[0] | cells[1]).sum()
    shared = both / either if either else float(not a and not b)
    assert spans.union_iou(a, b) == spans.union_iou(b, a) == pytest.approx(shared)
    if len(a) == len(b) == 1:
        assert spans.temporal_iou(b[0], a[0]) == spans.temporal_iou(a[0], b[0]) == pytest.approx(
            both / either if spans.is_span(a[0]) and spans.is_span(b[0]) else 0)
    assert sum(e - s for s, e in spans.merged(a)) == cells[0].sum()
    assert spans.union_iou(spans.merged(a), a) == pytest.approx(float(cells[0].any() or not a))


READ = [  # tolerant, `a to b`, whether it is one interval and nothing else
    ("12.5 to 17", [[12.5, 17]], [12.5, 17], True), ("12.54 and 17.83", [[12.54, 17.83]], [12.54, 17.83], True),
    ("12.5  \n to\t17.", [[12.5, 17]], [12.5, 17], True), ("12.5s to 17.0s", [[12.5, 17]], None, True),
    ("12.5 seconds - 13 sec", [[12.5, 13]], None, True), ("1:02 to 1:10", [[62, 70]], None, True),
    ("00:01:02.5 – 01:00:00", [[62.5, 3600]], None, True), ("3-7", [[3, 7]], None, True),
    ("3~7.", [[3, 7]], None, True), ("from 3 to 7", [[3, 7]], [3, 7], False),
    ("It is between 3 and 7 seconds.", [[3, 7]], [3, 7], False), ("[3, 7]", [[3, 7]], None, False),
    ('{"start_time": "3.5", "end_time": "7"}', [[3.5, 7]], None, False),
    ("{'start': 3, 'end': 7}", [[3, 7]], None, False), ("Start: 3s, End: 7s", [[3, 7]], None, False),
    ("3 to 7, 9 to 12", [[3, 7], [9, 12]], [9, 12], False), ("7 to 3", [[7, 3]], [7, 3], False),
    ("5 to 5", [[5, 5]], [5, 5], False), ("-3 to 7", [], None, False), ("\u22123 to 7", [], None, False),
    ("3 to -7", [], None, False), ("3 to", [], None, False), ("NaN to 7", [], None, False),
    ("1e999 to inf", [], None, False), ("9" * 5000 + " to 3", [], None, False), ("3 to " + "9" * 5000, [], None, False),
    ("3.5.6 to 8", [], None, False), ("3 to 8.5.6", [], None, False), ("3rd to 5th", [], None, False),
    ("٣ to ٧", [], None, False), ("x3 to 7", [], None, False), ("", [], None, False)]


def test_several_spans():
    assert spans.read_spans("0 to 1, 2 to 3, 4 to 5", 2) == [[0, 1], [2, 3]]
    assert [spans.only_spans(*of) for of in (("0 to 1, 2 to 3", 2), ("0 to 1, 2 to 3", 1), ("0 to 1", 2))] == [1, 0, 0]
    assert spans.read_spans(spans.format_span([0.1 + 0.2, 12.0])) == [[0.3, 12]]
    assert spans.format_span([3, 10.50004]) == "3 to 10.50004"


test_two_intervals_by_hand = by_hand(lambda a, b: (spans.temporal_iou(a, b), spans.boundary_iou(a, b, 40)), [
    ([10, 20], [10, 20], 1, 1), ([12, 20], [10, 20], 0.8, 0.8 * 0.95),  # two of 40 seconds off
    ([5, 15], [10, 20], 1 / 3, 1 / 3 * 0.875 * 0.875), ([0, 40], [10, 20], 0.25, 0.25 * 0.75 * 0.5),  # the whole clip
    ([12.5, 17], [10, 20], 0.45, 0.45 * 0.9375 * 0.925), ([20, 30], [10, 20], 0, 0),  # they touch
    ([30, 35], [10, 20], 0, 0), ([20, 10], [10, 20], 0, 0),  # from the end to the start
    ([15, 15], [10, 20], 0, 0), ([0, 1e6], [10, 20], 1e-5, 0),  # an end beyond the clip by more than the clip
    ([-1e9, 1e9], [10, 20], 5e-9, 0), ([NAN, 20], [10, 20], 0, 0), ([10, INF], [10, 20], 0, 0)], values=2, abs=1e-9)
test_unions_by_hand = by_hand(lambda a, b: (spans.union_iou(a, b), spans.interval_precision(a, b)), [
    ([], [], 1, 1), ([], [[1, 2]], 0, 0), ([[1, 2]], [], 0, 0), ([[5, 5]], [], 0, 0),
    ([[13.8, 29.8]], [[13.8, 29.8]], 1, 1), ([[1, 3], [2, 5], [8, 9]], [[1, 5], [8, 9]], 1, 1),  # the same union
    ([[0, 3], [2, 4], [22, 25]], [[1, 5], [2, 4]], 3 / 8, 3 / 7),  # shared 3, of 7 and 4
    ([[0, 40]], [[20.9, 22.7], [23.8, 26.0]], 0.1, 0.1), ([[20.9, 22.7]], [[20.9, 22.7], [23.8, 26.0]], 0.45, 1),
    ([[7, 3]], [[3, 7]], 0, 0), ([[3, 7], [9, 8]], [[3, 7]], 1, 1),  # what is no interval covers nothing
    ([[0, INF]], [[3, 7]], 0, 0)], values=2, abs=1e-09)
test_texts_that_are_read = by_hand(
    lambda text: (spans.read_spans(text), spans.last_span(text), spans.only_spans(text, 1)), READ, values=3)
test_lists_of_spans = by_hand(spans.span_list, [
    ("[]", []), (" [ ] ", []), ("[(5.2, 10.4)]", [[5.2, 10.4]]), ("[(3,7),(9.5, 12)]", [[3, 7], [9.5, 12]]),
    ("[(3, 7),\n(8, 8),]", [[3, 7], [8, 8]]), ("[(7, 3)]", None), ("[(3, 7), (9, 8)]", None), ("[[3, 7]]", None),
    ("[(3, 7)(8, 9)]", None), ("[,(3, 7)]", None), ("[(3, 7),,]", None), ("(3, 7)", None), ("[(3, 7)", None),
    ("[(3, 7)] so", None), ("[(-3, 7)]", None), ("[(3, 7, 9)]", None), ("[(nan, 7)]", None), ("[(3, 1e999)]", None),
    ("[~]", None), ("", None), ("[" + "(1, 2)," * 1001 + "]", None)])


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_a_written_span_is_the_same_span(start, length):
    span = [start, start + length]
    assert spans.temporal_iou(spans.read_spans(spans.format_span(span))[0], span) == pytest.approx(1, abs=1e-6)
    assert spans.temporal_iou(spans.last_span(spans.format_span(span)), span) == pytest.approx(1, abs=1e-6)


A, B, FAR = [0, 0, 10, 10], [5, 0, 15, 10], [90, 90, 99, 99]  # A and B share a third


@each("track truth each", [
    ([A, B], [A, B], [1, 1]), ([A, A], [A, B], [1, 1 / 3]), ([A, None], [A, B], [1, 0]),
    ([A, B], [A, None], [1]),  # unseen: whatever is said
    ([A, None], [A, None], [1]), ([A], [A, B], [0, 0]),  # another number of frames
    ([A, B, B], [A, B], [0, 0]), ([], [A], [0]), ([A], [None], []),
    ([[10, 10, 0, 0], FAR], [A, A], [0, 0]), ([[0, 0, 5, 10]], [A], [0.5])])
def test_tracks_by_hand(track, truth, each):
    assert overlaps(track, truth) == pytest.approx(each)
    assert mean_overlap(track, truth) == pytest.approx(sum(each) / max(1, len(each)))
    for bar, more in ((0.5, ()), (0.49, (0.49,))):
        assert success_rate(track, truth, *more) == pytest.approx(sum(v > bar for v in each) / max(1, len(each)))


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
