"""Weighted draws without repetition: their shares, over more weights than a block has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from vlrl.curriculum.base import Prompts, stream
from vlrl.curriculum.drawing import _BLOCK, Uniform, _found, weighted

SIZES = (1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 20 * _BLOCK + 7)


def some(size, dtype=np.float64):
    """Weights, a third of them 0."""
    found = stream(size).random(size)
    found[stream(size, 1).random(size) < 1 / 3] = 0
    found[-1] = 0.5
    return found.astype(dtype)


def test_a_place_is_where_the_running_sum_exceeds_the_number_and_none_comes_twice_while_others_are_left():
    for size in SIZES:
        weights = some(size)
        below = np.cumsum(np.add.reduceat(weights, np.arange(0, size, _BLOCK)))
        reach = stream(3).random(2000) * weights.sum()
        wanted = np.searchsorted(np.cumsum(weights), reach, side="right")
        assert _found(weights, below, reach).tolist() == wanted.tolist(), size
        positive = np.flatnonzero(weights)
        assert sorted(weighted(weights, len(positive), stream(6)).tolist()) == positive.tolist()
        counts = np.bincount(weighted(weights, 2 * len(positive) + 1, stream(7)), minlength=size)
        assert sorted({*counts[positive].tolist()}) == ([3] if len(positive) == 1 else [2, 3]) and counts.max() == 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_follow_the_weights_over_several_blocks(dtype):
    weights, draw = some(5 * _BLOCK + 3, dtype), stream(5)
    found = np.bincount([int(weighted(weights, 1, draw)[0]) for _ in range(2000)], minlength=len(weights))
    parts = np.arange(len(weights)) // 20
    expected = np.bincount(parts, weights)
    assert chisquare(np.bincount(parts, found), expected / expected.sum() * 2000).pvalue > 1e-3
    assert not found[weights == 0].any()


def test_weights_that_cannot_be_are_refused():
    for weights in ([], [0.0, 0.0], [1.0, -1.0], [np.inf, 1.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="the weights must be finite"):
            weighted(np.array(weights, dtype=np.float64), 2, stream(8))


def streamed(size, buffer, seed=0, epoch=0):
    prompts = Prompts(size, seed)
    prompts.buffer = buffer
    return Uniform(prompts).order(epoch)


@given(st.integers(1, 5000), st.integers(1, 6000), st.integers(0, 3))
def test_a_streamed_order_has_every_row_once(size, buffer, epoch):
    order = streamed(size, buffer, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(size))
    assert np.array_equal(order, streamed(size, buffer, epoch=epoch))


def test_a_streamed_order_stays_near_the_disk_and_goes_on():
    size = 20_500
    assert np.count_nonzero(np.diff(streamed(size, 1)) != 1) <= 20  # runs, each as it lies there
    for buffer in (10, 1000, 3000):
        order = streamed(size, buffer)
        for begin in range(0, size, buffer):
            assert len(np.unique(order[begin:begin + buffer] // 1000)) <= -(-buffer // 1000) + 1
    assert [*streamed(50, 50, epoch=0)] != [*streamed(50, 50, epoch=1)] != sorted(streamed(50, 50, epoch=1))
    prompts = Prompts(2500, 7)
    prompts.buffer = 300
    whole = Uniform(prompts)
    every = [draw.index for _ in range(600) for draw in whole.next(7, 0)]
    begun = Uniform(prompts)
    first = [draw.index for draw in begun.next(1234, 0)]
    after = Uniform(prompts)
    after.load_state_dict(begun.state_dict())
    assert first + [d.index for d in after.next(2966, 0)] == every
