"""Aggregations by hand; counts are those of the whole optimizer step."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algo.flat import flat, part, random_step
from vlrl.algo.aggregation import AGGREGATIONS

# two rollouts, of two tokens and of one; max_length 4
LOSS, IDS = [1.0, 3.0, -2.0], [0, 0, 1]


@pytest.mark.parametrize("name, value, slope", [
    ("token_mean", 2 / 3, [1 / 3, 1 / 3, 1 / 3]), ("sequence_mean", (4 / 2 - 2) / 2, [1 / 4, 1 / 4, 1 / 2]),
    ("constant", 2 / (2 * 4), [1 / 8, 1 / 8, 1 / 8]), ("sequence_sum", 2 / 2, [1 / 2, 1 / 2, 1 / 2])])
def test_by_hand(name, value, slope):
    per_token = torch.tensor(LOSS, dtype=torch.float64, requires_grad=True)
    loss = AGGREGATIONS[name](per_token, flat([0.0] * 3, rollout=IDS))
    assert loss.item() == pytest.approx(value, abs=1e-9)
    assert torch.autograd.grad(loss, per_token)[0].tolist() == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("name, value", [
    ("token_mean", (1 - 6) / 2), ("sequence_mean", (1 - 6) / 2), ("constant", (1 - 6) / 8), ("sequence_sum", -5 / 2)])
def test_masked_tokens_do_not_count_and_samples_have_weights(name, value):
    x = flat([0.0] * 3, rollout=IDS, mask=[1, 0, 1], weights=[1.0, 1.0, 3.0])
    assert AGGREGATIONS[name](torch.tensor(LOSS).double(), x).item() == pytest.approx(value, abs=1e-9)


def test_a_constant_length_of_ones_own():
    x = flat([0.0] * 3, rollout=IDS)
    assert AGGREGATIONS["constant"](torch.tensor(LOSS).double(), x, length=64).item() == pytest.approx(2 / 128)


@settings(max_examples=5)
@given(st.integers(0, 10 ** 6), st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_shares_of_batches_add_up(name, seed, random):
    x = random_step(seed)
    order = list(range(len(x.lengths)))
    random.shuffle(order)
    parts = [part(x, rollouts) for rollouts in (order[:1], order[1:7], [], order[7:])]
    shares = sum(AGGREGATIONS[name](p.logprobs, p) for p in parts)
    assert shares.item() == pytest.approx(AGGREGATIONS[name](x.logprobs, x).item(), abs=1e-10)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_to_train_on(name):
    x = flat([0.0] * 3, rollout=IDS, mask=[0, 0, 0])
    assert AGGREGATIONS[name](torch.tensor(LOSS).double(), x).item() == 0
    low = replace(flat([0.0] * 3, rollout=IDS), mask=torch.ones(3))
    assert AGGREGATIONS[name](torch.tensor(LOSS).bfloat16(), low).isfinite()
