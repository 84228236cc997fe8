"""Spans by hand and by brute force: what two intervals share, and which texts are read as times."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.spans import (
    boundary_iou,
    format_span,
    interval_precision,
    is_span,
    last_span,
    merged,
    only_spans,
    read_spans,
    span_list,
    temporal_iou,
    union_iou,
)

INF, NAN = float("inf"), float("nan")
WHOLE = st.integers(-5, 40).map(float)
SPANS = st.lists(st.tuples(WHOLE, WHOLE).map(list), max_size=6)
ANY = st.floats() | st.just(10 ** 400)


@settings(max_examples=60)
@given(SPANS, SPANS)
def test_unions_equal_cells_of_a_grid(a, b):
    grid = np.arange(-5, 40) + 0.5
    cells = [np.any([(s <= grid) & (grid < e) for s, e in spans] or [grid != grid], axis=0) for spans in (a, b)]
    both, either = (cells[0] & cells[1]).sum(), (cells[0] | cells[1]).sum()
    assert union_iou(a, b) == union_iou(b, a) == pytest.approx(both / either if either else float(not a and not b))
    if len(a) == len(b) == 1:
        assert temporal_iou(b[0], a[0]) == temporal_iou(a[0], b[0]) == pytest.approx(
            both / either if is_span(a[0]) and is_span(b[0]) else 0)
    assert sum(e - s for s, e in merged(a)) == cells[0].sum()
    assert union_iou(merged(a), a) == pytest.approx(float(cells[0].any() or not a))


@settings(max_examples=100)
@given(st.lists(ANY, max_size=3), st.lists(ANY, min_size=2, max_size=2), st.floats(1e-3, 1e6))
def test_bounded_whatever_the_numbers(a, b, duration):
    assert 0 <= temporal_iou(a, b) <= 1 and 0 <= union_iou([a], [b]) <= 1 and 0 <= interval_precision([b], [a]) <= 1
    if is_span(b):
        assert temporal_iou(b, b) in (0, 1) and 0 <= boundary_iou([v * 0.5 for v in b], b, duration) <= 1


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
    ("٣ to ٧", [], None, False), ("x3 to 7", [], None, False),
    ("", [], None, False)]


def test_several_spans():
    assert read_spans("0 to 1, 2 to 3, 4 to 5", 2) == [[0, 1], [2, 3]]
    assert only_spans("0 to 1, 2 to 3", 2) and not only_spans("0 to 1, 2 to 3", 1) and not only_spans("0 to 1", 2)
    assert read_spans(format_span([0.1 + 0.2, 12.0])) == [[0.3, 12]] and format_span([3, 10.50004]) == "3 to 10.50004"


test_two_intervals_by_hand = by_hand(lambda a, b: (temporal_iou(a, b), boundary_iou(a, b, 40)), [
    ([10, 20], [10, 20], 1, 1), ([12, 20], [10, 20], 0.8, 0.8 * 0.95),  # two of 40 seconds off
    ([5, 15], [10, 20], 1 / 3, 1 / 3 * 0.875 * 0.875), ([0, 40], [10, 20], 0.25, 0.25 * 0.75 * 0.5),  # the whole clip
    ([12.5, 17], [10, 20], 0.45, 0.45 * 0.9375 * 0.925), ([20, 30], [10, 20], 0, 0),  # they touch
    ([30, 35], [10, 20], 0, 0), ([20, 10], [10, 20], 0, 0),  # from the end to the start
    ([15, 15], [10, 20], 0, 0), ([0, 1e6], [10, 20], 1e-5, 0),  # an end beyond the clip by more than the clip
    ([-1e9, 1e9], [10, 20], 5e-9, 0), ([NAN, 20], [10, 20], 0, 0),
    ([10, INF], [10, 20], 0, 0)], values=2, abs=1e-9)
test_unions_by_hand = by_hand(lambda spans, truth: (union_iou(spans, truth), interval_precision(spans, truth)), [
    ([], [], 1, 1), ([], [[1, 2]], 0, 0), ([[1, 2]], [], 0, 0), ([[5, 5]], [], 0, 0),
    ([[13.8, 29.8]], [[13.8, 29.8]], 1, 1), ([[1, 3], [2, 5], [8, 9]], [[1, 5], [8, 9]], 1, 1),  # the same union
    ([[0, 3], [2, 4], [22, 25]], [[1, 5], [2, 4]], 3 / 8, 3 / 7),  # shared 3, of 7 and 4
    ([[0, 40]], [[20.9, 22.7], [23.8, 26.0]], 0.1, 0.1), ([[20.9, 22.7]], [[20.9, 22.7], [23.8, 26.0]], 0.45, 1),
    ([[7, 3]], [[3, 7]], 0, 0), ([[3, 7], [9, 8]], [[3, 7]], 1, 1),  # what is no interval covers nothing
    ([[0, INF]], [[3, 7]], 0, 0)], values=2, abs=1e-09)
test_texts_that_are_read = by_hand(
    lambda text: (read_spans(text), last_span(text), only_spans(text, 1)), READ, values=3)
test_lists_of_spans = by_hand(span_list, [
    ("[]", []), (" [ ] ", []), ("[(5.2, 10.4)]", [[5.2, 10.4]]), ("[(3,7),(9.5, 12)]", [[3, 7], [9.5, 12]]),
    ("[(3, 7),\n(8, 8),]", [[3, 7], [8, 8]]), ("[(7, 3)]", None), ("[(3, 7), (9, 8)]", None), ("[[3, 7]]", None),
    ("[(3, 7)(8, 9)]", None), ("[,(3, 7)]", None), ("[(3, 7),,]", None), ("(3, 7)", None), ("[(3, 7)", None),
    ("[(3, 7)] so", None), ("[(-3, 7)]", None), ("[(3, 7, 9)]", None), ("[(nan, 7)]", None), ("[(3, 1e999)]", None),
    ("[~]", None), ("", None), ("[" + "(1, 2)," * 1001 + "]", None)])


PIECES = ["3", "7.5", "1:02", " to ", " and ", "-", ",", "[", "]", "(", ")", "{", "}", '"start_time": ',
          '"end_time": ', "s", " seconds", "nan", "1e999", "9" * 40, ":", ".", "~", " ", "\n", "٣", "\ud800", "'"]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join) | st.text(max_size=60))
def test_reading_never_raises(text):
    found = [*read_spans(text), *([last_span(text)] if last_span(text) else []), *(span_list(text) or [])]
    json.dumps(found, allow_nan=False)
    assert all(len(span) == 2 and min(span) >= 0 for span in found) and only_spans(text, 1) in (True, False)


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_a_written_span_is_the_same_span(start, length):
    span = [start, start + length]
    assert temporal_iou(read_spans(format_span(span))[0], span) == pytest.approx(1, abs=1e-6)
    assert temporal_iou(last_span(format_span(span)), span) == pytest.approx(1, abs=1e-6)
