"""Aggregations by hand; counts are those of the whole optimizer step."""

from dataclasses import replace

import pytest
import torch

from tests.algo.flat import flat
from vlrl.algo.aggregation import AGGREGATIONS

# two rollouts, of two tokens and of one; max_length 4
LOSS, IDS = [1.0, 3.0, -2.0], [0, 0, 1]


def test_by_hand():
    for name, value, slope in (("token_mean", 2 / 3, [1 / 3] * 3),
                               ("sequence_mean", (4 / 2 - 2) / 2, [1 / 4, 1 / 4, 1 / 2]),
                               ("constant", 2 / (2 * 4), [1 / 8] * 3), ("sequence_sum", 2 / 2, [1 / 2] * 3)):
        per_token = torch.tensor(LOSS, dtype=torch.float64, requires_grad=True)
        loss = AGGREGATIONS[name](per_token, flat([0.0] * 3, rollout=IDS))
        assert loss.item() == pytest.approx(value, abs=1e-9), name
        assert torch.autograd.grad(loss, per_token)[0].tolist() == pytest.approx(slope, abs=1e-9), name
    for name, value in (("token_mean", (1 - 6) / 2), ("sequence_mean", (1 - 6) / 2), ("constant", (1 - 6) / 8),
                        ("sequence_sum", -5 / 2)):  # masked tokens do not count, and samples have weights
        x = flat([0.0] * 3, rollout=IDS, mask=[1, 0, 1], weights=[1.0, 1.0, 3.0])
        assert AGGREGATIONS[name](torch.tensor(LOSS).double(), x).item() == pytest.approx(value, abs=1e-9), name
        nothing = flat([0.0] * 3, rollout=IDS, mask=[0, 0, 0])
        assert AGGREGATIONS[name](torch.tensor(LOSS).double(), nothing).item() == 0
        low = replace(flat([0.0] * 3, rollout=IDS), mask=torch.ones(3))
        assert AGGREGATIONS[name](torch.tensor(LOSS).bfloat16(), low).isfinite()
    x = flat([0.0] * 3, rollout=IDS)
    assert AGGREGATIONS["constant"](torch.tensor(LOSS).double(), x, length=64).item() == pytest.approx(2 / 128)
