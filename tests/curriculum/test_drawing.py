"""Weighted draws without repetition: their shares, over more weights than a block has."""

import numpy as np
import pytest
from scipy.stats import chisquare

from vlrl.curriculum.drawing import _BLOCK, _reached, stream, weighted

SIZES = (1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 20 * _BLOCK + 7)


def some(size, dtype=np.float64):
    """Weights, a third of them 0."""
    found = stream(size).random(size)
    found[stream(size, 1).random(size) < 1 / 3] = 0
    found[-1] = 0.5
    return found.astype(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_a_place_is_where_the_running_sum_exceeds_the_number(size):
    weights = some(size)
    below = np.cumsum(np.add.reduceat(weights, np.arange(0, size, _BLOCK)))
    reach = stream(3).random(2000) * weights.sum()
    assert _reached(weights, below, reach).tolist() == np.searchsorted(np.cumsum(weights), reach, side="right").tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_follow_the_weights_over_several_blocks(dtype):
    weights, draw = some(5 * _BLOCK + 3, dtype), stream(5)
    found = np.bincount([int(weighted(weights, 1, draw)[0]) for _ in range(4000)], minlength=len(weights))
    parts = np.arange(len(weights)) // 20
    expected = np.bincount(parts, weights)
    assert chisquare(np.bincount(parts, found), expected / expected.sum() * 4000).pvalue > 1e-3
    assert not found[weights == 0].any()


@pytest.mark.parametrize("size", SIZES)
def test_no_place_comes_twice_while_others_are_left(size):
    weights = some(size)
    positive = np.flatnonzero(weights)
    assert sorted(weighted(weights, len(positive), stream(6)).tolist()) == positive.tolist()
    counts = np.bincount(weighted(weights, 2 * len(positive) + 1, stream(7)), minlength=size)
    assert sorted({*counts[positive].tolist()}) == ([3] if len(positive) == 1 else [2, 3]) and counts.max() == 3


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [np.inf, 1.0], [np.nan, 1.0]])
def test_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(ValueError, match="the weights must be finite"):
        weighted(np.array(weights, dtype=np.float64), 2, stream(8))
