"""Losses of methods beside the objective, by hand: demonstrations, second attempts, teachers, pairs, stored answers."""

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.algo.flat import flat
from tests.tables import each
from vlrl.algo.named import bind
from vlrl.config.base import Named
from vlrl.errors import ConfigError
from vlrl.methods.demonstrations.mixes import MIXES, Chord, ChordPhi, DemonstrationBatch, Relift, Sasr
from vlrl.methods.distillation.method import LOSSES, TokenChunk, reverse_kl, sampled_kl
from vlrl.methods.preferences.loss import bradley_terry, pair_loss
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
from vlrl.methods.second_attempts.update import LOSSES as RETRY_LOSSES
from vlrl.methods.second_attempts.update import RetryBatch, dpo, expo, sft
from vlrl.models.logprobs import Head, token_stats

LN = math.log
ROWS = [([LN(0.5), LN(0.8), LN(0.1)], [1, 1, 0], 1.0), ([LN(0.9)], [1], 2.0)]


def given(rows, total):
    flat = [(x, m, w) for xs, ms, w in rows for x, m in zip(xs, ms, strict=True)]
    logprobs, mask, weights = (torch.tensor(v, dtype=torch.float64) for v in zip(*flat, strict=True))
    return DemonstrationBatch(logprobs=logprobs.requires_grad_(), mask=mask, weights=weights, total_tokens=total)


def test_mu_rises_and_falls():
    mu = [Chord(peak=0.8, valley=0.2, warmup=2, decay=4).shares(step, 0)[1] for step in range(9)]
    half = 0.2 + 0.6 * (1 + math.cos(math.pi / 4)) / 2
    assert mu == pytest.approx([0, 0.4, 0.8, half, 0.5, 1.0 - half, 0.2, 0.2, 0.2])
    assert Chord().shares(0, 0) == pytest.approx((0.1, 0.9)) and Chord().shares(200, 0)[1] == pytest.approx(0.05)
    assert all(sum(Chord().shares(step, 0)) == pytest.approx(1) for step in range(0, 220, 20))
    assert ChordPhi(0.25).shares(7, 3) == (0.75, 0.25)


def test_losses_by_hand():
    d = given(ROWS, 4.0)
    loss = Chord().loss(d)
    loss.backward()
    assert loss.item() == pytest.approx(-(LN(0.5) + LN(0.8) + 2 * LN(0.9)) / 4, abs=1e-5)
    assert d.logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0, -0.5])
    d = given(ROWS, 4.0)
    loss = ChordPhi().loss(d)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.25 * LN(0.5) + 0.16 * LN(0.8) + 2 * 0.09 * LN(0.9)) / 4, abs=1e-5)
    assert d.logprobs.grad.tolist() == pytest.approx([-0.25 / 4, -0.16 / 4, 0, -2 * 0.09 / 4])
    assert Sasr().loss(given(ROWS, 4.0)).item() == pytest.approx(Chord().loss(given(ROWS, 4.0)).item())
    d = replace(given(ROWS, 4.0), entropy=torch.tensor([1.0, 2.0, 7.0, 0.5], dtype=torch.float64))
    assert Relift(entropy=0.1).loss(d).item() == pytest.approx(
        -(LN(0.5) + LN(0.8) + 2 * LN(0.9)) / 4 - 0.1 * 3.5 / 4, abs=1e-5)


