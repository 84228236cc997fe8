"""The adaptive weight of the KL."""

import pytest

from vlrl.algo.control import KLCoefficient


def test_the_coefficient_is_steered_to_the_target():
    kl = KLCoefficient(0.1, target=0.02, horizon=100)
    for measured, expected in ((0.022, 0.1 * 1.01), (0.2, 0.1 * 1.01 * 1.02), (0.0, 0.1 * 1.01 * 1.02 * 0.98)):
        kl.observe(measured, answers=10)  # 10 % above; far above, so 20 %; far below
        assert kl.value == pytest.approx(expected, rel=1e-9)
    other = KLCoefficient(0.1, target=0.02, horizon=100)
    other.load_state_dict(kl.state_dict())
    assert other.value == kl.value and kl.metrics() == {"kl_coef": kl.value}


def test_without_a_target_it_stays():
    kl = KLCoefficient(0.1)
    kl.observe(5.0, answers=1000)
    kl.load_state_dict({})
    assert kl.value == 0.1 and kl.state_dict() == {} == kl.metrics()
