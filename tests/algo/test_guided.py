"""What is learned from second attempts under guidance, by hand and against an implementation answer by answer."""

import math
import random

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
        mask=torch.tensor(mask, dtype=torch.float64), second=torch.tensor(second),
        pair=torch.tensor(pair), weights=torch.tensor(weights, dtype=torch.float64), total_tokens=tokens,
        total_attempts=count, step=step)


ROWS = [(0, True, [(-1.0, -1.5, 1), (-2.0, -2.0, 1), (-7.0, -1.0, 0)]), (0, False, [(-3.0, -2.0, 1)]),
        (1, True, [(-0.5, -0.5, 1)]), (1, False, [(-1.0, -3.0, 1), (-9.0, -1.0, 0)])]


def test_sft():
    a = attempts(ROWS, weights=(1.0, 2.0))
    loss = sft(a)
    assert loss.item() == pytest.approx((1.0 + 2.0 + 2 * 0.5) / 4)
    loss.backward()
    # neither a token that was not sampled nor one of a failure is learned from
    assert a.logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0, 0, -0.5, 0, 0])


def test_dpo():
    a = attempts(ROWS, weights=(1.0, 2.0))
    # margins of whole answers: 0.5 + 0 - (-1) = 1.5, and 0 - 2 = -2
    loss = dpo(a, beta=0.5)
    first, second = 1 / (1 + math.exp(0.75)), 1 / (1 + math.exp(-1.0))  # sigmoid(-beta margin)
    assert loss.item() == pytest.approx((-LN(1 - first) - 2 * LN(1 - second)) / 2)
    loss.backward()
    slope = [0.5 * first / 2, 0.5 * 2 * second / 2]
    assert a.logprobs.grad.tolist() == pytest.approx([-slope[0], -slope[0], 0, slope[0], -slope[1], slope[1], 0])


def test_expo():
    a = attempts(ROWS, weights=(1.0, 2.0), step=25)
    loss = expo(a, beta=0.4, decay=100)
    # 0.4 * 0.75 times the mean of 1.5, the mean of 1 and 2, and 2 * 0.5
    assert loss.item() == pytest.approx(0.3 * (1.5 + 1.0) / 2)
    loss.backward()
    assert a.logprobs.grad.tolist() == pytest.approx([-0.075, -0.075, 0, 0, -0.3, 0, 0])
    assert [expo(attempts(ROWS, step=s), decay=100).item() > 0 for s in (0, 99, 100, 300)] == [True, True, False, False]


def test_at_the_reference_dpo_pushes_every_pair_alike():
    a = attempts([(p, s, [(x, x, m) for x, _, m in own]) for p, s, own in ROWS])
    assert dpo(a).item() == pytest.approx(LN(2))


def test_the_options():
    assert {*LOSSES} == {"sft", "expo", "dpo"}
    assert LOSSES["dpo"].requires == {"reference", "failures"} and not hasattr(LOSSES["sft"], "requires")


def drawn(rng):
    """Rows of an optimizer step, and of how many micro-batches each pair is in one."""
    pairs = rng.randint(1, 6)
    def answer():
        return [(-rng.expovariate(1), -rng.expovariate(1), float(rng.random() < 0.8))
                for _ in range(rng.randint(1, 9))]
    return [(p, second, answer()) for p in range(pairs) for second in (True, False)], [
        rng.uniform(0.5, 2) for _ in range(pairs)]


def by_answer(rows, weights, beta, step=0):
    """(sft, dpo, expo), one answer after the other."""
    written = {key: sum(p for p, _, m in own if m) for *key, own in rows for key in [tuple(key)]}
    known = {key: sum(r for _, r, m in own if m) for *key, own in rows for key in [tuple(key)]}
    tokens = sum(m for _, second, own in rows if second for *_, m in own)
    cross = sum(-weights[p] * total for (p, second), total in written.items() if second)
    preferred = 0.0
    for p, weight in enumerate(weights):
        gain = {s: written[p, s] - known[p, s] for s in (True, False)}
        preferred += weight * math.log1p(math.exp(-beta * (gain[True] - gain[False])))
    explained = 0.0
    for p, second, own in rows:
        sampled = [x for x, _, m in own if m]
        if second and sampled and step < 50:
            explained -= weights[p] * beta * (50 - step) / 50 * sum(sampled) / len(sampled)
    return cross / max(tokens, 1), preferred / len(weights), explained / len(weights)


def test_they_are_what_one_computes_answer_by_answer():
    rng = random.Random(0)
    for _ in range(200):
        rows, weights = drawn(rng)
        beta = rng.uniform(0.05, 1)
        tokens = sum(m for _, second, own in rows if second for *_, m in own)
        step = rng.randrange(80)
        wanted = by_answer(rows, weights, beta, step)
        whole = attempts(rows, weights, tokens, len(weights), step=step)
        assert expo(whole, beta, 50).item() == pytest.approx(wanted[2], abs=1e-6)
        assert sft(whole).item() == pytest.approx(wanted[0], abs=1e-6)
        assert dpo(whole, beta).item() == pytest.approx(wanted[1], abs=1e-6)
        # micro-batches add up
        parts = [attempts([(0, s, own) for q, s, own in rows if q == p], weights[p:p + 1], tokens, len(weights),
                          step=step)
                 for p in range(len(weights))]
        assert sum(sft(a).item() for a in parts) == pytest.approx(wanted[0], abs=1e-6)
        assert sum(dpo(a, beta).item() for a in parts) == pytest.approx(wanted[1], abs=1e-6)
        assert sum(expo(a, beta, 50).item() for a in parts) == pytest.approx(wanted[2], abs=1e-6)
