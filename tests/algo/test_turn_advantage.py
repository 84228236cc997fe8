"""Credit by turn: values worked out by hand, and an independent implementation of each rule on random ragged groups."""

import math
import random
import statistics

import numpy as np
import pytest
import torch

from tests.algo.flat import flat, gradient, random_step
from tests.algo.made import scores
from vlrl.algo.inputs import ActionCredit
from vlrl.algo.terms import ppo_clip
from vlrl.methods.objectives import turn_advantage
from vlrl.methods.objectives.terms import gspo, gspo_turn, ppo_macro
from vlrl.methods.objectives.turn_advantage import gigpo, mobgrpo, turn_return


def episodes(groups, **more):
    """Scores of episodes, each (reward, [(reward of the turn, state that it began in), ...]); a turn has three tokens,
    of which two are trained, and two that the environment wrote follow it."""
    flat_ = [e for g in groups for e in g]
    return scores([[reward for reward, _ in g] for g in groups], **more,
                  masks=[np.array(([True] * 2 + [False] * 3) * len(turns), bool) for _, turns in flat_],
                  turns=[[ActionCredit(5 * t, 5 * t + 3, r, state) for t, (r, state) in enumerate(turns)]
                         for _, turns in flat_])


def by_turn(s, found):
    """The value of each turn; what is no action has 0."""
    out = []
    for own, mask, values in zip(s.turns, s.masks, found, strict=True):
        assert len(values) == len(mask) and not values[~torch.from_numpy(mask)].any()
        assert all(values[t.start] == values[t.start + 1] for t in own)
        out.append([float(values[t.start]) for t in own])
    return out


# Two episodes from one start: a, then b or c. Rewards 1 and 0, paid with the last turn.
FORK = [[(1.0, [(0.0, ""), (0.0, "=b")]), (0.0, [(0.0, ""), (0.0, "=c")]), (0.5, [(0.5, ""), (0.0, "=b")])]]


def test_by_hand():
    s = episodes(FORK)
    # A_E: 1, 0, .5 -> .5, -.5, 0. Returns: start .5 * 1, 0, .5 -> mean 1/3; b: 1 and 0 -> mean .5; c: met once
    assert by_turn(s, gigpo(s, weight=2.0, gamma=0.5, normalize=False)) == [
        pytest.approx([0.5 + 2 / 6, 0.5 + 1.0]), pytest.approx([-0.5 - 2 / 3, -0.5]), pytest.approx([2 / 6, -1.0])]
    assert by_turn(s, turn_return(s, normalize=False)) == [  # turn 0: 1, 0, .5; turn 1: 1, 0, 0
        pytest.approx([0.5, 2 / 3]), pytest.approx([-0.5, -1 / 3]), pytest.approx([0.0, -1 / 3])]


def test_mobgrpo_by_hand():
    turns = [(0.0, ""), (0.0, None)]
    s = episodes([[(1.0, turns), (1.0, turns * 2), (0.0, turns), (0.0, turns), (None, turns)]],
                 outcome=torch.tensor([True, True, False, False, True]),
                 truncated=torch.tensor([False, True, False, True, False]))
    paid = [1.0, 0.81, -0.5, 0.0]  # two turns more than the best; gave up; met the limit
    mean, std = statistics.mean(paid), statistics.stdev(paid)
    assert mobgrpo(s).tolist() == pytest.approx([*((p - mean) / (std + 1e-4) for p in paid), 0])
    assert mobgrpo(episodes([[(0.0, turns), (0.0, turns)]], outcome=torch.tensor([False, False]))).tolist() == [0, 0]


def test_without_states_gigpo_says_so_and_gives_turns_their_episode(caplog):
    turn_advantage._warned.clear()
    s = episodes([[(1.0, [(0.0, ""), (1.0, None)]), (0.0, [(0.0, ""), (0.0, None)])]])
    assert by_turn(s, gigpo(s, normalize=False, gamma=1.0)) == [[1.0, 0.5], [-1.0, -0.5]]
    assert "no Step has a state" in caplog.text


def drawn(seed):
    """Ragged groups: 1 to 5 episodes of 1 to 6 turns, few states, some unscorable."""
    draw = random.Random(seed)
    return [[(None if draw.random() < 0.1 else draw.choice([0.0, 0.5, 1.0]),
              [(draw.choice([0.0, 0.0, 0.3, -0.2]), "" if t == 0 else draw.choice(["=a", "=b", None]))
               for t in range(draw.randint(1, 6))]) for _ in range(draw.randint(1, 5))]
            for _ in range(draw.randint(1, 3))]


def returns(reward, turns, gamma):
    paid = [r for r, _ in turns]
    paid[-1] += reward - sum(paid)
    return [sum(gamma ** (k - t) * paid[k] for k in range(t, len(paid))) for t in range(len(paid))]


def against(value, others, eps):
    """(value - mean) / (std + eps) among others, which hold it too."""
    if max(others) == min(others):
        return 0.0
    return (value - statistics.fmean(others)) / (statistics.stdev(others) + eps)