def test_sasr_by_hand():
    mix = Sasr(warmup=2, gamma=2.0)
    for step, norm in ((0, 9.0), (1, 4.0)):
        assert mix.shares(step, 0) == (0.0, 1.0)
        mix.observe(step, norm)
    assert mix.chance(2) == pytest.approx(4 / (4 + 2 * 4))  # the last of the warm-up, not the first
    mix.observe(2, 8.0)
    assert mix.chance(3) == mix.chance(9) == pytest.approx(8 / (8 + 2 * 4))
    supervised = sum(mix.shares(step, 5)[1] for step in range(2, 2002))
    assert supervised == pytest.approx(1000, abs=70)  # three standard errors
    assert [mix.shares(s, 5) for s in range(50)] == [mix.shares(s, 5) for s in range(50)]
    assert [mix.shares(s, 5) for s in range(50)] != [mix.shares(s, 6) for s in range(50)]
    again = Sasr(warmup=2, gamma=2.0)
    again.load_state_dict(mix.state_dict())
    assert again.chance(3) == mix.chance(3)
    mix.observe(3, 0.0)  # without a supervised gradient it is RL
    assert {mix.shares(step, 0) for step in range(4, 200)} == {(1.0, 0.0)}


def test_relift_collects_each_prompt_once_and_goes_on_with_its_optimizer():
    mix = Relift(size=3)
    mix.collect([5, 2, 5])
    mix.collect([2])
    assert mix.due() == [] and mix.metrics(0) == {"demonstrations/buffer": 2.0}
    mix.collect([9, 2, 4])
    assert mix.due() == [5, 2, 9] and mix.buffer == [4] and mix.due() == []
    mix.collect([5])  # once it is out it may fail again
    assert mix.buffer == [4, 5] and mix.shares(3, 0) == (1.0, 0.0)
    mix.collect([6])
    assert mix.due() == [4, 5, 6] and mix.buffer == []
    weight = torch.nn.Parameter(torch.ones(2))
    def stepped(mix, gradient):
        weight.grad = torch.tensor(gradient)
        mix.optimizer([weight]).step()
    mix = Relift(size=3, lr=0.1)
    assert mix.state_dict() == {"buffer": []}
    mix.collect([7])
    stepped(mix, [1.0, -2.0])
    state, before = copy.deepcopy(mix.state_dict()), weight.detach().clone()
    stepped(mix, [0.5, 0.5])
    wanted = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(before)
    again = Relift(size=3, lr=0.1)
    again.load_state_dict(state)
    assert again.buffer == [7] and again.state_dict()["optimizer"] == state["optimizer"]  # before it is used
    stepped(again, [0.5, 0.5])
    assert torch.equal(weight, wanted)


def test_options_of_demonstrations():
    assert {*MIXES} == {"chord", "chord_phi", "sasr", "relift"}
    for mix, message in (({"name": "chord", "valley": 0.95}, "above peak"), ({"name": "chord", "mu": 1}, "no option"),
                         ({"name": "sasr", "warmup": 0}, "greater than or equal to 1")):
        with pytest.raises(ConfigError, match=message):
            bind("algo.demonstrations.mix", Named(**mix), MIXES)



def attempts(rows, weights=(1.0, 1.0), tokens=4.0, count=2.0, reference=True, step=0):
    """Of rows (pair, second, [(logprob, reference, sampled)])."""
    flat = [(pair, second, *values) for pair, second, own in rows for values in own]
    pair, second, logprobs, known, mask = (list(v) for v in zip(*flat, strict=True))
    return RetryBatch(
        logprobs=torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        reference=torch.tensor(known, dtype=torch.float64) if reference else None,
        mask=torch.tensor(mask, dtype=torch.float64), is_retry=torch.tensor(second),
        pair=torch.tensor(pair), weights=torch.tensor(weights, dtype=torch.float64), total_tokens=tokens,
        total_attempts=count, step=step)


TRIED = [(0, True, [(-1.0, -1.5, 1), (-2.0, -2.0, 1), (-7.0, -1.0, 0)]), (0, False, [(-3.0, -2.0, 1)]),
        (1, True, [(-0.5, -0.5, 1)]), (1, False, [(-1.0, -3.0, 1), (-9.0, -1.0, 0)])]


