"""Policy terms that look at several rollouts: by hand, and against autograd on the whole batch at once."""

from dataclasses import replace
from math import exp as E
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algo.flat import bound, flat, gradient, part, process, random_step, run, side_by_side, with_prepared
from tests.tables import each
from vlrl.algo.aggregation import AGGREGATIONS
from vlrl.algo.tables import LOSSES
from vlrl.methods.objectives.group_terms import _mixed, token_keys


def sig(v):
    return 1 / (1 + E(-v))


def agree(per_token, x, value, slope):
    assert per_token.tolist() == pytest.approx(value, abs=1e-5)
    assert gradient(per_token, x) == pytest.approx(slope, abs=1e-5)


# one group of two correct rollouts (ratio e^0.1) and two wrong ones (ratios e^0.1 and e^-0.5): q = 0.5
NFT = {"logp": [-1.0, -1.0, -1.0, -1.0], "old": [-1.1, -1.1, -1.1, -0.5], "rollout": [0, 1, 2, 3],
       "rewards": [1.0, 1.0, 0.0, 0.0], "group": [0] * 4}
REST = 2 - E(-0.5)  # (1 - q r) / (1 - q); 2 - e^0.1 = 0.895 is under the floor


@each("options value slope", [
    ({}, [-0.05, -0.05, 0, -log(REST) / 2], [-0.5, -0.5, E(0.1) / 2, E(-0.5) / REST / 2]),
    ({"like": "grpo"}, [-0.1, -0.1, 0, -log(REST)], [-1, -1, E(0.1), E(-0.5) / REST]),
    ({"like": "none", "negative": 0.5}, [-0.1, -0.1, 0, -log(REST) / 2], [-1, -1, E(0.1) / 2, E(-0.5) / REST / 2]),
    ({"floor": 0.5}, [-0.05, -0.05, -log(2 - E(0.1)) / 2, -log(REST) / 2],
     [-0.5, -0.5, E(0.1) / (2 - E(0.1)) / 2, E(-0.5) / REST / 2]),
    ({"above": 1.0}, [0, 0, 0, 0], [0, 0, 0, 0])])
def test_nft_by_hand(options, value, slope):
    x = flat(**NFT)
    agree(run(bound(LOSSES, "nft", **options), x)[0], x, value, slope)


def test_nft_at_the_weights_that_sampled_and_its_bounds():
    x = flat([-1.0] * 5, [-1.1] * 5, rollout=[0, 1, 2, 3, 4], rewards=[1.0, float("nan"), 0.0, 1.0, 1.0],
             group=[0, 0, 0, 5, 5])
    agree(run(bound(LOSSES, "nft"), x)[0], x, [-0.05, 0, 0, 0, 0], [-0.5, 0, E(0.1) / 2, 0, 0])
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    x = flat([-1.0] * 8, rollout=list(range(8)), rewards=rewards.double(), group=[0] * 8)
    centred = rewards - rewards.mean()
    for like, expected in (("dr_grpo", centred), ("grpo", centred / rewards.std(correction=0))):
        assert gradient(run(bound(LOSSES, "nft", like=like), x)[0], x) == pytest.approx((-expected).tolist(), abs=1e-6)
    x = flat([-1.0] * 100, rollout=list(range(100)), rewards=[1.0] * 99 + [0.0], group=[0] * 100)
    assert gradient(run(bound(LOSSES, "nft"), x)[0], x)[-1] == pytest.approx(0.98, abs=1e-6)  # not 0.99
    x = flat([0.0, 0.0], [-15.0, -15.0], rollout=[0, 1], rewards=[1.0, 0.0], group=[0, 0])
    assert run(bound(LOSSES, "nft"), x)[0].tolist()[0] == pytest.approx(-5.0)


# scores 0.3 (two tokens) and -0.5: z = 0.8, -0.8
PACS = {"logp": [-1.0, -1.0, -1.0], "old": [-1.1, -1.2, -0.5], "rollout": [0, 0, 1], "group": [0, 0]}


@each("options rewards z weight", [
    ({}, [1.0, 0.0], 0.8, 1.0), ({"balanced": False}, [1.0, 0.0], 0.8, 1.0), ({"beta": 2.0}, [1.0, 0.0], 1.6, 1.0)])
