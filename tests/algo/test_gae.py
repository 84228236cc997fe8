"""Advantages with a critic: values worked out by hand, and an independent implementation on random ragged groups."""

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.algo.flat import flat, part, random_step
from tests.algo.made import scores
from tests.tables import each
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


EPISODE = [(2.0, [1, 1, 0, 0, 1, 1], [(0, 2, 0.5), (4, 6, 0.5)], [0.2, 0.4, 9.0, 9.0, 0.6, 0.8])]
"""A turn of two tokens, an observation, another turn; the outcome adds 1 to the last one."""


# gae: deltas on the trained tokens .4 - .2 = .2, .5 + .6 - .4 = .7, .8 - .6 = .2, 1.5 - .8 = .7
OF_TOKENS = [0.2 + 0.5 * (0.7 + 0.5 * 0.55), 0.7 + 0.5 * 0.55, 0.2 + 0.5 * 0.7, 0.7]
# turn_gae: V = .2 and .6 before the turns, bilevel_gae: .4 and .8 of their last tokens, macro_gae: their means
BY_START, BY_END, BY_MEAN = (0.5 + 0.9 * b - a + 0.45 * (1.5 - b) for a, b in ((0.2, 0.6), (0.4, 0.8), (0.3, 0.7)))
# bilevel_gae: tokens .8 V' - V + .4 A'
INNER = [0.8 * 0.4 - 0.2 + 0.4 * BY_END, 0.8 * 0.8 - 0.6 + 0.4 * 0.7]


@each("rule options gamma advantages targets", [
    (gae, {}, 1.0, OF_TOKENS, [a + v for a, v in zip(OF_TOKENS, [0.2, 0.4, 0.6, 0.8], strict=True)]),
    (turn_gae, {}, 0.9, [BY_START] * 2 + [0.9] * 2, [BY_START + 0.2, NAN, 1.5, NAN]),
    (bilevel_gae, {"token_gamma": 0.8, "token_lam": 0.5}, 0.9, [INNER[0], BY_END, INNER[1], 0.7],
     [INNER[0] + 0.2, BY_END + 0.4, INNER[1] + 0.6, 1.5]),
    (macro_gae, {"tokens": 3}, 0.9, [BY_MEAN] * 2 + [0.8] * 2, [BY_MEAN + 0.3] * 2 + [1.5] * 2)])
def test_by_hand(rule, options, gamma, advantages, targets):
    found = rule(judged(EPISODE, gamma=gamma, lam=0.5), normalize=False, **options)
    assert lists(found.advantages) == [pytest.approx([*advantages[:2], 0, 0, *advantages[2:]])]
    assert lists(found.targets) == [pytest.approx([*targets[:2], NAN, NAN, *targets[2:]], nan_ok=True)]


def test_what_has_no_decision_or_no_reward_teaches_nothing():
    one = (1.0, [1, 1, 1], [(0, 3, 0.0)], [0.2, 0.4, 0.6])
    s = judged([*EPISODE, (None, *EPISODE[0][1:]), (1.0, [0, 0, 0], [(0, 3, 0.0)], [1.0, 2.0, 3.0]), one])
    for rule in (gae, turn_gae, bilevel_gae, macro_gae):
        found, alone = rule(s), rule(judged([*EPISODE, one]))
        assert not any(a.any() for a in found.advantages[1:3]) and all(t.isnan().all() for t in found.targets[1:3])
        assert lists(found.advantages[::3]) == lists(alone.advantages)  # in no mean and no deviation either
    whole = judged([(3.0, [0, 1, 0, 0, 1], [(0, 1, 0.5), (1, 2, 0.5), (3, 4, 1.0), (4, 5, 1.0)], [0.0] * 5)])
    for rule in (gae, turn_gae):
        assert lists(rule(whole, False).targets) == [pytest.approx([NAN, 3.0, NAN, NAN, 1.0], nan_ok=True)]


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
        for own, a in zip(tokens, summed(paid, [values[own[-1]] for own in tokens], gamma, lam), strict=True):
            later = None
            for t in reversed(own):
                if later is None:
                    advantages[t] = a - cost[t]
                else:
                    advantages[t] = -cost[t] + inner[0] * values[later] - values[t] + (
                        inner[0] * inner[1] * advantages[later])
                later, targets[t] = t, advantages[t] + values[t]
    return advantages, targets


def test_as_written_down_again():
    for seed in range(40):
        compare_with_the_sums(drawn(seed), random.Random(seed))


def compare_with_the_sums(rollouts, draw):
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
    values = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss, _ = value_loss(learning(values, [0.0, 0.0], [0.0, 0.0], mask=[1, 0]), values, 0.2)
    loss.backward()
    assert float(loss.detach()) == 0.5 and values.grad.tolist() == [1, 0]
    loss, _ = value_loss(learning(values, [0.0, 0.0], [NAN, NAN]), values)
    assert float(loss.detach()) == 0


@each("algo says", [
    *(({"advantage": name}, f"algo.advantage='{name}' needs.*algo.critic=null.*algo.critic={{}}.*algo.advantage=grpo")
      for name in ("gae", "turn_gae", "bilevel_gae", "macro_gae")),
    ({"critic": {}}, "algo.critic is set, but .*='grpo' does not use the critic's values.*algo.critic=null"),
    ({"critic": {}, "advantage": "gigpo"}, "algo.advantage='gigpo' does not use the critic's values: set .*=gae"),
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
