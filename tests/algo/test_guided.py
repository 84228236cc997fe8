"""What is learned from second attempts under guidance, by hand and against an implementation answer by answer."""

import math

import pytest
import torch

from vlrl.methods.second_attempts.update import LOSSES, RetryBatch, dpo, expo, sft

LN = math.log


def attempts(rows, weights=(1.0, 1.0), tokens=4.0, count=2.0, reference=True, step=0):
    """Of rows (pair, second, [(logprob, reference, sampled)])."""
    flat = [(pair, second, *values) for pair, second, own in rows for values in own]
    pair, second, logprobs, known, mask = (list(v) for v in zip(*flat, strict=True))
    return RetryBatch(
        logprobs=torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        reference=torch.tensor(known, dtype=torch.float64) if reference else None,
        mask=torch.tensor(mask, dtype=torch.float64), is_retry=torch.tensor(second),
        pair=torch.tensor(pair), weights=torch.tensor(weights, dtype=torch.float64), total_tokens=tokens,
        total_attempts=count, step=step)


ROWS = [(0, True, [(-1.0, -1.5, 1), (-2.0, -2.0, 1), (-7.0, -1.0, 0)]), (0, False, [(-3.0, -2.0, 1)]),
        (1, True, [(-0.5, -0.5, 1)]), (1, False, [(-1.0, -3.0, 1), (-9.0, -1.0, 0)])]


def test_by_hand():
    a = attempts(ROWS, weights=(1.0, 2.0))
    loss = sft(a)
    assert loss.item() == pytest.approx((1.0 + 2.0 + 2 * 0.5) / 4)
    loss.backward()
    # neither a token that was not sampled nor one of a failure is learned from
    assert a.logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0, 0, -0.5, 0, 0])
    a = attempts(ROWS, weights=(1.0, 2.0))
    # margins of whole answers: 0.5 + 0 - (-1) = 1.5, and 0 - 2 = -2
    loss = dpo(a, beta=0.5)
    first, second = 1 / (1 + math.exp(0.75)), 1 / (1 + math.exp(-1.0))  # sigmoid(-beta margin)
    assert loss.item() == pytest.approx((-LN(1 - first) - 2 * LN(1 - second)) / 2)
    loss.backward()
    slope = [0.5 * first / 2, 0.5 * 2 * second / 2]
    assert a.logprobs.grad.tolist() == pytest.approx([-slope[0], -slope[0], 0, slope[0], -slope[1], slope[1], 0])
    a = attempts(ROWS, weights=(1.0, 2.0), step=25)
    loss = expo(a, beta=0.4, decay=100)
    # 0.4 * 0.75 times the mean of 1.5, the mean of 1 and 2, and 2 * 0.5
    assert loss.item() == pytest.approx(0.3 * (1.5 + 1.0) / 2)
    loss.backward()
    assert a.logprobs.grad.tolist() == pytest.approx([-0.075, -0.075, 0, 0, -0.3, 0, 0])
    assert [expo(attempts(ROWS, step=s), decay=100).item() > 0 for s in (0, 99, 100, 300)] == [True, True, False, False]


def test_the_options():
    assert {*LOSSES} == {"sft", "expo", "dpo"}
    assert LOSSES["dpo"].requires == {"reference", "failures"} and not hasattr(LOSSES["sft"], "requires")