def test_pacs_by_hand(options, rewards, z, weight):
    x, beta = flat(**PACS, rewards=rewards), options.get("beta", 1.0)
    pull = beta * (sig(z) - 1 - sig(-z))  # e_0 = sigmoid(z) - 1, e_1 = sigmoid(-z); G - 1 = 1
    value = -log(sig(z))
    agree(run(bound(LOSSES, "pacs", **options), x)[0], x, [value / 2, value / 2, value], [pull, pull, -pull])


def test_pacs_weighs_the_rarer_outcome_more():
    x = flat([-1.0] * 3, rollout=[0, 1, 2], rewards=[1.0, 0.0, 0.0], group=[4, 4, 4])  # all scores 0: sigmoid = 1/2
    agree(run(bound(LOSSES, "pacs"), x)[0], x, [1.5 * log(2), 0.75 * log(2), 0.75 * log(2)],
          [-0.75 - 0.375, 0.375 + 0.1875, 0.375 + 0.1875])  # e = -0.75, 0.375, 0.375
    agree(run(bound(LOSSES, "pacs", balanced=False), x)[0], x, [log(2)] * 3, [-1.0, 0.5, 0.5])
    alone = replace(x, rewards=torch.tensor([1.0, float("nan"), float("nan")]).double())
    agree(run(bound(LOSSES, "pacs"), alone)[0], x, [0, 0, 0], [0, 0, 0])
    term = bound(LOSSES, "pacs", anchor="reference")
    assert "reference" in term.requires and "reference" not in bound(LOSSES, "pacs").requires
    x = flat([-1.0] * 3, rollout=[0, 0, 1], group=[0, 0], rewards=[1.0, 0.0], reference_logprobs=PACS["old"])
    assert run(term, x)[0].tolist() == run(bound(LOSSES, "pacs"), flat(**PACS, rewards=[1.0, 0.0]))[0].tolist()


@settings(max_examples=10)
@given(st.integers(0, 10 ** 6), st.booleans())
def test_pacs_has_the_gradient_of_the_whole_batch(seed, unscorable):
    """Each rollout alone, with what was prepared, against autograd through every group's scores at once."""
    x = random_step(seed)
    rewards = x.rewards.clone()
    if unscorable:
        rewards[::5] = torch.nan
    x = replace(x, rewards=rewards)
    score = 0.7 * x.per_sequence(x.logprobs - x.old_logprobs)
    loss = 0.0
    for g in x.group.unique():
        members = [i for i in range(len(rewards)) if x.group[i] == g and not rewards[i].isnan() and x.lengths[i] > 0]
        good = [i for i in members if rewards[i] == 1]
        for i in members:
            others = [j for j in members if j != i]
            if others:
                same = len(good) if rewards[i] == 1 else len(members) - len(good)
                weight = len(members) / (2 * same) if 0 < len(good) < len(members) else 1.0
                z = score[i] - score[others].mean()
                loss += weight * torch.nn.functional.binary_cross_entropy_with_logits(z, rewards[i])
    loss = loss / x.total_sequences
    (expected,) = torch.autograd.grad(loss, x.logprobs)
    term = bound(LOSSES, "pacs", beta=0.7)
    whole = with_prepared(term, x)
    shares = [AGGREGATIONS["sequence_sum"](term(p)[0], p) for p in (part(whole, [r]) for r in range(len(rewards)))]
    (got,) = torch.autograd.grad(sum(shares), x.logprobs)
    assert sum(shares).item() == pytest.approx(loss.item(), abs=1e-9)
    assert torch.allclose(got, expected, atol=1e-10)


