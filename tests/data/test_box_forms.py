"""What boxes of a file are: read as they are said to be, and doubted where nobody says it."""

import random

import pytest

from tests.tables import each
from vlrl.data.sources.box_forms import box_doubt, boxes_to_pixels

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
