"""Conventions of coordinates, there and back; what boxes of a file are, and the doubt where nobody says it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from vlrl.data.coordinates import CONVENTIONS, make
from vlrl.data.sources.box_forms import box_doubt, boxes_to_pixels
from vlrl.errors import ConfigError, DataError
from vlrl.types import Sample


def sample(width=640, height=480, **row):
    return Sample(id="r1", row={"width": width, "height": height, **row})


@each("convention written original", [
    ("original", [64, 48, 320, 240], [64, 48, 320, 240]), ("norm1000", [100, 100, 500, 1000], [64, 48, 320, 480]),
    ("norm999", [0, 0, 999, 999], [0, 0, 640, 480]), ("norm1", [0.1, 0.5, 0.5, 1.0], [64, 240, 320, 480]),
    ("processed", [28, 14, 140, 84], [64, 32, 320, 192]),  # 280x210 processed, so 16/7 original pixels each
])
def test_both_ways(convention, written, original):
    row = sample(processed_size=[280, 210])
    assert make(convention).to_original(row, written) == pytest.approx(original, abs=1e-5)
    assert make(convention).from_original(row, original) == pytest.approx(written, abs=1e-5)
    assert make(convention).to_original(row, written[:2]) == pytest.approx(original[:2], abs=1e-5)


def test_what_is_whole_and_what_a_row_overrides():
    row = sample(processed_size=[280, 210])
    for convention in ("norm1000", "norm999", "processed"):
        assert all(isinstance(v, int) for v in make(convention).from_original(row, [1.2, 3.4, 55.5, 77.7]))
    assert make("norm1").from_original(row, [1, 3, 100 / 3, 77]) == [0.0016, 0.0063, 0.0521, 0.1604]
    assert make("original").from_original(row, [1.25, 3, 5, 7]) == [1.25, 3, 5, 7]
    assert make("norm1000").to_original(sample(333, 777), [1, 1]) == [0.333, 0.777]
    row = sample(coordinates="norm1000")
    assert make("original").to_original(row, [500, 500]) == [320, 240]
    assert make("norm1000").to_original(sample(coordinates="original"), [500, 500]) == [500, 500]
    with pytest.raises(ConfigError, match=r"task.coordinates='norm100'.*Did you mean 'norm1000'"):
        make("norm100")


@given(st.sampled_from(CONVENTIONS), st.integers(8, 8000), st.integers(8, 8000), st.integers(28, 4000),
       st.integers(28, 4000), st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_round_trip_within_one_unit(convention, width, height, processed_width, processed_height, shares):
    row = sample(width, height, processed_size=[processed_width, processed_height])
    box = [share * side for share, side in zip(shares, [width, height] * 2, strict=True)]
    back = make(convention).to_original(row, make(convention).from_original(row, box))
    full = {"original": (width, height), "processed": (processed_width, processed_height), "norm1000": (1000, 1000),
            "norm999": (999, 999), "norm1": (10_000, 10_000)}[convention]
    units = [width / full[0], height / full[1]] * 2
    assert all(abs(a - b) <= unit for a, b, unit in zip(box, back, units, strict=True))


@each("convention row words", [
    ("processed", {}, ["r1", "processed_size", "task.coordinates"]),
    ("processed", {"processed_size": [0, 5]}, ["r1", "processed_size=0"]),
    ("processed", {"processed_size": 28}, ["r1", "processed_size=28"]),
    ("norm1000", {"width": None}, ["r1", "width=None"]), ("norm1000", {"height": -3}, ["r1", "height=-3"]),
    ("norm1000", {"height": True}, ["r1", "height=True"]),
    ("original", {"coordinates": "norm100"}, ["r1", "norm100", "norm1000"])])
def test_a_row_that_cannot_be_converted_is_named(convention, row, words):
    with pytest.raises(DataError) as error:
        make(convention).to_original(sample(**row), [1, 2, 3, 4])
    assert all(word in str(error.value) for word in words)


WIDE, HIGH = 1280, 960


def drawn(count: int, write, side: float = 1.0) -> list[dict]:
    """Rows with boxes anywhere in the picture, written in some way from [x, y, width, height] in pixels."""
    rng, rows = random.Random(1), []
    for _ in range(count):
        w, h = rng.uniform(60, 400), rng.uniform(60, 300)
        rows.append({"width": WIDE * side, "height": HIGH * side, "boxes": [{"box": write(
            rng.uniform(0, WIDE - w), rng.uniform(0, HIGH - h), w, h)}]})
    return rows


WRITTEN = {
    "norm1000": lambda x, y, w, h: [x / 1.28, y / 0.96, (x + w) / 1.28, (y + h) / 0.96],
    "norm1": lambda x, y, w, h: [x / WIDE, y / HIGH, (x + w) / WIDE, (y + h) / HIGH],
    "xywh": lambda x, y, w, h: [x, y, w, h],
    "xywh-norm1000": lambda x, y, w, h: [x / 1.28, y / 0.96, w / 1.28, h / 0.96],
    "xywh-norm1": lambda x, y, w, h: [x / WIDE, y / HIGH, w / WIDE, h / HIGH],
    "": lambda x, y, w, h: [x, y, x + w, y + h]}


@each("form", WRITTEN)
def test_what_boxes_seem_to_be(form):
    rows = drawn(40, WRITTEN[form])
    found = box_doubt(rows)
    assert (found and f"data.boxes={form} " in found.message) if form else found is None
    for row, right in zip(rows, drawn(40, WRITTEN[""]), strict=True) if form else ():
        assert boxes_to_pixels(row, form)["boxes"][0]["box"] == pytest.approx(right["boxes"][0]["box"], abs=1e-2)


def test_points_and_small_pictures():
    rows = [{**row, "width": 640, "height": 480} for row in drawn(40, WRITTEN["norm1000"])]
    assert "data.boxes=norm1000 " in box_doubt(rows).message
    row = {"width": 200, "height": 100, "points": [[500, 500]], "action": {"type": "click", "point": [1000, 0]},
           "box": [0, 0, 500, 500]}
    assert boxes_to_pixels(row, "norm1000") == {
        **row, "points": [[100, 50]], "action": {"type": "click", "point": [200, 0]}, "box": [0, 0, 100, 50]}
    assert boxes_to_pixels(row, "pixels") == row


@each("rows", [
    [], [{"boxes": []}], [{"width": 640, "height": 480, "boxes": None, "points": "x", "action": 3}],
    [{"width": 1, "height": 1, "box": [0, 0, 1, 1]}], [{"width": 1024, "height": 768, "box": [10, 10, 990, 700]}] * 9,
    [{"width": 3840, "height": 2160, "box": [10 * n, 5, 10 * n + 9, 20]} for n in range(40)],  # a toolbar
    [{"width": 640, "height": 480, "box": [0, 0, 700, 400]}, *({"width": 640, "height": 480, "box": [n, 0, 600, 9]}
                                                             for n in range(20))]])
def test_what_may_well_be_pixels_is_not_doubted(rows):
    assert box_doubt(rows) is None
