"""Policy terms: values and gradients worked out by hand on few tokens, and what holds for all of them."""

import math
from dataclasses import replace
from math import exp as E
from math import log

import pytest
import torch

from tests.algo.flat import bound, flat, gradient, part, random_step, run
from tests.tables import each
from vlrl.algo.tables import LOSSES


def sig(v):
    return 1 / (1 + E(-v))


# ratios: e^0.1 = 1.10517, e^0.5 = 1.64872 of the first rollout, e^-0.5 = 0.60653 of the second
LOGP, OLD, ADV, IDS = [-1.0, -0.5, -2.5], [-1.1, -1.0, -2.0], [2.0, 1.0, -1.0], [0, 0, 1]
P = [log(0.5), log(0.3), log(0.1), log(0.3), log(0.15)]
P_OLD = [log(0.2), log(0.2), log(0.4), log(0.4), log(0.005)]
PHI = (E(3 + 2 * 0.6 - 3 * E(0.6)), E(2 - 3 * 0.5 - 2 * E(-0.5)))

GOLDEN = [  # name, options, logp, old, advantages, rollout, value, gradient of the sum
    ("ppo_clip", {}, LOGP, OLD, ADV, IDS, [-2 * E(0.1), -1.2, 0.8], [-2 * E(0.1), 0, 0]),
    ("ppo_clip", {}, [-0.5, -2.5, -1.0], [-1.0, -2.0, -1.0], [-1.0, 1.0, 0.0], IDS,
     [E(0.5), -E(-0.5), 0], [E(0.5), -E(-0.5), 0]),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.28}, LOGP, OLD, ADV, IDS, [-2 * E(0.1), -1.28, 0.9],
     [-2 * E(0.1), 0, 0]),
    ("ppo_clip", {"dual_clip": 1.5}, [0.5, 0.3, 0.5], [0.0] * 3, [-2.0, -1.0, 1.0], IDS, [3.0, E(0.3), -1.2],
     [0, E(0.3), 0]),
    ("ppo_clip", {"delta": 1.5}, [0.5, 0.3, 0.5], [0.0] * 3, [-2.0, -1.0, 1.0], IDS, [3.0, E(0.3), -1.2],
     [0, E(0.3), 0]),
    ("ppo_clip", {"delta": 1.05}, [0.1], [0.0], [1.0], [0], [-1.05], [0]),
    ("ppo_clip", {"dual_clip": 1.05}, [0.1], [0.0], [1.0], [0], [-E(0.1)], [-E(0.1)]),
    # s = e^0.3 and e^-0.5
    ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, LOGP, OLD, ADV, IDS, [-2.4, -1.2, 0.8], [0, 0, 0]),
    ("gspo", {"clip_low": 0.5, "clip_high": 0.5}, LOGP, OLD, ADV, IDS, [-2 * E(0.3), -E(0.3), E(-0.5)],
     [-1.5 * E(0.3), -1.5 * E(0.3), E(-0.5)]),
    ("gspo", {}, [5e-4, -4e-4], [0.0, 0.0], [1.0, -1.0], [0, 1], [-1.0004, 0.9997], [0, 0]),
    ("gspo_token", {"clip_low": 0.5, "clip_high": 0.5}, LOGP, OLD, ADV, IDS, [-2 * E(0.3), -E(0.3), E(-0.5)],
     [-2 * E(0.3), -E(0.3), E(-0.5)]),
    ("gspo_token", {}, [5e-4, -4e-4], [0.0, 0.0], [1.0, -1.0], [0, 1], [-1.0004, 0.9997], [0, 0]),
    # e^2 = 7.39 is above the cap
    ("cispo", {}, LOGP, [-1.1, -2.5, -2.0], ADV, IDS, [2 * E(0.1), 2.5, -2.5 * E(-0.5)], [-2 * E(0.1), -5, E(-0.5)]),
    ("cispo", {"cap": 1.5}, LOGP, OLD, ADV, IDS, [2 * E(0.1), 0.75, -2.5 * E(-0.5)], [-2 * E(0.1), -1.5, E(-0.5)]),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28}, LOGP, OLD, ADV, IDS, [2 * E(0.1), 0.64, -2.0],
     [-2 * E(0.1), -1.28, 0.8]),
    ("cispo", {"clip_high": 6.0}, LOGP, [-1.1, -2.5, -2.0], ADV, IDS, [2 * E(0.1), 3.5, -2.5 * E(-0.5)],
     [-2 * E(0.1), -7, E(-0.5)]),
    ("sapo", {}, LOGP, OLD, ADV, IDS,
     [-8 * sig(E(0.1) - 1), -4 * sig(E(0.5) - 1), 4 / 1.05 * sig(1.05 * (E(-0.5) - 1))],
     [-8 * sig(E(0.1) - 1) * sig(1 - E(0.1)) * E(0.1), -4 * sig(E(0.5) - 1) * sig(1 - E(0.5)) * E(0.5),
      4 * sig(1.05 * (E(-0.5) - 1)) * sig(1.05 * (1 - E(-0.5))) * E(-0.5)]),
    # clipped log-ratios 0.1, 0.4 | -0.4
    ("gmpo", {}, LOGP, OLD, ADV, IDS, [-2 * E(0.25), -E(0.25), E(-0.4)], [-1.5 * E(0.25), 0, 0]),
    ("gmpo", {}, [-0.5, 0.5], [0.0, 0.0], [1.0, -1.0], [0, 1], [-E(-0.5), E(0.5)], [-E(-0.5), E(0.5)]),
    ("gmpo", {"clip_high": 0.2}, LOGP, OLD, ADV, IDS, [-2 * E(0.15), -E(0.15), E(-0.4)], [-1.5 * E(0.15), 0, 0]),
    ("vespo", {}, LOGP, OLD, ADV, IDS, [2 * PHI[0], 0.5 * PHI[0], -2.5 * PHI[1]], [-2 * PHI[0], -PHI[0], PHI[1]]),
    ("reinforce", {}, LOGP, OLD, ADV, IDS, [2.0, 0.5, -2.5], [-2, -1, 1]),
    ("gpg", {}, LOGP, OLD, ADV, IDS, [2.0, 0.5, -2.5], [-2, -1, 1]),
    # sums of log-ratios 0.6 | -0.5: 0.25 * 0.36 / 2 | 0.25 * 0.25
    ("kimi", {"tau": 0.5}, LOGP, OLD, ADV, IDS, [2.045, 0.545, -2.4375], [-1.7, -0.7, 0.75]),
    # moved by 0.3 up, 0.1 up | 0.3 down, 0.1 down | by 0.145 at a ratio of 30
    ("dppo_tv", {}, P, P_OLD, [1.0, 1.0, -1.0, -1.0, 1.0], [0, 0, 1, 1, 2],
     [0, -1.5 * P[1], 0, 0.75 * P[3], -20 * P[4]], [0, -1.5, 0, 0.75, -20]),
    ("dppo_tv", {"delta_low": 0.05, "delta_high": 0.5}, P, P_OLD, [1.0, 1.0, -1.0, -1.0, 1.0], [0, 0, 1, 1, 2],
     [-2.5 * P[0], -1.5 * P[1], 0, 0, -20 * P[4]], [-2.5, -1.5, 0, 0, -20]),
    ("supervised", {}, LOGP, OLD, ADV, IDS, [1.0, 0.5, 2.5], [-1, -1, -1]),
]


