"""Statistics of a token's distribution, by hand."""

import math

import pytest
import torch

from vlrl.algo.statistics import alternatives, statistics
from vlrl.errors import ConfigError
from vlrl.models.logprobs import Head, token_stats

P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.8, 0.0]], dtype=torch.float64)


def of(name, probabilities=P):
    (statistic,) = statistics([f"stat:{name}", "reference", "old_stat:top:1"]).values()
    return statistic(probabilities.log(), torch.zeros(len(probabilities), dtype=torch.long))


def h(*p):
    return -sum(x * math.log(x) for x in p)


@pytest.mark.parametrize(("name", "expected"), [
    ("entropy", [h(0.5, 0.3, 0.2), h(0.1, 0.1, 0.8)]),
    ("nucleus_entropy:0.6", [h(5 / 8, 3 / 8), 0]),  # 0.5 does not suffice, 0.5 + 0.3 does; 0.8 does alone
    ("nucleus_entropy:0.5", [0, 0]),
    ("nucleus_entropy:1", [h(0.5, 0.3, 0.2), h(0.1, 0.1, 0.8)]),
    ("mean_logprob", [math.log(0.5 * 0.3 * 0.2) / 3, math.log(0.1 * 0.1 * 0.8) / 3]),
])
def test_by_hand(name, expected):
    assert of(name).tolist() == pytest.approx(expected, abs=1e-9)


def test_the_most_probable_ones():
    assert of("top:2").exp().tolist() == [pytest.approx([0.5, 0.3]), pytest.approx([0.8, 0.1])]
    assert of("top_ids:2")[0].tolist() == [0, 1] and of("top_ids:1").tolist() == [[0], [2]]
    assert of("top:9").shape == (2, 4)
    assert list(alternatives(2)) == ["top_ids", "top_logprobs"] and alternatives(0) == {}


@pytest.mark.parametrize("name", ["entropy", "nucleus_entropy:0.6", "mean_logprob", "top:2"])
def test_gradients_are_those_of_the_logits(name):
    (statistic,) = statistics([f"stat:{name}"]).values()
    logits = torch.tensor([[0.3, -0.2, 1.1, 0.4]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: statistic(z, torch.zeros(1, dtype=torch.long)), logits)
    banned = torch.tensor([[0.3, -0.2, 1.1, -torch.inf]], requires_grad=True)
    values = statistic(banned, torch.zeros(1, dtype=torch.long))
    values.sum().backward()
    assert values.isfinite().all() and banned.grad is not None and banned.grad.isfinite().all()


def test_chunks_give_the_same():
    torch.manual_seed(0)
    hidden, layer = torch.randn(7, 5), torch.nn.Linear(5, 11)
    wanted = statistics(["stat:entropy", "stat:top:3"])
    rest = (Head(11, layer), torch.arange(7), torch.tensor([10]), 0.7, wanted)
    whole, cut = token_stats(hidden, *rest), token_stats(hidden, *rest, chunk_bytes=4 * 11 * 2)
    for name in wanted:
        assert torch.allclose(whole.more[name], cut.more[name], atol=1e-6)
    assert torch.allclose(whole.more["entropy"], whole.entropy, atol=1e-5) and whole.more["entropy"].requires_grad


@pytest.mark.parametrize(("name", "says"), [("entropi", "Did you mean 'entropy'"), ("nucleus_entropy:7", "above 0"),
                                            ("top:x", "is invalid"), ("top", "is invalid")])
def test_what_there_is_not(name, says):
    with pytest.raises(ConfigError, match=says):
        statistics([f"stat:{name}"])
