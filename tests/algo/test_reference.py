"""References that move."""

import pytest
import torch

from tests.algo.flat import bound
from vlrl.algo.reference import REFERENCES
from vlrl.errors import ConfigError


@pytest.fixture
def weights():
    reference, policy = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.nn.Parameter(torch.tensor([3.0, 0.0]))}
    optimizer = torch.optim.AdamW(policy.values())
    policy["w"].grad = torch.ones(2)
    optimizer.step()
    policy["w"].data = torch.tensor([3.0, 0.0])
    return reference, policy, optimizer


def test_ema_follows_slowly(weights):
    ema, (reference, _, optimizer) = bound(REFERENCES, "ema", decay=0.75, every=2).function, weights
    assert not ema.after_step(*weights, kl=0, done=1) and reference["w"].tolist() == [1, 2]
    assert not ema.after_step(*weights, kl=0, done=2) and reference["w"].tolist() == [1.5, 1.5]
    assert optimizer.state and ema.moves


@pytest.mark.parametrize(("options", "kl", "done", "is_reset", "afresh"), [
    ({"every": 3}, 9.0, 3, True, True), ({"every": 3}, 9.0, 4, False, False),
    ({"every": 0, "kl": 1}, 1.5, 4, True, True),
    ({"every": 0, "kl": 1}, 1.0, 4, False, False), ({"every": 3, "kl": 1, "optimizer": False}, 0.5, 6, True, False)])
def test_reset(weights, options, kl, done, is_reset, afresh):
    reference, policy, optimizer = weights
    assert bound(REFERENCES, "reset", **options).function.after_step(*weights, kl, done) == is_reset
    assert reference["w"].tolist() == ([3, 0] if is_reset else [1, 2]) and afresh == (not optimizer.state)
    policy["w"].data += 1
    assert reference["w"].tolist() == ([3, 0] if is_reset else [1, 2])  # a copy


def test_frozen(weights):
    for name in ("auto", "frozen"):
        frozen = bound(REFERENCES, name).function
        assert not frozen.moves and not frozen.after_step(*weights, 9, 1) and weights[0]["w"].tolist() == [1, 2]
    with pytest.raises(ConfigError, match="never be reset"):
        bound(REFERENCES, "reset", every=0)