def test_second_attempts_by_hand():
    a = attempts(TRIED, weights=(1.0, 2.0))
    loss = sft(a)
    assert loss.item() == pytest.approx((1.0 + 2.0 + 2 * 0.5) / 4)
    loss.backward()
    # neither a token that was not sampled nor one of a failure is learned from
    assert a.logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0, 0, -0.5, 0, 0])
    a = attempts(TRIED, weights=(1.0, 2.0))
    # margins of whole answers: 0.5 + 0 - (-1) = 1.5, and 0 - 2 = -2
    loss = dpo(a, beta=0.5)
    first, second = 1 / (1 + math.exp(0.75)), 1 / (1 + math.exp(-1.0))  # sigmoid(-beta margin)
    assert loss.item() == pytest.approx((-LN(1 - first) - 2 * LN(1 - second)) / 2)
    loss.backward()
    slope = [0.5 * first / 2, 0.5 * 2 * second / 2]
    assert a.logprobs.grad.tolist() == pytest.approx([-slope[0], -slope[0], 0, slope[0], -slope[1], slope[1], 0])
    a = attempts(TRIED, weights=(1.0, 2.0), step=25)
    loss = expo(a, beta=0.4, decay=100)
    # 0.4 * 0.75 times the mean of 1.5, the mean of 1 and 2, and 2 * 0.5
    assert loss.item() == pytest.approx(0.3 * (1.5 + 1.0) / 2)
    loss.backward()
    assert a.logprobs.grad.tolist() == pytest.approx([-0.075, -0.075, 0, 0, -0.3, 0, 0])
    found = [expo(attempts(TRIED, step=s), decay=100).item() > 0 for s in (0, 99, 100, 300)]
    assert found == [True, True, False, False]


def test_options_of_second_attempts():
    assert {*RETRY_LOSSES} == {"sft", "expo", "dpo"}
    assert RETRY_LOSSES["dpo"].requires == {"reference", "failures"} and not hasattr(RETRY_LOSSES["sft"], "requires")

P, Q = [0.5, 0.3, 0.0, 0.2], [0.2, 0.3, 0.0, 0.5]
"""The third token can be sampled of neither."""


def told(p, q, token):
    """One answer token; logits are known up to a constant."""
    own = torch.tensor([[LN(v) + 3.0 if v else -math.inf for v in p]], requires_grad=True)
    return TokenChunk(own, torch.tensor([[LN(v) - 1.0 if v else -math.inf for v in q]]), torch.tensor([token]))


def backward(loss, x):
    value = loss(x)
    value.sum().backward()
    return value.tolist(), x.logits.grad[0].tolist()


def test_the_whole_distribution_and_the_sampled_token_by_hand():
    value, gradient = backward(reverse_kl, told(P, Q, 0))
    kl = 0.3 * LN(2.5)  # .5 log(.5/.2) + .3 log 1 + .2 log(.2/.5)
    assert value == pytest.approx([kl], abs=1e-5)
    assert gradient == pytest.approx([0.5 * (LN(2.5) - kl), 0.3 * -kl, 0, 0.2 * (-LN(2.5) - kl)], abs=1e-5)
    for token, gap in ((0, LN(2.5)), (1, 0.0), (3, -LN(2.5))):
        value, gradient = backward(sampled_kl, told(P, Q, token))
        assert value == pytest.approx([gap], abs=1e-5), token
        assert gradient == pytest.approx([gap * ((v == token) - p) for v, p in enumerate(P)], abs=1e-5), token


def by_token(own, theirs, banned, temperature):
    """(KL, its gradient with respect to the logits) of one token, in plain numbers."""
    def chances(logits):
        weights = [0.0 if v in banned else math.exp(x / temperature) for v, x in enumerate(logits)]
        return [w / sum(weights) for w in weights]

    p, q = chances(own), chances(theirs)
    kl = sum(a * LN(a / b) for a, b in zip(p, q, strict=True) if a)
    return kl, [a * (LN(a / b) - kl) / temperature if a else 0.0 for a, b in zip(p, q, strict=True)]