def test_by_hand():
    for name, options, logp, old, adv, ids, value, slope in GOLDEN:
        x = flat(logp, old, adv, ids)
        per_token, _ = run(bound(LOSSES, name, **options), x)
        assert per_token.tolist() == pytest.approx(value, abs=1e-5), (name, options)
        assert gradient(per_token, x) == pytest.approx(slope, abs=1e-5), (name, options)


def test_second_attempts_in_a_group_by_hand():
    """The first rollout as under ppo_clip, the second one -A p / (p + shape), whatever its ratio."""
    x = flat([*LOGP, log(0.1)], [*OLD, -9.0], [*ADV, 2.0], [*IDS, 1], variants={"guided": torch.tensor([False, True])})
    per_token, metrics = run(bound(LOSSES, "critique_grpo", shape=0.2), x)
    p, q = E(-2.5), 0.1
    assert per_token.tolist() == pytest.approx([-2 * E(0.1), -1.2, p / (p + 0.2), -2 * q / 0.3], abs=1e-5)
    assert gradient(per_token, x) == pytest.approx([-2 * E(0.1), 0, 0.2 * p / (p + 0.2)**2, -2 * 0.2 * q / 0.09],
                                                   abs=1e-5)
    assert metrics["clipped"].tolist() == [False, True, False, False]
    assert metrics["guided/term"].item() == pytest.approx(p / (p + 0.2) - 2 * q / 0.3, abs=1e-5)


