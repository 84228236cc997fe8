"""The loss of a reward model: by hand, against a second implementation, and whatever the micro-batches."""

import math

import pytest
import torch

from tests.algo.flat import flat
from vlrl.methods.preferences.loss import bradley_terry, pair_loss


def pairs(ids, group, rewards, mask=None, **more):
    return flat([-1.0] * len(ids), rollout=ids, group=group, rewards=rewards, mask=mask, **more)


def test_by_hand():
    """Scores are those of the last trained tokens: 2 and 1 of the first pair, whose better answer comes second, and 0
    and .5 of the other: margins -1 and -.5."""
    x = pairs([0, 0, 1, 1, 1, 2, 3], [0, 0, 1, 1], [0.0, 1.0, 1.0, 0.0], mask=[1, 1, 1, 1, 0, 1, 1])
    values = torch.tensor([9.0, 2.0, 9.0, 1.0, 9.0, 0.0, 0.5], requires_grad=True)
    loss, metrics = pair_loss(x, values)
    wanted = (math.log(1 + math.e) + math.log(1 + math.exp(0.5))) / 2
    assert loss.item() == pytest.approx(wanted, abs=1e-6)
    assert float(metrics["pairs/loss"]) / x.total_tokens == pytest.approx(wanted, abs=1e-6)
    assert float(metrics["pairs/margin"]) / x.total_tokens == pytest.approx(-0.75)
    assert float(metrics["pairs/accuracy"]) == 0
    loss.backward()
    a, b = 1 / (1 + math.exp(-1)) / 2, 1 / (1 + math.exp(-0.5)) / 2
    assert values.grad is not None
    assert torch.allclose(values.grad, torch.tensor([0, a, 0, -a, 0, -b, b]), atol=1e-6)
    centred, _ = pair_loss(x, values.detach(), 0.1)
    assert float(centred) == pytest.approx(wanted + 0.1 * (9 + 0.25) / 2, abs=1e-5)
    x = pairs([0, 1, 2, 3], [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0], weights=[2.0, 2.0, 0.0, 0.0])
    loss, metrics = pair_loss(x, torch.tensor([0.0, 0.0, 5.0, 1.0]))
    assert float(loss) == pytest.approx(2 * math.log(2) / 2, abs=1e-6)
    assert float(metrics["pairs/accuracy"]) / x.total_tokens == pytest.approx(0.75)
    term, _ = bradley_terry(x)
    assert not term.any() and not term.requires_grad