def test_oreal_by_hand():
    # 2 tokens of correct rollouts, 3 of others, 5 in all with the unscorable one's
    x = flat([-1.0, -2.0, -3.0, -1.0, -2.0, -0.5], adv=[0.5, 0.5, -0.5, -0.5, -0.5, 0.0], rollout=[0, 0, 1, 1, 1, 2],
             rewards=[1.0, 0.0, float("nan")], group=[0, 0, 0])
    good, bad = 0.5 * 6 / 2, -0.5 * 0.5 * 6 / 3
    agree(run(bound(LOSSES, "oreal"), x)[0], x, [good, 2 * good, 3 * bad, bad, 2 * bad, 0],
          [-good, -good, -bad, -bad, -bad, 0])
    agree(run(bound(LOSSES, "oreal", weighted=False, positive=2.0, negative=1.0), x)[0], x,
          [6.0, 12.0, 6 * bad, 2 * bad, 4 * bad, 0], [-6.0, -6.0, -2 * bad, -2 * bad, -2 * bad, 0])
    x = replace(x, rewards=torch.tensor([3.0, 2.0, 1.0]).double())
    bad *= 0.75  # a fourth token of this kind, of the rollout without an advantage
    agree(run(bound(LOSSES, "oreal", above=2.5), x)[0], x, [good, 2 * good, 3 * bad, bad, 2 * bad, 0],
          [-good, -good, -bad, -bad, -bad, 0])


def test_stable_reinforce_by_hand():
    # the log-ratio 9 becomes log(1000) before exp, where a negative advantage has no clip
    x = flat([0.0, 0.5, -0.5], [-9.0, 0.0, 0.0], [-1.0, 1.0, -1.0])
    agree(run(bound(LOSSES, "stable_reinforce"), x)[0], x, [1000, -1.2, 0.8], [0, 0, 0])
    agree(run(bound(LOSSES, "stable_reinforce", pre_clip=2.0, clip_low=0.5, clip_high=1.0), x)[0], x,
          [2, -E(0.5), E(-0.5)], [0, -E(0.5), E(-0.5)])
    # mean 0, deviation sqrt(18 / 11) = 1.28: 3 is 2.35 deviations away
    x = flat([-1.0] * 12, adv=[3.0, -3.0, *[0.0] * 9, 99.0], mask=[1] * 11 + [0])
    assert gradient(run(bound(LOSSES, "stable_reinforce"), x)[0], x) == pytest.approx([-3, 3] + [0] * 10)
    per_token, metrics = run(bound(LOSSES, "stable_reinforce", sigma=2.3), x)
    agree(per_token[:11], replace(x, mask=x.mask[:11]), [0.0] * 11, [0.0] * 12)
    assert metrics["clipped"].tolist() == [True] * 2 + [False] * 9 + [True]
    x = flat([-1.0] * 7, adv=[0.1] * 7)  # equal advantages stay
    assert gradient(run(bound(LOSSES, "stable_reinforce"), x)[0], x) == pytest.approx([-0.1] * 7)


# means: A 1, logp -3; covariances 2 * 2, 1 * -1 | -3 * -1, and 2.4 * 2 of a token that is not trained
COV = {"logp": [-1.0, -4.0, -4.0, -1.0], "adv": [3.0, 2.0, -2.0, 3.4], "rollout": [0, 0, 1, 1], "mask": [1, 1, 1, 0]}


@each("options kept", [
    ({}, None), ({"share": 1.0}, [0, 1, 0]), ({"cov_low": 3.5}, [0, 1, 1]), ({"cov_high": 3.5}, [1, 1, 0]),
    ({"cov_low": -2.0, "cov_high": 0.0}, [1, 0, 1]), ({"cov_low": 5.0, "cov_high": 9.0}, [1, 1, 1])])
def test_clip_cov_by_hand(options, kept):
    x = flat(**COV)
    per_token, metrics = run(bound(LOSSES, "clip_cov", **options), x)
    if kept is None:  # one of the two between 1 and 5
        assert sorted(gradient(per_token, x)) in ([-3, -2, 0, 0], [-2, 0, 0, 2])
        return
    a = [3.0, 2.0, -2.0]
    agree(per_token[:3], replace(x, mask=x.mask[:3]), [-v * k for v, k in zip(a, kept, strict=True)],
          [-v * k for v, k in zip(a, kept, strict=True)] + [0])
    assert metrics["clipped"].tolist() == [*(k == 0 for k in kept), False]