def test_as_written_down_again():
    for seed in range(60):
        groups, gamma = drawn(seed), random.Random(seed).choice([1.0, 0.9, 0.5])
        s, sums, to_go = episodes(groups), [], []
        for group in groups:
            known = [(reward, turns, returns(reward, turns, gamma)) for reward, turns in group if reward is not None]
            states = [(turn[1], g) for _, turns, own in known for turn, g in zip(turns, own, strict=True)]
            for reward, turns in group:
                if reward is None:
                    sums, to_go = [*sums, [0.0] * len(turns)], [*to_go, [0.0] * len(turns)]
                    continue
                own, episode = returns(reward, turns, gamma), against(reward, [r for r, _, _ in known], 1e-6)
                sums.append([episode if state is None else
                             episode + 0.5 * against(g, [other for seen, other in states if seen == state], 1e-6)
                             for g, (_, state) in zip(own, turns, strict=True)])
                to_go.append([against(g, [other[t] for _, _, other in known if t < len(other)], 1e-4)
                              for t, g in enumerate(own)])
        for found, wanted in ((gigpo(s, weight=0.5, gamma=gamma), sums), (turn_return(s, gamma), to_go)):
            for mine, other in zip(by_turn(s, found), wanted, strict=True):
                assert mine == pytest.approx(other, abs=1e-6), seed


def test_one_ratio_a_turn_by_hand():
    logp, old = [0.3, -0.1, 9.0, 0.2, 0.0, -0.4], [0.0] * 6
    x = flat(logp, old, adv=[1.0, 1.0, 1.0, -1.0, -1.0, 2.0], rollout=[0, 0, 0, 0, 0, 1], mask=[1, 1, 0, 1, 1, 1],
             turns=torch.tensor([0, 0, 0, 1, 1, 0]))  # the third token is part of the first action, and not trained
    values, _ = gspo_turn(x, clip_low=0.5, clip_high=0.5)
    ratios = [math.exp(0.1)] * 2 + [math.exp(0.1)] * 2 + [math.exp(-0.4)]
    trained = [0, 1, 3, 4, 5]
    assert values[trained].tolist() == pytest.approx([-a * r for a, r in zip([1, 1, -1, -1, 2], ratios, strict=True)])
    assert gradient(values, x) == pytest.approx(
        [-math.exp(0.1)] * 2 + [0.0] + [math.exp(0.1)] * 2 + [-2 * math.exp(-0.4)])
    clipped, _ = gspo_turn(x, clip_low=0.05, clip_high=0.05)
    assert clipped[trained].tolist() == pytest.approx([-1.05, -1.05, math.exp(0.1), math.exp(0.1), -2 * math.exp(-0.4)])
    small, _ = gspo_turn(flat([5e-4, -4e-4], [0.0, 0.0], adv=[1.0, -1.0], rollout=[0, 1], turns=torch.tensor([0, 0])))
    assert small.tolist() == pytest.approx([-1.0004, 0.9997], abs=1e-7)
    x = flat([0.3, -0.1, 0.2, 0.5], [0.1] * 4, adv=[1.0, 1.0, -1.0, -1.0], rollout=[0, 0, 1, 1],
             turns=torch.tensor([0] * 4))
    assert gspo_turn(x, 0.1, 0.1)[0].tolist() == gspo(x, 0.1, 0.1)[0].tolist()


def test_one_ratio_a_macro_action_by_hand():
    """Two trained tokens each; the second token is not trained, a turn ends after four, an answer after six."""
    logp = [0.3, 9.0, -0.1, 0.2, 0.05, 0.1, -0.4]
    x = flat(logp, [0.0] * 7, adv=[1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 2.0], rollout=[0] * 6 + [1],
             mask=[1, 0, 1, 1, 1, 1, 1], turns=torch.tensor([0, 0, 0, 0, 1, 1, 0]))
    values, _ = ppo_macro(x, tokens=2, clip_low=0.5, clip_high=0.5)
    trained, a, size = [0, 2, 3, 4, 5, 6], [1, 1, 1, -1, -1, 2], [2, 2, 1, 2, 2, 1]
    ratios = [math.exp(p) for p in (0.2, 0.2, 0.2, 0.15, 0.15, -0.4)]
    assert values[trained].tolist() == pytest.approx([-b * r / n for b, r, n in zip(a, ratios, size, strict=True)])
    slope = [-b * r for b, r in zip(a, ratios, strict=True)]
    assert gradient(values, x) == pytest.approx([slope[0], 0.0, *slope[1:]])
    clipped, told = ppo_macro(x, tokens=2, clip_low=0.05, clip_high=0.18)
    assert clipped[trained].tolist() == pytest.approx(
        [-0.59, -0.59, -1.18, ratios[3] / 2, ratios[3] / 2, -2 * ratios[5]])
    assert told["clipped"][trained].tolist() == [True] * 3 + [False] * 3
    far, _ = ppo_macro(flat([15.0, 15.0], [0.0, 0.0], adv=[-1.0, -1.0], turns=torch.tensor([0, 0])), 2)
    assert far.tolist() == pytest.approx([math.exp(20) / 2] * 2)


def test_macro_actions_of_one_token_are_ppo():
    x = random_step(0, gap=0.5)
    one, plain, kept = ppo_macro(x, tokens=1), ppo_clip(x), x.mask > 0
    assert one[0][kept].tolist() == plain[0][kept].tolist() and gradient(one[0], x) == gradient(plain[0], x)
    assert one[1]["clipped"][kept].tolist() == plain[1]["clipped"][kept].tolist()
    assert ppo_macro(x, tokens=2)[0][kept].tolist() != plain[0][kept].tolist()