def test_says_which_tokens_a_bound_takes_hold_of():
    for name, options, clipped in (
            ("ppo_clip", {}, [False, True, True]), ("ppo_clip", {"clip_high": 0.7}, [False, False, True]),
            ("gspo", {}, [True, True, True]), ("gspo", {"clip_high": 0.5, "clip_low": 0.5}, [False, False, False]),
            ("cispo", {"cap": 1.5}, [False, True, False]), ("cispo", {"clip_low": 0.2}, [False, False, True]),
            ("gmpo", {}, [False, True, True]), ("dppo_tv", {"delta_high": 0.1}, [False, True, False])):
        metrics = run(bound(LOSSES, name, **options), flat(LOGP, OLD, ADV, IDS))[1]
        assert metrics["clipped"].tolist() == clipped and metrics["ratio"].shape == (3,), (name, options)
    for options in ({"dual_clip": 1.5}, {"delta": 1.5}):
        metrics = run(bound(LOSSES, "ppo_clip", **options), flat([0.5, 0.3, 0.5], [0.0] * 3, [-2.0, -1.0, 1.0]))[1]
        assert metrics["clipped"].tolist() == [True, False, True], options


def test_vespo_takes_the_correction_into_its_ratio():
    x = flat([-1.0, -0.5, -2.5], [-1.1, -9.0, -2.0], ADV, IDS, mask=[1, 0, 1])
    value = {name: run(bound(LOSSES, name), x)[0].tolist()[0] for name in ("gspo", "gmpo", "vespo", "kimi")}
    assert value == pytest.approx({"gspo": -2 * 1.0004, "gmpo": -2 * E(0.1), "kimi": 2 + 0.05 * 0.01,
                                   "vespo": 2 * E(3 + 0.2 - 3 * E(0.1))})
    x = flat(LOGP, OLD, ADV, IDS, sampler_logprobs=[-1.2, -1.0, -2.25])  # D = 0.1, 0 | 0.25
    first, last = E(3 + 2 * 0.7 - 3 * E(0.7)), E(2 - 3 * 0.25 - 2 * E(-0.25))
    per_token, _ = run(bound(LOSSES, "vespo", from_sampler=True), x)
    assert per_token.tolist() == pytest.approx([2 * first, 0.5 * first, -2.5 * last], abs=1e-5)
    assert flat([50.0, -50.0, 3.0], [0.0, 0.0, 1.0]).log_ratio.tolist() == [20, -20, 2]


@each("mask", [[1, 1, 1], [0, 1, 1]])
def test_vespo_without_the_engine_s_log_probability_of_a_token(mask):
    known = flat(LOGP, OLD, ADV, IDS, mask=mask, sampler_logprobs=[OLD[0], -1.0, -2.25])  # no difference at the first
    unknown = replace(known, sampler_logprobs=torch.tensor([math.nan, -1.0, -2.25]).double())
    vespo = bound(LOSSES, "vespo", from_sampler=True)
    assert run(vespo, unknown)[0].tolist() == run(vespo, known)[0].tolist()
    assert gradient(run(vespo, unknown)[0], unknown) == gradient(run(vespo, known)[0], known)


def test_rover_by_hand():
    now = torch.tensor([-5.0, -4.0, -3.0]).double().requires_grad_()
    x = flat(LOGP, OLD, [0.5, 0.5, -0.25], IDS, stats={"mean_logprob": now},
             old_stats={"mean_logprob": torch.tensor([-5.5, -4.25, -3.5]).double()})
    per_token, _ = run(bound(LOSSES, "rover"), x)  # Q = 0.1, 0.5 | -0.5; V' = 0.25, 0 | 0
    assert per_token.tolist() == pytest.approx([0.65 ** 2, 0, 0.25 ** 2], abs=1e-5)
    assert gradient(per_token, x) == pytest.approx([-1.3, 0, -0.5], abs=1e-5)
    assert torch.autograd.grad(per_token.sum(), now, allow_unused=True)[0] is None  # the target has no gradient
    per_token, _ = run(bound(LOSSES, "rover", scale=2.0), x)  # Q = 0.2, 1 | -1; V' = 0.5
    assert per_token.tolist() == pytest.approx([0.8 ** 2, 0.25, 0.75 ** 2], abs=1e-5)
    masked = replace(x, mask=torch.tensor([1.0, 0.0, 1.0]).double())
    assert run(bound(LOSSES, "rover"), masked)[0].tolist()[0] == pytest.approx(0.4 ** 2, abs=1e-5)
    fresh = run(bound(LOSSES, "rover"), replace(x, old_stats={}, old_logprobs=x.logprobs.detach()))[0]
    assert fresh.tolist() == pytest.approx([0.25, 0.25, 0.0625], abs=1e-5)


