"""Entropy terms and controllers: values by hand, gradients, states."""

import math

import pytest
import torch

from tests.algo.flat import bound, flat, run
from vlrl.algo.tables import ENTROPIES
from vlrl.errors import ConfigError


def held(values, p=None, mask=None, rollout=None):
    """Tokens of these entropies, which have a gradient."""
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    return values, flat([-1.0] * len(values), mask=mask, rollout=rollout,
                        stats={"entropy": values} if p is None else {f"nucleus_entropy:{p}": values})


def loss(function, x):
    """The token mean that the objective takes."""
    per_token, _ = run(function, x)
    return (per_token * x.mask).sum() / x.total_tokens


def test_bonus():
    values, x = held([0.5, 1.5, 9.0], mask=[1, 1, 0])
    found = loss(bound(ENTROPIES, "bonus", coef=0.1), x)
    found.backward()
    assert found.item() == pytest.approx(-0.1) and values.grad.tolist() == pytest.approx([-0.05, -0.05, 0])
    assert loss(bound(ENTROPIES, "bonus"), x).item() == pytest.approx(-0.001)


def test_adaptive_rises_while_the_entropy_is_low():
    adaptive = bound(ENTROPIES, "adaptive", target=0.4, delta=0.01, most=0.015)
    _, x = held([2.0, 4.0])
    assert loss(adaptive, x).item() == 0  # nothing is known yet
    coefs = []
    for entropy in (0.3, 0.4, 0.4, 0.5, 0.1):
        adaptive.function.observe(entropy)
        coefs += [adaptive.function.coef, loss(adaptive, x).item()]
    assert coefs == pytest.approx([0.01, -0.03, 0.015, -0.045, 0.015, -0.045, 0.005, 0, 0.015, -0.045])
    other = bound(ENTROPIES, "adaptive", target=0.4)
    other.load_state_dict(adaptive.state_dict())
    assert loss(other, x).item() == pytest.approx(-0.045) and other.function.metrics() == {
        "entropy_coef": pytest.approx(0.015)}
    adaptive.function.observe(9)
    assert adaptive.function.metrics() == {"entropy_coef": 0}


def siren(**options):
    return bound(ENTROPIES, "siren", **{"coef": 0.5, "top_p": 0.8, "share": 0.5, **options})


def test_siren_pulls_the_mean_of_peak_tokens_to_where_it_began():
    """Of 1 2 3 4 (5 is not trained) the upper half is above the median 2.5: 3 and 4, mean 3.5."""
    function = siren()
    values, x = held([1.0, 2.0, 3.0, 4.0, 5.0], p=0.8, mask=[1, 1, 1, 1, 0])
    loss(function, x).backward()
    assert values.grad.tolist() == [0] * 5 and function.function.anchor == 3.5
    values, x = held([1.0, 2.0, 4.0, 7.0, 9.0], p=0.8, mask=[1, 1, 1, 1, 0])
    loss(function, x).backward()
    # d 0.5 (mean - 3.5)^2 = (5.5 - 3.5) * 1/2 on both tokens of the upper half
    assert values.grad.tolist() == pytest.approx([0, 0, 1, 1, 0])
    again = siren()
    again.load_state_dict(function.state_dict())
    assert again.function.metrics() == {"entropy_anchor": 3.5} and siren().state_dict() == {}


def test_siren_takes_a_share():
    values, x = held([float(i) for i in range(10)], p=0.8)
    function = siren(share=0.2)
    function.function.anchor = 0.0
    loss(function, x).backward()
    assert [i for i, g in enumerate(values.grad.tolist()) if g] == [8, 9]
    values, x = held([1.0], p=0.8)
    x.stats["nucleus_entropy:0.8"] = values.float().detach().requires_grad_()
    assert loss(siren(), x).isfinite()


def test_temperature_follows_the_entropy():
    function = bound(ENTROPIES, "temperature", rate=0.1, low=0.9, high=1.4).function
    assert function.temperature(1.2) == 1.2
    function.observe_step(2.0, 1.2, 99)  # the first step's entropy is the target
    assert function.target == 2 and function.temperature(1.2) == pytest.approx(1.2)
    function.observe_step(1.0, 1.2, 99)
    assert function.temperature(1.2) == pytest.approx(1.2 * math.exp(0.05))
    again = bound(ENTROPIES, "temperature", rate=0.1, low=0.9, high=1.4).function
    again.load_state_dict(function.state_dict())
    for _ in range(9):
        again.observe_step(0.0, 1.2, 99)
    assert again.temperature(1.2) == pytest.approx(1.4)
    for _ in range(99):
        again.observe_step(4.0, 1.2, 99)
    assert again.temperature(1.2) == pytest.approx(0.9)
    _, x = held([1.0, 2.0])
    assert again(x)[0].tolist() == [0, 0]


def test_e3_by_hand():
    function = bound(ENTROPIES, "e3", low=0.1, high=3.0).function
    function.observe_step(2.0, 1.0, 1000)
    assert function.target == 2 and function.temperature(1.0) == 1
    function.observe_step(0.5, 1.0, 1000)
    scale = math.log(1000) + math.log(math.log(1000))
    first = 1 + math.log(4) / scale
    assert function.temperature(1.0) == pytest.approx(first)
    function.observe_step(8.0, 1.0, 1000)
    assert function.temperature(1.0) == pytest.approx(first * (1 - first * math.log(4) / scale))
    again = bound(ENTROPIES, "e3", low=0.1, high=3.0).function
    again.load_state_dict(function.state_dict())
    for _ in range(99):
        again.observe_step(0.0, 1.0, 1000)
    assert again.temperature(1.0) == 3 and again.target == 2
    with pytest.raises(ConfigError, match=r"low=2 is above high=1.5"):
        bound(ENTROPIES, "temperature", low=2)
