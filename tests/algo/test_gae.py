"""Advantages with a critic: values worked out by hand, and an independent implementation on random ragged groups."""

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.algo.flat import flat, random_step
from tests.algo.made import scores
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import ActionCredit
from vlrl.config import validate
from vlrl.errors import ConfigError
from vlrl.methods.critic.gae import bilevel_gae, gae, macro_gae, turn_gae, value_loss

NAN = float("nan")


def judged(rollouts, **more):
    """Scores of a group: (reward, mask, [(start, end, reward of the turn), ...], values)."""
    return scores([[reward for reward, *_ in rollouts]], masks=[np.array(mask, bool) for _, mask, *_ in rollouts],
                  turns=[[ActionCredit(*turn) for turn in turns] for _, _, turns, _ in rollouts],
                  per_token=[{"values": np.array(values)} for *_, values in rollouts], **more)


def lists(arrays):
    return [array.tolist() for array in arrays]


ONE = [(1.0, [1, 1, 1], [(0, 3, 0.0)], [0.2, 0.4, 0.6])]
EPISODE = [(2.0, [1, 1, 0, 0, 1, 1], [(0, 2, 0.5), (4, 6, 0.5)], [0.2, 0.4, 9.0, 9.0, 0.6, 0.8])]
"""A turn of two tokens, an observation, another turn; the outcome adds 1 to the last one."""


def test_gae_by_hand():
    s = judged(ONE, gamma=0.5, lam=0.5)
    # deltas: .5 * .4 - .2 = 0, .5 * .6 - .4 = -.1, 1 - .6 = .4; summed with .25: .4; -.1 + .1 = 0; 0 + 0 = 0
    found = gae(s, normalize=False)
    assert lists(found.advantages) == [pytest.approx([0.0, 0.0, 0.4], abs=1e-12)]
    assert lists(found.targets) == [pytest.approx([0.2, 0.4, 1.0])]
    # lambda 1: the return less the value; lambda 0: one step
    assert lists(gae(replace(s, gamma=1.0, lam=1.0), False).advantages) == [pytest.approx([0.8, 0.6, 0.4])]
    assert lists(gae(replace(s, gamma=1.0, lam=0.0), False).advantages) == [pytest.approx([0.2, 0.2, 0.4])]


def test_observations_are_no_decisions():
    found = gae(judged(EPISODE, gamma=1.0, lam=0.5), normalize=False)
    # deltas on the trained tokens: .4 - .2 = .2, .5 + .6 - .4 = .7, .8 - .6 = .2, 1.5 - .8 = .7
    a = [0.2 + 0.5 * (0.7 + 0.5 * 0.55), 0.7 + 0.5 * 0.55, 0.2 + 0.5 * 0.7, 0.7]
    assert lists(found.advantages) == [pytest.approx([a[0], a[1], 0, 0, a[2], a[3]])]
    wanted = [a[0] + 0.2, a[1] + 0.4, NAN, NAN, a[2] + 0.6, a[3] + 0.8]
    assert lists(found.targets) == [pytest.approx(wanted, nan_ok=True)]


def test_turn_gae_by_hand():
    found = turn_gae(judged(EPISODE, gamma=0.9, lam=0.5), normalize=False)
    # V = .2 and .6 before the turns, rewards .5 and 1.5
    last = 1.5 - 0.6
    first = 0.5 + 0.9 * 0.6 - 0.2 + 0.45 * last
    assert lists(found.advantages) == [pytest.approx([first, first, 0, 0, last, last])]
    assert lists(found.targets) == [pytest.approx([first + 0.2, NAN, NAN, NAN, 1.5, NAN], nan_ok=True)]


def test_bilevel_gae_by_hand():
    found = bilevel_gae(judged(EPISODE, gamma=0.9, lam=0.5), token_gamma=0.8, token_lam=0.5, normalize=False)
    # turns by the values .4 and .8 of their last tokens
    last = 1.5 - 0.8
    first = 0.5 + 0.9 * 0.8 - 0.4 + 0.45 * last
    # tokens: .8 V' - V + .4 A'
    a, b = 0.8 * 0.4 - 0.2 + 0.4 * first, 0.8 * 0.8 - 0.6 + 0.4 * last
    assert lists(found.advantages) == [pytest.approx([a, first, 0, 0, b, last])]
    assert lists(found.targets) == [pytest.approx([a + 0.2, first + 0.4, NAN, NAN, b + 0.6, 1.5], nan_ok=True)]


