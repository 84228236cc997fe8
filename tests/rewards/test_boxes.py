import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards.boxes import box_format, format_box, giou, iou, is_number, parse_box, parse_boxes, parse_integer_box

SIDE = st.floats(-1e4, 1e4)


@st.composite
def boxes(draw):
    x, y = draw(SIDE), draw(SIDE)
    return [x, y, x + draw(st.floats(0.01, 1e4)), y + draw(st.floats(0.01, 1e4))]


@given(boxes(), boxes())
def test_iou_and_giou_are_bounded_and_symmetric(a, b):
    assert iou(a, a) == pytest.approx(1) and giou(a, a) == pytest.approx(1)
    assert 0 <= iou(a, b) <= 1 and iou(a, b) == pytest.approx(iou(b, a))
    assert -1 <= giou(a, b) <= iou(a, b) + 1e-9


@given(st.lists(st.floats(), max_size=5), st.lists(st.floats(), max_size=5))
def test_iou_and_giou_never_raise(a, b):
    assert 0 <= iou(a, b) <= 1
    assert -1 <= giou(a, b) <= 1


def test_boxes_and_numbers_by_hand():
    assert parse_boxes("a [1, 2, 3, 4] b [5,6,7] c [5, 6, 7, 8]") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert parse_boxes("none") == []
    assert all(map(is_number, (0, -1, 1.5, 10**300)))
    assert not any(map(is_number, (True, None, "1", math.nan, math.inf, 10**400, [1], 1j)))
    assert format_box([1, 2.0, 3.25, -0.00001]) == "[1, 2, 3.25, 0]"


@each("text", ["[" * 100_000, "[1" * 50_000, "[" + "1" * 100_000, "[" + " " * 100_000,
                                  "[1," * 33_000, "[1, 2, 3, " * 10_000, "[" + "1." * 50_000,
                                  "[1" + " " * 100_000 + ", x", "[1, 2, 3, 4] " * 8_000])
def test_reading_hostile_text_takes_linear_time(text):
    began = time.perf_counter()
    parse_box(text)
    parse_boxes(text)
    box_format(text)
    assert time.perf_counter() - began < 20  # not a timing: a quadratic scan takes minutes


@given(st.text() | st.text("[]0123456789., -{}", max_size=200))
def test_parsers_never_raise(text):
    box = parse_box(text)
    assert box is None or (len(box) == 4 and all(math.isfinite(v) for v in box))
    assert box == next(iter(parse_boxes(text)), None)
    assert box_format(text) in (0, 1)


@given(boxes())
def test_a_written_box_is_read_back(box):
    assert parse_box(format_box(box)) == pytest.approx(box, abs=1e-4)
    assert box_format(format_box(box)) == 1


test_iou = by_hand(iou, [
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
test_giou = by_hand(giou, [
    ([0, 0, 10, 10], [0, 0, 10, 10], 1.0), ([0, 0, 1, 1], [2, 0, 3, 1], -1 / 3),  # union 2 of a hull of 3
    ([0, 0, 1, 1], [2, 2, 3, 3], 2 / 9 - 1), ([0, 0, 2, 2], [1, 1, 3, 3], 1 / 7 - 2 / 9),  # union 7 of a hull of 9
    ([0, 0, 4, 4], [1, 1, 3, 3], 0.25),  # one inside the other: the hull is the union
    ([1, 1, 0, 0], [0, 0, 1, 1], -1.0), ([0, 0, 10**400, 1], [0, 0, 1, 1], -1.0),
    ([0, 0, 10**200, 10**200], [0, 0, 1, 1], -1.0)], turned=True, abs=1e-05)
test_parse_box = by_hand(parse_box, [
    ("[1, 2, 3, 4]", [1, 2, 3, 4]), ("[1,2,3,4]", [1, 2, 3, 4]), ("[ 1 ,\n2, 3 , 4 ]", [1, 2, 3, 4]),
    ("[1.5, -2, .25, +4.]", [1.5, -2, 0.25, 4]), ("It is at [1, 2, 3, 4] or at [5, 6, 7, 8].", [1, 2, 3, 4]),
    ('```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]\n```', [10, 20, 30, 40]),
    ("[[1, 2, 3, 4]]", [1, 2, 3, 4]), ("[1, 2, 3] then [1, 2, 3, 4, 5] then [9, 8, 7, 6]", [9, 8, 7, 6]),
    ("[1, 2, [5, 6, 7, 8]", [5, 6, 7, 8]), ("[1, 2, 3, 4", None), ("1, 2, 3, 4", None), ("(1, 2, 3, 4)", None),
    ("[1, 2, 3, x]", None), ("[1 2 3 4]", None), ("[1, 2, 3, 1e999]", None), ("[nan, inf, 1, 2]", None),
    ("[" + "9" * 400 + ", 1, 2, 3]", None), ("[١, ٢, ٣, ٤]", None),  # other digits than 0-9
    ("", None)])
test_parse_whole_box = by_hand(parse_integer_box, [
    ("[1, 2, 3, 4]", [1, 2, 3, 4]), ("[1,2,3,4] [5,6,7,8]", [1, 2, 3, 4]), ("[1.5, 2, 3, 4]", None),
    ("[-1, 2, 3, 4]", None), ("[1, 2, 3]", None), ("[١, ٢, ٣, ٤]", None), ("", None)])
test_box_format = by_hand(box_format, [
    ("[1, 2, 3, 4]", 1), (" [1,2,3,4]\n", 1), ("[1, 2, 3, 4].", 0), ("[1, 2, 3, 4] [1, 2, 3, 4]", 0), ("", 0),
    ("the box is [1, 2, 3, 4]", 0)])
