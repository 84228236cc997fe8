"""The adaptive weight of the KL, and the temperature that follows the entropy."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm, KLCoefficient


def test_the_coefficient_is_steered_to_the_target():
    kl = KLCoefficient(0.1, target=0.02, horizon=100)
    for measured, expected in ((0.022, 0.1 * 1.01), (0.2, 0.1 * 1.01 * 1.02), (0.0, 0.1 * 1.01 * 1.02 * 0.98)):
        kl.observe(measured, answers=10)  # 10 % above; far above, so 20 %; far below
        assert kl.value == pytest.approx(expected, rel=1e-9)
    other = KLCoefficient(0.1, target=0.02, horizon=100)
    other.load_state_dict(kl.state_dict())
    assert other.value == kl.value and kl.metrics() == {"kl_coef": kl.value}
    kl = KLCoefficient(0.1)
    kl.observe(5.0, answers=1000)
    kl.load_state_dict({})
    assert kl.value == 0.1 and kl.state_dict() == {} == kl.metrics()


def test_a_step_that_was_left_out_moves_no_temperature():
    algorithm = Algorithm(configs.validate({
        "task": {"name": "grounding"}, "model": {"name": "x"},
        "algo": {"entropy": {"name": "temperature", "rate": 0.5}}}))
    policy: Any = SimpleNamespace(choices=600)
    optimizer, seen = torch.optim.SGD([torch.zeros(1, requires_grad=True)]), []
    for step, entropy in enumerate((1.0, math.nan, 0.5, math.nan)):
        algorithm.after_step(policy, optimizer, {"entropy": entropy, "kl": math.nan}, step)
        seen.append(algorithm.temperature)
    assert seen[0] == seen[1] != seen[2] == seen[3]