def test_macro_gae_by_hand():
    found = macro_gae(judged(ONE, gamma=0.5, lam=0.5), tokens=2, normalize=False)
    # V = .3 of the first two and .6 of the last token, rewards 0 and 1
    assert lists(found.advantages) == [pytest.approx([0.25 * 0.4, 0.25 * 0.4, 0.4], abs=1e-12)]
    assert lists(found.targets) == [pytest.approx([0.4, 0.4, 1.0])]
    # a macro action ends with its turn: V = .3 and .7, rewards .5 and 1.5
    found = macro_gae(judged(EPISODE, gamma=0.9, lam=0.5), tokens=3, normalize=False)
    last = 1.5 - 0.7
    first = 0.5 + 0.9 * 0.7 - 0.3 + 0.45 * last
    assert lists(found.advantages) == [pytest.approx([first, first, 0, 0, last, last])]
    assert lists(found.targets) == [pytest.approx([first + 0.3] * 2 + [NAN, NAN, 1.5, 1.5], nan_ok=True)]


def test_the_kl_is_taken_off_each_token():
    s = judged(EPISODE, kl=[np.array([1.0, 2.0, 9.0, 9.0, 3.0, 4.0])], kl_coef=0.1)
    assert lists(gae(s, False).targets) == [pytest.approx([2 - 1.0, 2 - 0.9, NAN, NAN, 1.5 - 0.7, 1.5 - 0.4],
                                                          nan_ok=True)]
    assert lists(turn_gae(s, False).targets) == [pytest.approx([2 - 1.0, NAN, NAN, NAN, 1.5 - 0.7, NAN], nan_ok=True)]
    assert lists(bilevel_gae(s, normalize=False).targets) == [
        pytest.approx([2 - 0.3, 2 - 0.2, NAN, NAN, 1.5 - 0.7, 1.5 - 0.4], nan_ok=True)]
    assert lists(macro_gae(s, tokens=2, normalize=False).targets) == [
        pytest.approx([2 - 1.0, 2 - 1.0, NAN, NAN, 1.5 - 0.7, 1.5 - 0.7], nan_ok=True)]


@pytest.mark.parametrize("rule", [gae, turn_gae, bilevel_gae, macro_gae])
def test_what_has_no_decision_or_no_reward_teaches_nothing(rule):
    s = judged([*EPISODE, (None, *EPISODE[0][1:]), (1.0, [0, 0, 0], [(0, 3, 0.0)], [1.0, 2.0, 3.0]), *ONE])
    found, alone = rule(s), rule(judged([*EPISODE, *ONE]))
    assert all(not a.any() and t.isnan().all() for a, t in zip(found.advantages[1:3], found.targets[1:3], strict=True))
    kept = [found.advantages[0], found.advantages[3]]
    assert lists(kept) == lists(alone.advantages)  # in no mean and no deviation either


def test_a_turn_without_a_trained_token_is_paid_with_the_one_before():
    whole = judged([(3.0, [0, 1, 0, 0, 1], [(0, 1, 0.5), (1, 2, 0.5), (3, 4, 1.0), (4, 5, 1.0)], [0.0] * 5)])
    assert lists(gae(whole, False).targets) == [pytest.approx([NAN, 3.0, NAN, NAN, 1.0], nan_ok=True)]
    assert lists(turn_gae(whole, False).targets) == [pytest.approx([NAN, 3.0, NAN, NAN, 1.0], nan_ok=True)]


# --- an independent implementation ------------------------------------------------------------------------------------


def drawn(seed):
    """1 to 5 episodes of 1 to 5 turns of 1 to 4 tokens, some not trained, observations between."""
    draw, out = random.Random(seed), []
    for _ in range(draw.randint(1, 5)):
        mask, turns = [], []
        for _ in range(draw.randint(1, 5)):
            start = len(mask)
            own = [draw.random() < 0.8 for _ in range(draw.randint(1, 4))]
            own[draw.randrange(len(own))] = True
            mask += own
            turns.append((start, len(mask), draw.choice([0.0, 0.0, 0.3, -0.2])))
            mask += [False] * draw.randint(0, 2)
        reward = None if draw.random() < 0.1 else draw.choice([0.0, 0.5, 1.0])
        out.append((reward, mask, turns, [draw.gauss(0, 1) for _ in mask]))
    return out