@each("width", [9, 7, 12])
def test_against_one_token_at_a_time(width):
    """Random batches, whole and in chunks, with a teacher whose output layer has as many rows, fewer or more."""
    rng = random.Random(width)
    rows = 9
    for _ in range(15):
        torch.manual_seed(rng.randrange(10**6))
        count, temperature, chunk = rng.randint(1, 8), rng.choice([1.0, 0.7]), rng.choice([1, 3, 100])
        banned = sorted({2, *range(min(width, rows), rows)})
        layer, other = torch.nn.Linear(5, rows), torch.nn.Linear(4, width)
        hidden, theirs = torch.randn(count, 5, requires_grad=True), torch.randn(count, 4)
        targets = torch.tensor([rng.choice([v for v in range(rows) if v not in banned]) for _ in range(count)])
        stats = token_stats(hidden, Head(rows, layer), targets, torch.tensor(banned), temperature,
                            {"kl": lambda a, t, b: reverse_kl(TokenChunk(a, b, t))}, 4 * rows * chunk,
                            second=(theirs, Head(width, other)))
        stats.more["kl"].sum().backward()
        wanted = [by_token(a, (b + [0.0] * rows)[:rows], banned, temperature)
                  for a, b in zip(layer(hidden).tolist(), other(theirs).tolist(), strict=True)]
        assert stats.more["kl"].tolist() == pytest.approx([kl for kl, _ in wanted], abs=1e-5)
        slopes = torch.tensor([slope for _, slope in wanted])
        assert torch.allclose(hidden.grad, slopes @ layer.weight, atol=1e-5)
        assert torch.allclose(layer.weight.grad, slopes.T @ hidden.detach(), atol=1e-5)
        assert other.weight.grad is None


def test_options_of_distillation():
    assert {*LOSSES} == {"reverse_kl", "sampled_kl"}
    with pytest.raises(ConfigError, match=r"algo\.distillation\.loss='reversed_kl' is not known"):
        bind("algo.distillation.loss", Named(name="reversed_kl"), LOSSES)


def pairs(ids, group, rewards, mask=None, **more):
    return flat([-1.0] * len(ids), rollout=ids, group=group, rewards=rewards, mask=mask, **more)


def test_pairs_by_hand():
    """Scores are those of the last trained tokens: 2 and 1 of the first pair, whose better answer comes second, and 0
    and .5 of the other: margins -1 and -.5."""
    x = pairs([0, 0, 1, 1, 1, 2, 3], [0, 0, 1, 1], [0.0, 1.0, 1.0, 0.0], mask=[1, 1, 1, 1, 0, 1, 1])
    values = torch.tensor([9.0, 2.0, 9.0, 1.0, 9.0, 0.0, 0.5], requires_grad=True)
    loss, metrics = pair_loss(x, values)
    wanted = (math.log(1 + math.e) + math.log(1 + math.exp(0.5))) / 2
    assert loss.item() == pytest.approx(wanted, abs=1e-6)
    assert float(metrics["pairs/loss"]) / x.total_tokens == pytest.approx(wanted, abs=1e-6)
    assert float(metrics["pairs/margin"]) / x.total_tokens == pytest.approx(-0.75)
    assert float(metrics["pairs/accuracy"]) == 0
    loss.backward()
    a, b = 1 / (1 + math.exp(-1)) / 2, 1 / (1 + math.exp(-0.5)) / 2
    assert values.grad is not None
    assert torch.allclose(values.grad, torch.tensor([0, a, 0, -a, 0, -b, b]), atol=1e-6)
    centred, _ = pair_loss(x, values.detach(), 0.1)
    assert float(centred) == pytest.approx(wanted + 0.1 * (9 + 0.25) / 2, abs=1e-5)
    x = pairs([0, 1, 2, 3], [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0], weights=[2.0, 2.0, 0.0, 0.0])
    loss, metrics = pair_loss(x, torch.tensor([0.0, 0.0, 5.0, 1.0]))
    assert float(loss) == pytest.approx(2 * math.log(2) / 2, abs=1e-6)
    assert float(metrics["pairs/accuracy"]) / x.total_tokens == pytest.approx(0.75)
    term, _ = bradley_terry(x)
    assert not term.any() and not term.requires_grad


