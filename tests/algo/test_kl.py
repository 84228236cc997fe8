"""KL estimators by hand, and what they estimate."""

import math
from dataclasses import replace
from math import exp as E

import pytest
import torch

from tests.algo.flat import bound, flat, gradient, random_step, run
from vlrl.algo.kl import clamped
from vlrl.algo.tables import KLS

# d = 0.5, -1 | 3; ratios to the old policy e^0.2, 1 | e^-0.4; to the engine e^0.3, e^-0.1 | 1
LOGP, REFERENCE = [-1.0, -1.0, -4.0], [-0.5, -2.0, -1.0]
OLD, SAMPLER, IDS = [-1.2, -1.0, -3.6], [-1.3, -0.9, -4.0], [0, 0, 1]
D = [0.5, -1.0, 3.0]
K3 = [E(d) - d - 1 for d in D]
SLOPE = [1 - E(d) for d in D]  # of k3


CASES = [
    ("k1", {}, [-0.5, 1, -3], [1, 1, 1]),
    ("k2", {}, [0.125, 0.5, 4.5], [-0.5, 1, -3]),
    ("k3", {}, K3, SLOPE),
    ("k3", {"clamp": 2.0}, [*K3[:2], 2 * E(2) - 4], [*SLOPE[:2], 1 - E(2)]),  # exp goes on along its tangent
    ("k3_bounded", {}, K3, SLOPE),
    ("k3_bounded", {"clamp": 0.4}, [E(0.4) * 1.1 - 1.5, K3[1], E(0.4) * 3.6 - 4], [1 - E(0.4), SLOPE[1], 1 - E(0.4)]),
    ("k3", {"limit": 10.0}, [*K3[:2], 10], [*SLOPE[:2], 0]),
    ("k1_plus", {}, [-0.5, 1, -3], [-0.5, 1, -3]),
    ("k3_plus", {}, K3, [-0.5, 1, -3]),
    ("k3_plus", {"limit": 10.0}, [*K3[:2], 10], [-0.5, 1, -3]),
    ("k3_unbiased", {}, [E(0.2) * K3[0], K3[1], E(-0.4) * K3[2]],
     [E(0.2) * (K3[0] + SLOPE[0]), K3[1] + SLOPE[1], E(-0.4) * (K3[2] + SLOPE[2])]),
    # ratio e^0.1 of the first rollout; each of its two tokens has half of the ratio's gradient
    ("k3_unbiased", {"level": "sequence"}, [E(0.1) * K3[0], E(0.1) * K3[1], E(-0.4) * K3[2]],
     [E(0.1) * ((K3[0] + K3[1]) / 2 + SLOPE[0]), E(0.1) * ((K3[0] + K3[1]) / 2 + SLOPE[1]),
      E(-0.4) * (K3[2] + SLOPE[2])]),
    ("k3_score", {}, K3, [k + s for k, s in zip(K3, SLOPE, strict=True)]),
    ("k3_score", {"from_sampler": True}, [E(0.3) * K3[0], E(-0.1) * K3[1], K3[2]],
     [E(0.3) * (K3[0] + SLOPE[0]), E(-0.1) * (K3[1] + SLOPE[1]), K3[2] + SLOPE[2]])]


def test_by_hand():
    for name, options, value, slope in CASES:
        x = flat(LOGP, OLD, rollout=IDS, reference_logprobs=REFERENCE, sampler_logprobs=SAMPLER)
        per_token = run(bound(KLS, name, **options), x)
        assert per_token.tolist() == pytest.approx(value, abs=1e-5), (name, options)
        assert gradient(per_token, x) == pytest.approx(slope, abs=1e-5), (name, options)


def test_clamped_tokens_by_hand():
    x = flat(LOGP, OLD, rollout=IDS, reference_logprobs=REFERENCE)
    for name, options, far in (("k1", {}, None), ("k2", {}, None), ("k3", {}, [0, 0, 0]),
                               ("k3", {"clamp": 2.0}, [0, 0, 1]), ("k3_bounded", {"clamp": 0.4}, [1, 0, 1]),
                               ("k3_plus", {"limit": 0.3}, [0, 1, 1])):
        found = clamped(bound(KLS, name, **options), x)
        assert far is found if far is None else found.tolist() == [*map(bool, far)], (name, options)


def test_a_token_whose_log_probability_the_engine_does_not_know_has_the_ratio():
    x = flat(LOGP, OLD, rollout=IDS, reference_logprobs=REFERENCE, sampler_logprobs=[math.nan, *SAMPLER[1:]])
    per_token = run(bound(KLS, "k3_score", from_sampler=True), x)
    assert per_token.tolist() == pytest.approx([E(0.2) * K3[0], E(-0.1) * K3[1], K3[2]])
    assert gradient(per_token, x)[0] == pytest.approx(E(0.2) * (K3[0] + SLOPE[0]))


@pytest.mark.parametrize("name", KLS)
def test_zero_at_the_reference_and_finite_far_from_it(name):
    x = random_step(0)
    same = replace(x, reference_logprobs=x.logprobs.detach())
    assert run(bound(KLS, name), same).tolist() == pytest.approx([0.0] * len(x.mask), abs=1e-9)
    for kind in (torch.float32, torch.bfloat16):
        far = flat([0.0, -900.0], [-900.0, 0.0], reference_logprobs=[-900.0, 0.0], sampler_logprobs=[-900.0, 0.0])
        far = replace(far, **{k: getattr(far, k).detach().to(kind) for k in
                              ("logprobs", "old_logprobs", "reference_logprobs", "sampler_logprobs")})
        far.logprobs.requires_grad_()
        values = run(bound(KLS, name), far)
        assert all(map(math.isfinite, [*values.tolist(), *gradient(values, far)]))
