"""Rules of stored answers: by hand, and against an implementation answer by answer; draws and schedules by hand."""

import math
import random
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


def test_copg_is_the_gradient_of_the_squared_differences():
    x = made([*TWO, TWO[1]], [0, 0, 1], rewards=[1.0, 0.25, 0.5])
    assert x.total_pairs == 1
    d = x.above_reference
    square = (x.rewards[0] - x.rewards[1] - 0.2 * (d[0] - d[1])) ** 2
    (expected,) = torch.autograd.grad(square / (2 * 0.2), x.logprobs)
    assert learned(CoPG(0.2), x)[1] == pytest.approx(expected.tolist(), abs=1e-9)


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


def test_an_answer_of_another_micro_batch_has_no_loss_in_this_one():
    x = made(TWO, [0, 0], advantages=[0.5, 1.0])
    other = replace(x, logprobs=x.logprobs[:2].detach().requires_grad_(), sampler=x.sampler[:2],
                    reference=x.reference[:2], mask=x.mask[:2], answer=x.answer[:2])
    assert WebRL(0.5, 0, 1).loss(other).item() == pytest.approx((0.15 - 0.5) ** 2 / 2, abs=1e-6)


def by_hand(name, options, answers, x):
    """Gradient [N] with plain loops; `x` gives the numbers of answers."""
    out, group = [], x.group.tolist()
    d = [sum((a - b) * m for a, _, b, m in zip(*answer, strict=True)) for answer in answers]
    for i, answer in enumerate(answers):
        count = sum(answer[3])
        a, weight, reward = x.advantages[i].item(), x.weights[i].item(), x.rewards[i].item()
        drift = sum((p - q) * m for p, q, _, m in zip(*answer, strict=True)) / max(count, 1)
        for p, q, _, m in zip(*answer, strict=True):
            if name == "truncated":
                g = -min(math.exp(drift), 2.0) * a * weight / x.total_tokens
            elif name == "clipped":
                r = math.exp(p - q)
                held = (a > 0 and r > 1.2) or (a < 0 and r < 0.8)
                g = 0.0 if held else -r * a * weight / x.total_tokens
            elif name == "a_lol":
                w = min(max(math.exp(d[i]), 0.8), 1.2)
                g = -a * w * weight / x.total_answers if a > 0 else 0.0
            elif name == "copg":
                pull = sum((reward - 0.1 * d[i]) - (x.rewards[j].item() - 0.1 * d[j]) for j in range(len(answers))
                           if group[j] == group[i])
                g = -pull * weight / x.total_pairs
            else:
                g = 2 * 0.1 * (0.1 * d[i] - a) * weight / x.total_answers
                sure = math.exp(sum(p * m for p, _, _, m in zip(*answer, strict=True)) / max(count, 1))
                g = g if x.correct[i] and 0.5 <= sure <= 0.95 else 0.0
            out.append(g * m)
    return out


@pytest.mark.parametrize("name", RULES)
def test_against_one_answer_at_a_time(name):
    """200 random optimizer steps, each in micro-batches."""
    rng, rule, acted = random.Random(3), RULES[name](), 0
    for _ in range(200):
        groups = sorted(rng.randrange(3) for _ in range(rng.randint(2, 7)))
        answers = []
        for _ in groups:
            n = rng.randint(1, 5)
            now = [-rng.expovariate(2) for _ in range(n)]
            mask = [1.0, *(float(rng.random() < 0.8) for _ in range(n - 1))]
            answers.append((now, [p + rng.gauss(0, 0.4) for p in now], [p + rng.gauss(0, 0.3) for p in now], mask))
        numbers = {k: [rng.gauss(0, 1) for _ in groups] for k in ("advantages", "rewards")}
        x = made(answers, groups, weights=[rng.uniform(0.5, 2) for _ in groups],
                 correct=[rng.random() < 0.7 for _ in groups], **numbers)
        x = replace(x, total_pairs=max(x.total_pairs, 1.0))
        expected, kept = by_hand(name, {}, answers, x), apply_keep(x, rule)
        cut, found = rng.randint(0, len(answers)), []
        for own in (x.answer < cut, x.answer >= cut):
            if own.any():
                logprobs = x.logprobs[own].detach().requires_grad_()
                part = replace(kept, logprobs=logprobs, sampler=x.sampler[own], reference=x.reference[own],
                               mask=kept.mask[own], answer=x.answer[own])
                (gradient,) = torch.autograd.grad(rule.loss(part), logprobs)
                found += gradient.tolist()
        assert found == pytest.approx(expected, abs=1e-6)
        acted += any(expected)
    assert acted > 100


def test_draws():
    groups = np.zeros(3, GROUPS)
    groups["best"] = [0.0, 0.5, 0.25]
    ages = np.array([0, 10, 20])
    assert uniform(groups, ages).tolist() == [1, 1, 1] and by_advantage(groups, ages).tolist() == [0, 0.5, 0.25]
    assert recent(groups, ages, 5.0).tolist() == [1, 0.25, 0.0625]


def test_schedules():
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
    free = ReplayFunctions.of(StoredSettings(rule={"name": "a_lol", "form": "free"}))
    assert free.rule.requires == frozenset()
    assert ReplayFunctions.of(StoredSettings(rule="copg")).rule.requires == {"reference"}
