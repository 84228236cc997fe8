"""The loss of a reward model: by hand, against a second implementation, and whatever the micro-batches."""

import math

import pytest
import torch

from tests.algo.flat import flat, part
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


def test_rows_weigh_and_equal_scores_are_half_right():
    x = pairs([0, 1, 2, 3], [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0], weights=[2.0, 2.0, 0.0, 0.0])
    loss, metrics = pair_loss(x, torch.tensor([0.0, 0.0, 5.0, 1.0]))
    assert float(loss) == pytest.approx(2 * math.log(2) / 2, abs=1e-6)
    assert float(metrics["pairs/accuracy"]) / x.total_tokens == pytest.approx(0.75)
    term, _ = bradley_terry(x)
    assert not term.any() and not term.requires_grad


def second(values, ids, mask, group, rewards):
    """One pair after the other, in plain Python."""
    score = {}
    for value, r, m in zip(values, ids, mask, strict=True):
        if m:
            score[r] = value
    total, known = 0.0, sorted(set(group))
    for g in known:
        own = sorted((r for r in range(len(group)) if group[r] == g), key=lambda r: -rewards[r])
        total += math.log1p(math.exp(-(score[own[0]] - score[own[1]])))
    return total / len(known)


def test_against_a_second_implementation_in_any_micro_batches():
    draw = torch.Generator().manual_seed(3)
    for _ in range(100):
        count = int(torch.randint(1, 6, (1,), generator=draw))
        lengths = torch.randint(1, 5, (2 * count,), generator=draw).tolist()
        ids = [r for r, n in enumerate(lengths) for _ in range(n)]
        mask = [float(torch.rand(1, generator=draw)) < 0.7 for _ in ids]
        mask = [m or i == 0 or ids[i - 1] != ids[i] for i, m in enumerate(mask)]  # one at least
        group = [g for g in range(count) for _ in range(2)]
        rewards = [v for g in range(count) for v in ((1.0, 0.0) if g % 2 else (0.0, 1.0))]
        values = torch.randn(len(ids), generator=draw, dtype=torch.float64) * 3
        x = pairs(ids, group, rewards, mask=[float(m) for m in mask])
        whole, _ = pair_loss(x, values)
        assert float(whole) == pytest.approx(second(values.tolist(), ids, mask, group, rewards), abs=1e-6)
        cut = 2 * int(torch.randint(0, count + 1, (1,), generator=draw))
        shares = [pair_loss(part(x, rollouts), values[torch.isin(x.rollout_id, torch.tensor(rollouts))])[0]
                  for rollouts in ([*range(cut)], [*range(cut, 2 * count)]) if rollouts]
        assert float(sum(shares)) == pytest.approx(float(whole), abs=1e-6)
