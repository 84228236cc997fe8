"""KL estimators, entropy terms and controllers, and references that move: values by hand, gradients, states."""

import math
from dataclasses import replace
from math import exp as E

import pytest
import torch

from tests.algo.flat import bound, flat, gradient, random_step, run
from tests.tables import each
from vlrl.algo.kl import clamped
from vlrl.algo.reference import REFERENCES
from vlrl.algo.tables import ENTROPIES, KLS
from vlrl.errors import ConfigError

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


def test_kl_by_hand():
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


@each("name", KLS)
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


@pytest.fixture
def weights():
    reference, policy = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.nn.Parameter(torch.tensor([3.0, 0.0]))}
    optimizer = torch.optim.AdamW(policy.values())
    policy["w"].grad = torch.ones(2)
    optimizer.step()
    policy["w"].data = torch.tensor([3.0, 0.0])
    return reference, policy, optimizer


def test_ema_follows_slowly(weights):
    ema, (reference, _, optimizer) = bound(REFERENCES, "ema", decay=0.75, every=2).function, weights
    assert not ema.after_step(*weights, kl=0, done=1) and reference["w"].tolist() == [1, 2]
    assert not ema.after_step(*weights, kl=0, done=2) and reference["w"].tolist() == [1.5, 1.5]
    assert optimizer.state and ema.moves


@pytest.mark.parametrize(("options", "kl", "done", "is_reset", "afresh"), [
    ({"every": 3}, 9.0, 3, True, True), ({"every": 3}, 9.0, 4, False, False),
    ({"every": 0, "kl": 1}, 1.5, 4, True, True),
    ({"every": 0, "kl": 1}, 1.0, 4, False, False), ({"every": 3, "kl": 1, "optimizer": False}, 0.5, 6, True, False)])
def test_reset(weights, options, kl, done, is_reset, afresh):
    reference, policy, optimizer = weights
    assert bound(REFERENCES, "reset", **options).function.after_step(*weights, kl, done) == is_reset
    assert reference["w"].tolist() == ([3, 0] if is_reset else [1, 2]) and afresh == (not optimizer.state)
    policy["w"].data += 1
    assert reference["w"].tolist() == ([3, 0] if is_reset else [1, 2])  # a copy


def test_frozen(weights):
    for name in ("auto", "frozen"):
        frozen = bound(REFERENCES, name).function
        assert not frozen.moves and not frozen.after_step(*weights, 9, 1) and weights[0]["w"].tolist() == [1, 2]
    with pytest.raises(ConfigError, match="never be reset"):
        bound(REFERENCES, "reset", every=0)
