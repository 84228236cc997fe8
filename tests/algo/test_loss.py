"""Loss values worked out by hand on few tokens, and properties of the aggregations."""

import math

import pytest
import torch

from vlrl.algo.loss import AGGREGATIONS, LossInputs, k3, objective, ppo_clip, reinforce, supervised

E = math.exp


def inputs(logp, old, adv, rollout=(0, 0, 1), mask=(1, 1, 1), lengths=(2, 1), **more):
    t = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    n = len(logp)
    mask = t(mask)
    made = {"logprobs": t(logp).requires_grad_(), "old_logprobs": t(old), "advantages": t(adv), "mask": mask,
            "weights": torch.ones(n).double(), "rollout_id": torch.tensor(rollout), "lengths": t(lengths),
            "total_tokens": float(mask.sum()), "total_sequences": float(len(lengths)), "max_length": 4}
    return LossInputs(**{**made, **more})


# ratios: e^0.1 = 1.10517, e^0.5 = 1.64872, e^-0.5 = 0.60653
X = {"logp": [-1.0, -0.5, -2.5], "old": [-1.1, -1.0, -2.0], "adv": [2.0, 1.0, -1.0]}


def test_ppo_clip_by_hand():
    per_token, metrics = ppo_clip(inputs(**X))
    # inside the clip; above it with A > 0 (1.2); below it with A < 0 (0.8)
    assert per_token.tolist() == pytest.approx([-2 * E(0.1), -1.2, 0.8], abs=1e-9)
    assert metrics["clip_frac"].item() == 2


def test_ppo_clip_takes_the_pessimistic_side():
    per_token, metrics = ppo_clip(inputs([-0.5, -2.5, -1.0], [-1.0, -2.0, -1.0], [-1.0, 1.0, 0.0]))
    assert per_token.tolist() == pytest.approx([E(0.5), -E(-0.5), 0.0], abs=1e-9)
    assert metrics["clip_frac"].item() == 0


def test_ppo_clip_gradient_by_hand():
    x = inputs(**X)
    ppo_clip(x)[0].sum().backward()
    assert x.logprobs.grad.tolist() == pytest.approx([-2 * E(0.1), 0.0, 0.0], abs=1e-9)


def test_separate_clip_sides():
    per_token, _ = ppo_clip(inputs(**X, clip_high=0.28, clip_low=0.1))
    assert per_token.tolist() == pytest.approx([-2 * E(0.1), -1.28, 0.9], abs=1e-9)


def test_reinforce_and_supervised_by_hand():
    assert reinforce(inputs(**X))[0].tolist() == pytest.approx([2.0, 0.5, -2.5])
    assert supervised(inputs(**X))[0].tolist() == pytest.approx([1.0, 0.5, 2.5])


def test_k3_by_hand():
    x = inputs(**X, reference_logprobs=torch.tensor([-1.0, -1.5, -2.0], dtype=torch.float64))
    d = [0.0, -1.0, 0.5]
    assert k3(x).tolist() == pytest.approx([E(v) - v - 1 for v in d], abs=1e-9)


@pytest.mark.parametrize("name, expected", [
    ("token_mean", (2.0 + 0.5 - 2.5) / 3),
    ("sequence_mean", ((2.0 + 0.5) / 2 + -2.5) / 2),
    ("constant", (2.0 + 0.5 - 2.5) / (2 * 4))])
def test_aggregations_by_hand(name, expected):
    loss, _ = objective(inputs(**X), reinforce, name, 0.0)
    assert loss.item() == pytest.approx(expected, abs=1e-9)


def test_masked_tokens_and_weights():
    x = inputs(**X, mask=(1, 0, 1), lengths=(1, 1), weights=torch.tensor([1.0, 1.0, 3.0]).double())
    loss, _ = objective(x, reinforce, "token_mean", 0.0)
    assert loss.item() == pytest.approx((2.0 - 3 * 2.5) / 2, abs=1e-9)
    loss.backward()
    assert x.logprobs.grad[1] == 0


def test_kl_enters_with_its_weight():
    reference = torch.tensor([-1.0, -1.5, -2.0], dtype=torch.float64)
    plain, _ = objective(inputs(**X), reinforce, "token_mean", 0.0)
    with_kl, metrics = objective(inputs(**X, reference_logprobs=reference), reinforce, "token_mean", 0.5)
    kl = sum(E(v) - v - 1 for v in (0.0, -1.0, 0.5))
    assert with_kl.item() == pytest.approx(plain.item() + 0.5 * kl / 3, abs=1e-9)
    assert metrics["kl"].item() == pytest.approx(kl, abs=1e-9)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_all_masked_and_extreme_ratios_stay_finite(name):
    loss, _ = objective(inputs(**X, mask=(0, 0, 0), lengths=(0, 0), total_tokens=0.0, total_sequences=0.0), ppo_clip,
                        name, 0.0)
    assert loss.item() == 0
    loss, _ = objective(inputs([0.0, -900.0, -0.1], [-900.0, 0.0, -0.1], [1.0, -1.0, 0.0]), ppo_clip, name, 0.0)
    loss.backward()
    assert math.isfinite(loss.item())
