import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.regions import clip_to_image, region_consistency, region_vote

A, C = [0, 0, 10, 10], [5, 0, 15, 10]
PLACE = st.integers(0, 29)


@st.composite
def boxes(draw):
    x, y = draw(PLACE), draw(PLACE)
    return [x, y, draw(st.integers(x + 1, 30)), draw(st.integers(y + 1, 30))]


def test_consistency_and_vote_by_hand():
    # columns 0-5 have 2 votes, 5-10 have 3, 10-15 have 1
    assert region_consistency([A, A, C]) == pytest.approx([250 / 300, 250 / 300, 200 / 300])
    assert region_consistency([A, None, A]) == [1, 0, 1]
    assert region_consistency([A, [50, 50, 60, 60]]) == [1, 1]  # nothing shared: the largest vote is 1
    assert region_consistency([None, None]) == [0, 0] and region_consistency([]) == []
    assert region_vote([A, A, C]) == [5, 0, 10, 10]
    assert region_vote([A, [20, 20, 40, 40]]) == [20, 20, 40, 40]  # of two regions with one vote the larger
    assert region_vote([A, [10, 10, 12, 12], [10, 0, 20, 10]]) == [0, 0, 20, 12]  # regions that touch are one
    assert region_vote([]) is None


@settings(max_examples=40)
@given(st.lists(boxes(), min_size=1, max_size=8))
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
