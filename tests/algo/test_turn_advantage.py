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


def test_gigpo_by_hand():
    s = episodes(FORK)
    # A_E: 1, 0, .5 -> .5, -.5, 0. Returns: start .5 * 1, 0, .5 -> mean 1/3; b: 1 and 0 -> mean .5; c: met once
    found = by_turn(s, gigpo(s, weight=2.0, gamma=0.5, normalize=False))
    assert found == [pytest.approx([0.5 + 2 / 6, 0.5 + 1.0]), pytest.approx([-0.5 - 2 / 3, -0.5]),
                     pytest.approx([2 / 6, -1.0])]
    # std of the episodes .5; of the start sqrt((1/36 + 4/36 + 1/36) / 2) = sqrt(1/12); of b sqrt(.5)
    start, b = 1 / 6 / (math.sqrt(1 / 12) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)
    found = by_turn(s, gigpo(s, gamma=0.5))
    assert found == [pytest.approx([0.5 / (0.5 + 1e-6) + start, 0.5 / (0.5 + 1e-6) + b], abs=1e-9),
                     pytest.approx([-0.5 / (0.5 + 1e-6) - 2 * start, -0.5 / (0.5 + 1e-6)], abs=1e-9),
                     pytest.approx([start, -b], abs=1e-9)]


def test_turn_return_by_hand():
    s = episodes(FORK)
    assert by_turn(s, turn_return(s, normalize=False)) == [  # turn 0: 1, 0, .5; turn 1: 1, 0, 0
        pytest.approx([0.5, 2 / 3]), pytest.approx([-0.5, -1 / 3]), pytest.approx([0.0, -1 / 3])]
    z = 1 / 3 / (math.sqrt(1 / 3) + 1e-4)
    assert by_turn(s, turn_return(s)) == [
        pytest.approx([0.5 / (0.5 + 1e-4), 2 * z]), pytest.approx([-0.5 / (0.5 + 1e-4), -z]), pytest.approx([0, -z])]


def test_mobgrpo_by_hand():
    turns = [(0.0, ""), (0.0, None)]
    s = episodes([[(1.0, turns), (1.0, turns * 2), (0.0, turns), (0.0, turns)]],
                 outcome=torch.tensor([True, True, False, False]), truncated=torch.tensor([False, True, False, True]))
    paid = [1.0, 0.81, -0.5, 0.0]  # two turns more than the best; gave up; met the limit
    mean, std = statistics.mean(paid), statistics.stdev(paid)
    assert mobgrpo(s).tolist() == pytest.approx([(p - mean) / (std + 1e-4) for p in paid])
    none = episodes([[(0.0, turns), (0.0, turns)]], outcome=torch.tensor([False, False]))
    assert mobgrpo(none).tolist() == [0, 0]


def test_an_unscorable_episode_is_in_no_statistic():
    s = episodes([[*FORK[0], (None, [(9.0, ""), (9.0, "=b")])]], outcome=torch.tensor([True, False, False, True]))
    whole = episodes(FORK, outcome=torch.tensor([True, False, False]))
    for rule in (gigpo, turn_return):
        assert by_turn(s, rule(s)) == [*by_turn(whole, rule(whole)), [0, 0]]
    assert mobgrpo(s).tolist() == [*mobgrpo(whole).tolist(), 0]


def test_without_states_gigpo_says_so_and_gives_turns_their_episode(caplog):
    turn_advantage._warned.clear()
    s = episodes([[(1.0, [(0.0, ""), (1.0, None)]), (0.0, [(0.0, ""), (0.0, None)])]])
    found = by_turn(s, gigpo(s, normalize=False, gamma=1.0))
    assert found == [[1.0, 0.5], [-1.0, -0.5]]
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


@pytest.mark.parametrize("seed", range(200))
def test_as_written_down_again(seed):
    groups, gamma = drawn(seed), random.Random(seed).choice([1.0, 0.9, 0.5])
    s = episodes(groups)
    episode, step, to_go = [], [], []
    for group in groups:
        known = [(reward, turns, returns(reward, turns, gamma)) for reward, turns in group if reward is not None]
        for reward, turns in group:
            own = [] if reward is None else returns(reward, turns, gamma)
            episode.append([against(reward, [r for r, _, _ in known], 1e-6) for _ in own] or [0.0] * len(turns))
            step.append([0.0 if state is None else against(g, [
                other[k] for _, listed, other in known for k in range(len(listed)) if listed[k][1] == state], 1e-6)
                for g, (_, state) in zip(own, turns, strict=False)] or [0.0] * len(turns))
            to_go.append([against(g, [other[t] for _, _, other in known if t < len(other)], 1e-4)
                          for t, g in enumerate(own)] or [0.0] * len(turns))
    sums = [[e + 0.5 * x for e, x in zip(*pair, strict=True)] for pair in zip(episode, step, strict=True)]
    for found, wanted in ((gigpo(s, weight=0.5, gamma=gamma), sums), (turn_return(s, gamma), to_go)):
        for mine, other in zip(by_turn(s, found), wanted, strict=True):
            assert mine == pytest.approx(other, abs=1e-6)


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
    small, _ = gspo_turn(flat([5e-4, -4e-4], [0.0, 0.0], adv=[1.0, -1.0], rollout=[0, 1],
                              turns=torch.tensor([0, 0])))
    assert small.tolist() == pytest.approx([-1.0004, 0.9997], abs=1e-7)


def test_on_plain_answers_it_is_gspo():
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


@pytest.mark.parametrize("seed", range(5))
def test_macro_actions_of_one_token_are_ppo(seed):
    x = random_step(seed, gap=0.5)
    one, plain = ppo_macro(x, tokens=1), ppo_clip(x)
    kept = x.mask > 0
    assert one[0][kept].tolist() == plain[0][kept].tolist() and gradient(one[0], x) == gradient(plain[0], x)
    assert one[1]["clipped"][kept].tolist() == plain[1]["clipped"][kept].tolist()
    assert ppo_macro(x, tokens=2)[0][kept].tolist() != plain[0][kept].tolist()
