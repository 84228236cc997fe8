"""Losses to a teacher, by hand and against an implementation token by token; statistics of two models side by side."""

import math
import random

import pytest
import torch

from vlrl.algo.named import bind
from vlrl.config.base import Named
from vlrl.errors import ConfigError
from vlrl.methods.distillation.method import LOSSES, TokenChunk, reverse_kl, sampled_kl
from vlrl.models.logprobs import Head, token_stats

LN = math.log
P, Q = [0.5, 0.3, 0.0, 0.2], [0.2, 0.3, 0.0, 0.5]
"""The third token can be sampled of neither."""


def told(p, q, token):
    """One answer token; logits are known up to a constant."""
    own = torch.tensor([[LN(v) + 3.0 if v else -math.inf for v in p]], requires_grad=True)
    return TokenChunk(own, torch.tensor([[LN(v) - 1.0 if v else -math.inf for v in q]]), torch.tensor([token]))


def learned(loss, x):
    value = loss(x)
    value.sum().backward()
    return value.tolist(), x.logits.grad[0].tolist()


def test_the_whole_distribution_and_the_sampled_token_by_hand():
    value, gradient = learned(reverse_kl, told(P, Q, 0))
    kl = 0.3 * LN(2.5)  # .5 log(.5/.2) + .3 log 1 + .2 log(.2/.5)
    assert value == pytest.approx([kl], abs=1e-5)
    assert gradient == pytest.approx([0.5 * (LN(2.5) - kl), 0.3 * -kl, 0, 0.2 * (-LN(2.5) - kl)], abs=1e-5)
    for token, gap in ((0, LN(2.5)), (1, 0.0), (3, -LN(2.5))):
        value, gradient = learned(sampled_kl, told(P, Q, token))
        assert value == pytest.approx([gap], abs=1e-5), token
        assert gradient == pytest.approx([gap * ((v == token) - p) for v, p in enumerate(P)], abs=1e-5), token


def by_token(own, theirs, banned, temperature):
    """(KL, its gradient with respect to the logits) of one token, in plain numbers."""
    def chances(logits):
        weights = [0.0 if v in banned else math.exp(x / temperature) for v, x in enumerate(logits)]
        return [w / sum(weights) for w in weights]

    p, q = chances(own), chances(theirs)
    kl = sum(a * LN(a / b) for a, b in zip(p, q, strict=True) if a)
    return kl, [a * (LN(a / b) - kl) / temperature if a else 0.0 for a, b in zip(p, q, strict=True)]


@pytest.mark.parametrize("width", [9, 7, 12])
def test_against_one_token_at_a_time(width):
    """Random batches, whole and in chunks, with a teacher whose output layer has as many rows, fewer or more."""
    rng = random.Random(width)
    rows = 9
    for _ in range(15):
        torch.manual_seed(rng.randrange(10**6))
        count, temperature, chunk = rng.randint(1, 8), rng.choice([1.0, 0.7]), rng.choice([1, 3, 100])
        banned = sorted({2, *range(min(width, rows), rows)})
        layer, other = torch.nn.Linear(5, rows), torch.nn.Linear(4, width)
        hidden, theirs = torch.randn(count, 5, requires_grad=True), torch.randn(count, 4)
        targets = torch.tensor([rng.choice([v for v in range(rows) if v not in banned]) for _ in range(count)])
        stats = token_stats(hidden, Head(rows, layer), targets, torch.tensor(banned), temperature,
                            {"kl": lambda a, t, b: reverse_kl(TokenChunk(a, b, t))}, 4 * rows * chunk,
                            second=(theirs, Head(width, other)))
        stats.more["kl"].sum().backward()
        wanted = [by_token(a, (b + [0.0] * rows)[:rows], banned, temperature)
                  for a, b in zip(layer(hidden).tolist(), other(theirs).tolist(), strict=True)]
        assert stats.more["kl"].tolist() == pytest.approx([kl for kl, _ in wanted], abs=1e-5)
        slopes = torch.tensor([slope for _, slope in wanted])
        assert torch.allclose(hidden.grad, slopes @ layer.weight, atol=1e-5)
        assert torch.allclose(layer.weight.grad, slopes.T @ hidden.detach(), atol=1e-5)
        assert other.weight.grad is None


def test_the_options():
    assert {*LOSSES} == {"reverse_kl", "sampled_kl"}
    with pytest.raises(ConfigError, match=r"algo\.distillation\.loss='reversed_kl' is not known"):
        bind("algo.distillation.loss", Named(name="reversed_kl"), LOSSES)