def summed(rewards, values, gamma, lam):
    """Advantages as the sums that define them."""
    n = len(rewards)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def written_again(rollout, rule, gamma, lam, inner, kl, coef, size):
    """Advantage and target by token of one episode."""
    reward, mask, turns, values = rollout
    advantages, targets = {}, {}
    if reward is None:
        return advantages, targets
    paid = [r for *_, r in turns]
    paid[-1] += reward - sum(paid)
    tokens = [[t for t in range(start, end) if mask[t]] for start, end, _ in turns]
    cost = {t: coef * kl[t] for own in tokens for t in own}
    if rule == "gae":
        line = [t for own in tokens for t in own]
        last = {own[-1]: p for own, p in zip(tokens, paid, strict=True)}
        found = summed([last.get(t, 0.0) - cost[t] for t in line], [values[t] for t in line], gamma, lam)
        for t, a in zip(line, found, strict=True):
            advantages[t], targets[t] = a, a + values[t]
    elif rule == "turn_gae":
        worth = [values[own[0]] for own in tokens]
        found = summed([p - sum(cost[t] for t in own) for p, own in zip(paid, tokens, strict=True)], worth, gamma, lam)
        for own, a, v in zip(tokens, found, worth, strict=True):
            advantages |= dict.fromkeys(own, a)
            targets[own[0]] = a + v
    elif rule == "macro_gae":
        parts = [(own[i:i + size], p if i + size >= len(own) else 0.0) for own, p in zip(tokens, paid, strict=True)
                 for i in range(0, len(own), size)]
        worth = [statistics.fmean(values[t] for t in own) for own, _ in parts]
        found = summed([p - sum(cost[t] for t in own) for own, p in parts], worth, gamma, lam)
        for (own, _), a, v in zip(parts, found, worth, strict=True):
            advantages |= dict.fromkeys(own, a)
            targets |= dict.fromkeys(own, a + v)
    else:
        by_turn = summed(paid, [values[own[-1]] for own in tokens], gamma, lam)
        for own, a in zip(tokens, by_turn, strict=True):
            later = None
            for t in reversed(own):
                if later is None:
                    advantages[t] = a - cost[t]
                else:
                    advantages[t] = -cost[t] + inner[0] * values[later] - values[t] + (
                        inner[0] * inner[1] * advantages[later])
                later, targets[t] = t, advantages[t] + values[t]
    return advantages, targets


@pytest.mark.parametrize("seed", range(200))
def test_as_written_down_again(seed):
    rollouts, draw = drawn(seed), random.Random(seed)
    gamma, lam, inner = draw.choice([1.0, 0.9]), draw.choice([0.0, 0.5, 1.0]), (draw.choice([1.0, 0.7]), draw.random())
    kl = [np.array([draw.gauss(0, 1) for _ in mask]) for _, mask, *_ in rollouts]
    s = judged(rollouts, gamma=gamma, lam=lam, kl=kl, kl_coef=0.1)
    size = draw.randint(1, 4)
    found = {"gae": gae(s), "turn_gae": turn_gae(s), "bilevel_gae": bilevel_gae(s, *inner),
             "macro_gae": macro_gae(s, size)}
    one, plain = macro_gae(s, 1), found["gae"]  # a macro action of one token is a token
    assert lists(one.advantages) == lists(plain.advantages)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one.targets, plain.targets, strict=True))
    for rule, mine in found.items():
        wanted = [written_again(r, rule, gamma, lam, inner, k, 0.1, size) for r, k in zip(rollouts, kl, strict=True)]
        everything = [a for advantages, _ in wanted for a in advantages.values()]
        mean = statistics.fmean(everything) if everything else 0.0
        scale = (statistics.variance(everything) + 1e-8) ** 0.5 if len(everything) > 1 else 1.0
        equal = len({*everything}) < 2
        for (advantages, targets), a, t in zip(wanted, mine.advantages, mine.targets, strict=True):
            white = [0.0 if equal or i not in advantages else (advantages[i] - mean) / scale for i in range(len(a))]
            assert a.tolist() == pytest.approx(white, abs=1e-6)
            assert t.tolist() == pytest.approx([targets.get(i, NAN) for i in range(len(t))], abs=1e-6, nan_ok=True)


