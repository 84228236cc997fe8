"""Rules of stored answers: by hand, and against an implementation answer by answer; draws and schedules by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from vlrl.algo.named import bind
from vlrl.config.base import Named
from vlrl.errors import ConfigError
from vlrl.methods.replay.buffer import GROUPS
from vlrl.methods.replay.draw import ReplayFunctions
from vlrl.methods.replay.rules import (
    DRAWS,
    RULES,
    SCHEDULES,
    ALol,
    Clipped,
    CoPG,
    ReplayBatch,
    Truncated,
    WebRL,
    apply_keep,
    by_advantage,
    constant,
    growing,
    recent,
    uniform,
)
from vlrl.methods.replay.settings import StoredSettings

F64 = torch.float64


def made(answers, groups, **more):
    """Stored of answers (l, o, r, mask) as lists; counts are those of these answers alone."""
    lists = [[x for answer in answers for x in answer[i]] for i in range(4)]
    number = torch.tensor([i for i, answer in enumerate(answers) for _ in answer[0]])
    logprobs, sampler, reference, mask = (torch.tensor(v, dtype=F64) for v in lists)
    group = torch.tensor(groups)
    count = torch.bincount(group)
    n = len(answers)
    given = {"advantages": [0.0] * n, "rewards": [0.0] * n, "weights": [1.0] * n, **more}
    tensors = {k: torch.tensor(v, dtype=F64) for k, v in given.items() if k not in ("correct",)}
    gain = torch.zeros(len(answers), dtype=F64).index_add(0, number, (logprobs - reference) * mask)
    return ReplayBatch(logprobs=logprobs.requires_grad_(), sampler=sampler, reference=reference, mask=mask,
                       answer=number, group=group, gain=gain, kept=torch.ones(len(answers), dtype=torch.bool),
                       correct=torch.tensor(more.get("correct", [True] * len(answers))), total_tokens=float(mask.sum()),
                       total_answers=float(len(answers)), total_pairs=float((count * (count - 1) / 2).sum()), **tensors)


def learned(rule, x):
    loss = rule.loss(x)
    (gradient,) = torch.autograd.grad(loss, x.logprobs)
    return loss.item(), gradient.tolist()


TWO = [([-1.0, -2.0], [-1.2, -2.4], [-1.1, -2.2], [1, 1]), ([-0.5, -9.0, -1.0], [-0.1, -1.0, -0.6], [-0.4, -1.0, -0.9],
                                                            [1, 0, 1])]
"""mean_t(l - o) is .3 and -.4, sum_t (l - r) is .3 and -.2; the second has a token that is not learned."""


def test_truncated_by_hand():
    x = made(TWO, [0, 0], advantages=[2.0, -1.0], weights=[1.0, 3.0])
    w = [math.exp(0.3), math.exp(-0.4)]
    loss, gradient = learned(Truncated(), x)
    assert loss == pytest.approx(-(w[0] * 2 * -3.0 + w[1] * -3 * -1.5) / 4, abs=1e-5)
    assert gradient == pytest.approx([-w[0] * 2 / 4] * 2 + [w[1] * 3 / 4, 0, w[1] * 3 / 4], abs=1e-5)
    loss, gradient = learned(Truncated(cap=1.1), x)
    assert gradient[:2] == pytest.approx([-1.1 * 2 / 4] * 2, abs=1e-5) and gradient[2] == pytest.approx(w[1] * 3 / 4)
    assert Truncated(cap=1.1).clipped(x).tolist() == [True, True, False, False, False]


def test_clipped_by_hand():
    """Ratios e^.2, e^.4 with A = 2, and e^-.4, e^-.4 with A = -1."""
    x = made(TWO, [0, 0], advantages=[2.0, -1.0])
    loss, gradient = learned(Clipped(0.2, 0.3), x)
    kept = math.exp(0.2)
    assert loss == pytest.approx(-(2 * kept + 2 * 1.3 - 0.8 * 2) / 4, abs=1e-5)
    assert gradient == pytest.approx([-2 * kept / 4, 0, 0, 0, 0], abs=1e-5)
    assert (Clipped(0.2, 0.3).clipped(x) & (x.mask > 0)).tolist() == [False, True, True, False, True]


def test_a_lol_by_hand():
    x = apply_keep(made(TWO, [0, 0], advantages=[2.0, -1.0], weights=[1.5, 1.0]), ALol())
    assert x.kept.tolist() == [True, False] and x.mask.tolist() == [1, 1, 0, 0, 0]
    x = replace(x, total_answers=1.0)
    for rule, factor in ((ALol(), 2 * 1.2), (ALol(clip=0.5), 2 * math.exp(0.3)), (ALol("free"), 2.0),
                         (ALol("kl", beta=0.5), 2 - 0.5 * 0.3)):
        loss, gradient = learned(rule, x)
        assert loss == pytest.approx(-1.5 * factor * -3.0, abs=1e-5)
        assert gradient == pytest.approx([-1.5 * factor] * 2 + [0] * 3, abs=1e-5)
    assert ALol("free").requires == frozenset() and ALol().requires == {"reference"}


def test_copg_by_hand():
    """D = .3 and -.2; R_b = 1 - .03 and 0 + .02, so the pull is .95 on the one and -.95 on the other."""
    x = made(TWO, [0, 0], rewards=[1.0, 0.0])
    loss, gradient = learned(CoPG(0.1), x)
    assert gradient == pytest.approx([-0.95, -0.95, 0.95, 0, 0.95], abs=1e-5)
    assert loss == pytest.approx(-(0.95 * -3.0 - 0.95 * -1.5), abs=1e-5)
    three = made([*TWO, TWO[0]], [0, 0, 0], rewards=[1.0, 0.0, 0.0])
    free = learned(CoPG(0.0), three)[1]
    assert free == pytest.approx([-2 / 3] * 2 + [1 / 3, 0, 1 / 3] + [1 / 3] * 2, abs=1e-5)  # RLOO times 2/3


def test_webrl_by_hand():
    """Mean log-probabilities -1.5 and -.75; D = .3 and -.2."""
    assert math.exp(-0.75) == pytest.approx(0.4724, abs=1e-4)
    x = made(TWO, [0, 0], advantages=[0.5, 1.0], weights=[1.0, 2.0], correct=[True, True])
    assert apply_keep(x, WebRL(low=0.2, high=0.3)).kept.tolist() == [True, False]
    assert apply_keep(x, WebRL(low=0.3, high=0.48)).kept.tolist() == [False, True]
    assert apply_keep(x, WebRL(low=0.0, high=1.0)).kept.tolist() == [True, True]
    wrong = replace(x, correct=torch.tensor([False, True]))
    assert apply_keep(wrong, WebRL(low=0.0, high=1.0)).kept.tolist() == [False, True]
    loss, gradient = learned(WebRL(0.5, 0, 1), x)
    a, b = 0.15 - 0.5, -0.1 - 1.0
    assert loss == pytest.approx((a ** 2 + 2 * b ** 2) / 2, abs=1e-5)
    assert gradient == pytest.approx([0.5 * a] * 2 + [2 * 0.5 * b, 0, 2 * 0.5 * b], abs=1e-5)


def test_draws_and_schedules():
    groups = np.zeros(3, GROUPS)
    groups["best"] = [0.0, 0.5, 0.25]
    ages = np.array([0, 10, 20])
    assert uniform(groups, ages).tolist() == [1, 1, 1] and by_advantage(groups, ages).tolist() == [0, 0.5, 0.25]
    assert recent(groups, ages, 5.0).tolist() == [1, 0.25, 0.0625]
    assert [s for s in range(9) if constant(s, 3)] == [2, 5, 8] and all(constant(s) for s in range(4))
    steps = [s for s in range(400) if growing(s, 2, 8, 200)]
    gaps = np.diff(steps)
    assert steps[0] in (1, 2) and gaps[0] == 2 and set(gaps[-10:].tolist()) == {8} and (np.diff(gaps) >= -1).all()
    assert len([s for s in steps if s < 200]) == math.floor(200 / 6 * math.log(4)) and len(steps) == 71
    assert [s for s in range(8) if growing(s, 4, 4, 9)] == [3, 7]


def test_options():
    assert {*RULES} == {"truncated", "clipped", "a_lol", "copg", "webrl"}
    assert {*DRAWS} == {"uniform", "by_advantage", "recent"} and {*SCHEDULES} == {"constant", "growing"}
    with pytest.raises(ConfigError, match="above high"):
        bind("algo.stored.rule", Named(name="webrl", low=0.96), RULES)
    with pytest.raises(ConfigError, match=r"algo\.stored\.advantage='gae' needs .*values"):
        ReplayFunctions.of(StoredSettings(advantage="gae"))
    assert ReplayFunctions.of(StoredSettings(rule={"name": "a_lol", "form": "free"})).rule.requires == frozenset()
    assert ReplayFunctions.of(StoredSettings(rule="copg")).rule.requires == {"reference"}