def test_clip_cov_draws_no_token_that_is_clipped_anyway():
    for step in range(6):
        x = flat(**COV, old=[-2.0, -4.0, -4.0, -1.0], step=step)  # ratio e of token 0, so token 2 is drawn
        assert gradient(run(bound(LOSSES, "clip_cov"), x)[0], x) == pytest.approx([0, -2, 0, 0])
        x = flat(**COV, old=[-1.0, -4.0, -3.0, -1.0], step=step)  # ratio 1/e of token 2 with A < 0, so 0 is drawn
        assert gradient(run(bound(LOSSES, "clip_cov"), x)[0], x) == pytest.approx([0, -2, 0, 0])


def test_kl_cov_by_hand():
    x = flat(**COV, old=[-1.2, -4.5, -3.5, -1.0])
    r = [E(0.2), E(0.5), E(-0.5), 1.0]
    agree(run(bound(LOSSES, "kl_cov"), x)[0], x, [-3 * r[0] + 0.2, -2 * r[1], 2 * r[2], -3.4],
          [-3 * r[0] + 1, -2 * r[1], 2 * r[2], 0])
    agree(run(bound(LOSSES, "kl_cov", coef=0.5, share=0.7), x)[0], x,
          [-3 * r[0] + 0.1, -2 * r[1], 2 * r[2] + 0.25, -3.4], [-3 * r[0] + 0.5, -2 * r[1], 2 * r[2] - 0.5, 0])
    x = flat([-1.0] * 40, [-1.5] * 40, [1.0] * 40, rollout=[0] * 40)
    assert len({run(bound(LOSSES, "kl_cov"), replace(x, step=s))[0].argmax().item() for s in range(6)}) > 1
    assert sum(v > -E(0.5) for v in run(bound(LOSSES, "kl_cov", share=0.1), x)[0].tolist()) == 4


def test_a_draw_follows_the_rollout_not_its_number_or_process():
    x = flat([-1.0] * 6, rollout=[0, 0, 0, 1, 1, 2], identity=[70, -5, 12], seed=4, step=9)
    keys = token_keys(x).tolist()
    moved = flat([-1.0] * 3, rollout=[0, 0, 1], identity=[-5, 12], seed=4, step=9)
    assert token_keys(moved).tolist() == keys[3:] and len(set(keys)) == 6
    assert token_keys(replace(x, step=10)).tolist() != keys != token_keys(replace(x, seed=5)).tolist()
    # splitmix64's published first output for seed 0
    assert hex(int(_mixed(torch.tensor([0]))[0]) & (2 ** 64 - 1)) == "0xe220a8397b1dcdaf"
    keys = token_keys(flat([-1.0] * 4000, rollout=[i // 40 for i in range(4000)]))
    assert abs((keys > 0).double().mean().item() - 0.5) < 0.03
    assert abs((keys % 8 == 0).double().mean().item() - 0.125) < 0.03


def test_processes_and_their_rollouts_change_nothing(monkeypatch):
    x = random_step(6, groups=4)
    split = [[12, 13, 14, 15, 4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]  # groups 3 and 1, 2, 0
    own = [process(x, rollouts) for rollouts in split]
    for name in sorted({*LOSSES} - {"nft"}):
        options = {"clip_cov": {"share": 0.1, "cov_low": 0.0}, "kl_cov": {"share": 0.1}}.get(name, {})
        term, got = bound(LOSSES, name, **options), torch.zeros(len(x.mask), dtype=torch.float64)
        with monkeypatch.context() as patch:
            whole = gradient(run(term, x)[0], x)
            shares = side_by_side(patch, [lambda p=p, term=term: run(term, p) for p in own])
        for p, (per_token, _) in zip(own, shares, strict=True):
            got += torch.autograd.grad((per_token * p.mask).sum(), x.logprobs, retain_graph=True)[0]
        assert got.tolist() == pytest.approx(whole, abs=1e-10), name


def test_a_group_of_equal_rewards_has_no_gradient_where_it_was_sampled():
    x = random_step(4, gap=0.0)
    x = replace(x, rewards=torch.ones_like(x.rewards), advantages=torch.zeros_like(x.advantages))
    for name in ("nft", "pacs", "oreal"):
        assert gradient(run(bound(LOSSES, name), x)[0], x) == pytest.approx([0.0] * len(x.mask), abs=1e-12), name