# --- the loss of the critic -------------------------------------------------------------------------------------------


def learning(values, old, targets, mask=None, **more):
    return judged_step(flat([0.0] * len(values), mask=mask, **more), old, targets)


def judged_step(x, old, targets):
    """The tokens with the critic's values before the update, and its targets."""
    kept = {k: torch.as_tensor(v, dtype=torch.float64) for k, v in (("values", old), ("targets", targets))}
    return replace(x, per_token=kept, known={"targets": float(((x.mask > 0) & ~kept["targets"].isnan()).sum())})


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 2.0, 3.0, 9.0], dtype=torch.float64, requires_grad=True)
    x = learning(values, [1.0, 1.0, 3.5, 0.0], [0.0, 5.0, 3.0, NAN], weights=[1.0, 0.5, 1.0, 1.0])
    loss, metrics = value_loss(x, values)
    assert float(loss.detach()) == pytest.approx((1 + 0.5 * 9 + 0) / 6)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([1 / 3, 0.5 * -3 / 3, 0, 0])
    assert float(metrics["critic/loss"]) == pytest.approx(float(loss.detach()) * 4)  # 4 trained tokens, 3 with a target
    # a clip of .2: 2.0 counts as 1.2 and is farther from 5, so it has no gradient; 3.0 counts as 3.3
    values.grad = None
    loss, metrics = value_loss(x, values, 0.2)
    assert float(loss.detach()) == pytest.approx((1 + 0.5 * 3.8 ** 2 + 0.3 ** 2) / 6)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([1 / 3, 0, 0, 0])
    assert float(metrics["critic/clip_frac"]) == pytest.approx(2 * 4 / 3)


def test_untrained_tokens_teach_the_critic_nothing():
    values = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss, _ = value_loss(learning(values, [0.0, 0.0], [0.0, 0.0], mask=[1, 0]), values, 0.2)
    loss.backward()
    assert float(loss.detach()) == 0.5 and values.grad.tolist() == [1, 0]
    loss, _ = value_loss(learning(values, [0.0, 0.0], [NAN, NAN]), values)
    assert float(loss.detach()) == 0


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo, says", [
    *(({"advantage": name}, f"algo.advantage='{name}' needs.*algo.critic=null.*algo.critic={{}}.*algo.advantage=grpo")
      for name in ("gae", "turn_gae", "bilevel_gae", "macro_gae")),
    ({"critic": {}}, "algo.critic is set, but algo.advantage='grpo' does not use its values.*algo.critic=null"),
    ({"critic": {}, "advantage": "gigpo"}, "algo.advantage='gigpo' does not use its values: set algo.advantage=gae"),
    ({"critic": {"lr": 0}, "advantage": "gae"}, "algo.critic.lr=0"),
    ({"critic": {"gamma": 1.1}, "advantage": "gae"}, "algo.critic.gamma=1.1"),
    ({"critic": {"clip": 0}, "advantage": "gae"}, "algo.critic.clip=0"),
    ({"critic": {"lamda": 1}, "advantage": "gae"}, "algo.critic.lamda.*Did you mean 'lam'"),
    ({"critic": {}, "advantage": {"name": "gae", "gamma": 1}}, "'gae' has no option 'gamma'"),
])
def test_wrong_settings_are_named(algo, says):
    with pytest.raises(ConfigError, match=says):
        Algorithm(validate({"task": "x", "model": {"name": "x"}, "algo": algo}))


def test_the_loss_is_shared_out_as_tokens_are():
    """Micro-batches add up to the whole."""
    from tests.algo.flat import part

    x = random_step(5)
    g = torch.Generator().manual_seed(1)
    old, targets = (torch.randn(len(x.mask), generator=g, dtype=torch.float64) for _ in range(2))
    targets[::3] = NAN
    x = judged_step(x, old, targets)
    values = old + 0.3 * torch.randn(len(x.mask), generator=g, dtype=torch.float64)
    whole, _ = value_loss(x, values, 0.2)
    cuts = [[3, 1], [0, 2, 4, 5, 6, 7, 8, 9, 10], [11]]
    pieces = [value_loss(part(x, c), torch.cat([values[x.rollout_id == r] for r in c]), 0.2)[0] for c in cuts]
    assert float(sum(pieces)) == pytest.approx(float(whole), rel=1e-12)