def test_mdpo_by_hand():
    """t = 1 at the first step, .75 after a quarter of the way, and not below the floor."""
    for step, decay, t in ((0, 100, 1.0), (25, 100, 0.75), (99, 100, 0.2), (500, 100, 0.2), (3, 10, 0.7)):
        x = flat(LOGP, OLD, ADV, IDS, step=step)
        per_token, metrics = run(bound(LOSSES, "mdpo", floor=0.2, decay=decay), x)
        r = [E(0.1), E(0.5), E(-0.5)]
        kl = [r[0] * 0.1 - r[0] + 1, r[1] * 0.5 - r[1] + 1, -r[2] * 0.5 - r[2] + 1]
        expected = [-ri * a + k / t for ri, a, k in zip(r, ADV, kl, strict=True)]
        assert per_token.tolist() == pytest.approx(expected, abs=1e-5)
        assert gradient(per_token, x) == pytest.approx([ri * (lr / t - a) for ri, lr, a in zip(
            r, (0.1, 0.5, -0.5), ADV, strict=True)], abs=1e-5)
        assert metrics["mdpo/t"].item() == pytest.approx(3 * t)


def test_simko_by_hand():
    # rollout 0 is right: tokens above its median entropy 2.5 give a tenth of their gradient to the two best tokens;
    # rollout 1 is wrong: of the two above its median the one that is the most probable token counts 1.5 times
    logp = [-1.0, -1.0, -1.0, -1.0, -0.5, -0.5, -0.5, -2.0]
    top = torch.tensor([[-0.5, -1.0]] * 8).double().requires_grad_()
    x = flat(logp, logp, [1.0] * 4 + [-1.0] * 4, [0] * 4 + [1] * 4, entropy=[1.0, 2.0, 3.0, 4.0] * 2,
             rewards=[1.0, 0.0], stats={"top:2": top})
    term = bound(LOSSES, "simko", share=0.1, quantile=0.5, penalty=1.5, k=2)
    assert term.requires == {"entropy", "stat:top:2"}
    per_token, _ = run(term, x)
    assert per_token.tolist() == pytest.approx([-1.0] * 4 + [1, 1, 1.5, 1], abs=1e-5)
    assert gradient(per_token, x) == pytest.approx([-1, -1, -0.9, -0.9, 1, 1, 1.5, 1], abs=1e-5)
    (grad,) = torch.autograd.grad(per_token.sum(), top)
    assert grad.flatten().tolist() == pytest.approx([0.0] * 4 + [-0.05] * 4 + [0.0] * 8, abs=1e-5)
    x = replace(x, mask=torch.tensor([0.0] + [1.0] * 7).double())  # the median of the first is 3
    assert gradient(run(term, x)[0], x)[:4] == pytest.approx([0, -1, -1, -0.9], abs=1e-5)


FROM_REWARDS = {"supervised", "nft", "pacs"}
"""They do not look at the advantages."""


def test_no_advantage_no_gradient():
    """Some terms have one away from the weights that sampled."""
    for name in sorted({*LOSSES} - FROM_REWARDS):
        x = random_step(1, gap=0.0 if name in ("rover", "kimi", "kl_cov", "mdpo") else 0.3)
        x = replace(x, advantages=torch.zeros_like(x.advantages), **({} if x.old_stats is None else {"old_stats": {}}))
        assert gradient(run(bound(LOSSES, name), x)[0], x) == pytest.approx([0.0] * len(x.mask), abs=1e-12), name


@each("name", sorted(LOSSES))
def test_masked_short_extreme_and_rounded_stay_finite(name):
    term = bound(LOSSES, name)
    for old, mask in (([-900.0, 0.0, -0.1], [1, 1, 1]), ([-1.0, -1.0, -1.0], [0, 0, 0]), (OLD, [1, 0, 0])):
        x = flat([0.0, -900.0, -0.1], old, [1.0, -1.0, 0.0], IDS, mask=mask, rewards=[1.0, math.nan], group=[0, 0],
                 entropy=[1.0, 1.0, 1.0], sampler_logprobs=[0.0, -5.0, 0.0], turns=torch.zeros(3, dtype=torch.int64),
                 stats={"mean_logprob": torch.zeros(3).double(), "top:3": torch.zeros(3, 3).double()})
        per_token, _ = run(term, x)
        loss = (per_token * x.mask).sum()
        assert math.isfinite(loss.item()) and all(map(math.isfinite, gradient(per_token, x)))
        assert loss.item() == 0 or any(mask)
    assert run(term, part(random_step(0), []))[0].shape == (0,)
    x = random_step(5)
    low = {k: getattr(x, k).bfloat16() for k in ("old_logprobs", "advantages")}
    x = replace(x, **low, logprobs=x.logprobs.detach().bfloat16().requires_grad_(), mask=x.mask.float(),
                lengths=x.lengths.float(), rewards=x.rewards.float(), stats={k: v.float() for k, v in x.stats.items()})
    per_token, _ = run(term, x)
    assert per_token.isfinite().all() and all(map(math.isfinite, gradient(per_token, x)))