F64 = torch.float64


def stored_answers(answers, groups, **more):
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
    x = stored_answers(TWO, [0, 0], advantages=[2.0, -1.0], weights=[1.0, 3.0])
    w = [math.exp(0.3), math.exp(-0.4)]
    loss, gradient = learned(Truncated(), x)
    assert loss == pytest.approx(-(w[0] * 2 * -3.0 + w[1] * -3 * -1.5) / 4, abs=1e-5)
    assert gradient == pytest.approx([-w[0] * 2 / 4] * 2 + [w[1] * 3 / 4, 0, w[1] * 3 / 4], abs=1e-5)
    loss, gradient = learned(Truncated(cap=1.1), x)
    assert gradient[:2] == pytest.approx([-1.1 * 2 / 4] * 2, abs=1e-5) and gradient[2] == pytest.approx(w[1] * 3 / 4)
    assert Truncated(cap=1.1).clipped(x).tolist() == [True, True, False, False, False]


def test_clipped_by_hand():
    """Ratios e^.2, e^.4 with A = 2, and e^-.4, e^-.4 with A = -1."""
    x = stored_answers(TWO, [0, 0], advantages=[2.0, -1.0])
    loss, gradient = learned(Clipped(0.2, 0.3), x)
    kept = math.exp(0.2)
    assert loss == pytest.approx(-(2 * kept + 2 * 1.3 - 0.8 * 2) / 4, abs=1e-5)
    assert gradient == pytest.approx([-2 * kept / 4, 0, 0, 0, 0], abs=1e-5)
    assert (Clipped(0.2, 0.3).clipped(x) & (x.mask > 0)).tolist() == [False, True, True, False, True]


def test_a_lol_by_hand():
    x = apply_keep(stored_answers(TWO, [0, 0], advantages=[2.0, -1.0], weights=[1.5, 1.0]), ALol())
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
    x = stored_answers(TWO, [0, 0], rewards=[1.0, 0.0])
    loss, gradient = learned(CoPG(0.1), x)
    assert gradient == pytest.approx([-0.95, -0.95, 0.95, 0, 0.95], abs=1e-5)
    assert loss == pytest.approx(-(0.95 * -3.0 - 0.95 * -1.5), abs=1e-5)
    three = stored_answers([*TWO, TWO[0]], [0, 0, 0], rewards=[1.0, 0.0, 0.0])
    free = learned(CoPG(0.0), three)[1]
    assert free == pytest.approx([-2 / 3] * 2 + [1 / 3, 0, 1 / 3] + [1 / 3] * 2, abs=1e-5)  # RLOO times 2/3


def test_webrl_by_hand():
    """Mean log-probabilities -1.5 and -.75; D = .3 and -.2."""
    assert math.exp(-0.75) == pytest.approx(0.4724, abs=1e-4)
    x = stored_answers(TWO, [0, 0], advantages=[0.5, 1.0], weights=[1.0, 2.0], correct=[True, True])
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


def test_options_of_stored_answers():
    assert {*RULES} == {"truncated", "clipped", "a_lol", "copg", "webrl"}
    assert {*DRAWS} == {"uniform", "by_advantage", "recent"} and {*SCHEDULES} == {"constant", "growing"}
    with pytest.raises(ConfigError, match="above high"):
        bind("algo.stored.rule", Named(name="webrl", low=0.96), RULES)
    with pytest.raises(ConfigError, match=r"algo\.stored\.advantage='gae' needs .*values"):
        ReplayFunctions.of(StoredSettings(advantage="gae"))
    assert ReplayFunctions.of(StoredSettings(rule={"name": "a_lol", "form": "free"})).rule.requires == frozenset()
    assert ReplayFunctions.of(StoredSettings(rule="copg")).rule.requires == {"reference"}
