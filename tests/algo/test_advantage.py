"""Advantages against values worked out by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlrl.algo.advantage import dr_grpo, group_advantages, grpo

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)


def test_grpo_by_hand():
    # rewards 1, 2, 3, 6: mean 3, deviations -2 -1 0 3, squares 14, Bessel variance 14/3
    std = math.sqrt(14 / 3)
    expected = [d / (std + 1e-4) for d in (-2, -1, 0, 3)]
    assert group_advantages([1.0, 2.0, 3.0, 6.0], grpo) == pytest.approx(expected, abs=1e-9)


def test_dr_grpo_by_hand():
    assert group_advantages([1.0, 2.0, 3.0, 6.0], dr_grpo) == pytest.approx([-2, -1, 0, 3], abs=1e-12)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
def test_equal_rewards_give_exactly_zero(advantage):
    assert group_advantages([0.1] * 7, advantage) == [0.0] * 7


@pytest.mark.parametrize("advantage", [grpo, dr_grpo])
def test_unscorable_rollouts_are_left_out(advantage):
    with_none = group_advantages([1.0, None, 2.0, 6.0], advantage)
    without = group_advantages([1.0, 2.0, 6.0], advantage)
    assert with_none[1] == 0.0 and [with_none[0], *with_none[2:]] == without
    assert group_advantages([None, None], advantage) == [0.0, 0.0]
    assert group_advantages([None, 3.0], advantage) == [0.0, 0.0]


@given(REWARDS)
def test_sum_is_zero_and_order_is_kept(rewards):
    out = group_advantages(rewards, grpo)
    assert abs(sum(out)) < 1e-6
    assert all(math.isfinite(a) for a in out)
    pairs = sorted(zip(rewards, out, strict=True))
    assert all(a <= b + 1e-12 for (_, a), (_, b) in itertools.pairwise(pairs))
    assert group_advantages(rewards[::-1], grpo) == pytest.approx(out[::-1], abs=1e-9)


def test_same_as_torch_nan_free():
    r = torch.tensor([0.3, 0.9, 0.1, 0.4])
    assert torch.allclose(grpo(r), (r - r.mean()) / (r.std(unbiased=True) + 1e-4))
