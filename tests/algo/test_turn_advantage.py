"""Credit by turn, by plan and execution, by tool call: values by hand, and another implementation on random groups."""

import math
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.algo.flat import flat, gradient, random_step
from tests.algo.made import scores
from tests.tables import each
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import ActionCredit, plan_span
from vlrl.algo.terms import ppo_clip
from vlrl.config import validate
from vlrl.errors import ConfigError
from vlrl.methods.objectives import turn_advantage
from vlrl.methods.objectives.terms import gspo, gspo_turn, ppo_macro
from vlrl.methods.objectives.turn_advantage import gigpo, hierarchical, mobgrpo, thor, turn_return
from vlrl.store.rollout_rows import _turn_advantages
from vlrl.task import Task
from vlrl.training.advantages import Credit, credit
from vlrl.types import Completion, Group, Prompt, Rollout, Sample, Turn


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


def test_gigpo_and_turn_return_by_hand():
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


def test_gigpo_and_turn_return_as_written_down_again():
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


PLANS = {"p": 7, "q": 8}


def planned(groups):
    """Scores of episodes, each (reward, [(reward of the turn, its plan or None), ...]). A turn has four tokens: plan,
    execution, one that is not trained, and one of the environment; without a plan the first is execution too."""
    everyone = [e for g in groups for e in g]
    return scores([[reward for reward, _ in g] for g in groups],
                  tokens=[[i for _, plan in turns for i in (PLANS.get(plan, 0), 1, 2, 3)] for _, turns in everyone],
                  masks=[np.array([True, True, False, False] * len(turns), bool) for _, turns in everyone],
                  turns=[[ActionCredit(4 * t, 4 * t + 3, r, plan=(4 * t, 4 * t + (plan is not None)))
                          for t, (r, plan) in enumerate(turns)] for _, turns in everyone])


def levels(s, found):
    """[episode][turn] (value of the first token, of the second)."""
    assert all(not v[~torch.from_numpy(np.asarray(m))].any() for v, m in zip(found, s.masks, strict=True))
    return [[(float(v[4 * t]), float(v[4 * t + 1])) for t in range(len(own))]
            for own, v in zip(s.turns, found, strict=True)]


# Paid are 0 .5 .5, 0 0 and 1 0.
TRIP = [[(1.0, [(0.0, "p"), (0.5, None), (0.0, "q")]), (0.0, [(0.0, "p"), (0.0, "q")]),
         (1.0, [(1.0, "q"), (0.0, None)])]]


def test_hierarchical_by_hand():
    s = planned(TRIP)
    # Plans, by returns to go: the first .375 0 1, mean 11/24; the second .5 0, mean .25, which stands behind the first.
    # Executions of the first subgoal: .5 * .625, .5 * .25 and 1, mean 23/48; its second turn .5 + .5 * .25 and 0.
    found = levels(s, hierarchical(s, gamma=0.5, normalize=False))
    assert found[0] == [pytest.approx((-2 / 24, -8 / 48)), pytest.approx((0.3125, 0.3125)), pytest.approx((0.25, 0.25))]
    assert found[1] == [pytest.approx((-11 / 24, -17 / 48)), pytest.approx((-0.25, -0.25))]
    assert found[2] == [pytest.approx((13 / 24, 25 / 48)), pytest.approx((-0.3125, -0.3125))]
    # Against turns under the same plan: .3125 and .125 under p, none beside the third episode's
    found = levels(s, hierarchical(s, gamma=0.5, same_plan=True, normalize=False))
    assert found[0] == [pytest.approx((-2 / 24, 0.09375)), (0.0, 0.0), pytest.approx((0.25, 0.25))]
    assert found[1] == [pytest.approx((-11 / 24, -0.09375)), pytest.approx((-0.25, -0.25))]
    assert found[2] == [pytest.approx((13 / 24, 0.0)), (0.0, 0.0)]


def test_without_what_they_read_they_are_turn_return_and_say_so(caplog):
    turn_advantage._warned.clear()
    s = planned([[(1.0, [(0.0, None), (0.5, None)]), (0.0, [(0.2, None), (0.0, None)])]])
    assert by_turn(s, hierarchical(s)) == by_turn(s, turn_return(s))
    assert "no action has a <plan>" in caplog.text
    turn_advantage._warned.clear()
    s = called([[(1.0, [True]), (0.0, [False])]])
    assert by_turn(s, thor(s)) == by_turn(s, thor(s, "ran", weight=0.0))
    assert "no turn has the reward part 'tool_success'" in caplog.text


def called(groups):
    """Scores of episodes, each (reward, [whether the turn's call succeeded, or None without a call, ...])."""
    everyone = [e for g in groups for e in g]
    return scores([[reward for reward, _ in g] for g in groups],
                  masks=[np.array([True, True, False, False] * len(turns), bool) for _, turns in everyone],
                  turns=[[ActionCredit(4 * t, 4 * t + 3, parts={"other": 1.0} if ok is None else {"ran": float(ok)})
                          for t, ok in enumerate(turns)] for _, turns in everyone])


def marked(seed, *marks):
    """Ragged groups: 1 to 5 episodes of 1 to 6 turns, some unscorable."""
    draw = random.Random(seed)
    return [[(None if draw.random() < 0.1 else draw.choice([0.0, 0.5, 1.0]),
              [(draw.choice([0.0, 0.0, 0.3, -0.2]), draw.choice(marks)) for _ in range(draw.randint(1, 6))])
             for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(1, 3))]


def subgoals(turns):
    """[(first turn, turn behind the last)] of each subgoal; the first is what comes before any plan, maybe none."""
    starts = [t for t, (_, plan) in enumerate(turns) if plan is not None]
    return [*zip([0, *starts], [*starts, len(turns)], strict=True)]


def test_hierarchical_as_written_down_again():
    for seed in range(60):
        gamma, same, groups = random.Random(seed).choice([1.0, 0.9, 0.5]), bool(seed % 2), marked(seed, "p", "q", None)
        s = planned(groups)
        for mine, other in zip(levels(s, hierarchical(s, gamma, same)), by_subgoals(groups, gamma, same), strict=True):
            assert np.array(mine) == pytest.approx(np.array(other), abs=1e-6), seed


def by_subgoals(groups, gamma, same):
    wanted = []
    for group in groups:
        known = [(turns, returns(reward, turns, gamma), returns(reward, turns, 0.0))
                 for reward, turns in group if reward is not None]
        heads = {k: [to_go[subgoals(turns)[k][0]] for turns, to_go, _ in known if len(subgoals(turns)) > k]
                 for k in range(1, 8)}

        def inside(turns, paid, k, t, heads=heads):
            _, end = subgoals(turns)[k]
            total = sum(gamma ** (u - t) * paid[u] for u in range(t, end))
            return total + (gamma ** (end - t) * statistics.fmean(heads[k + 1]) if end < len(turns) else 0.0)

        for reward, turns in group:
            if reward is None:
                wanted.append([(0.0, 0.0)] * len(turns))
                continue
            to_go, paid, own = returns(reward, turns, gamma), returns(reward, turns, 0.0), []
            for k, (start, end) in enumerate(subgoals(turns)):
                for t in range(start, end):
                    others = [inside(other, money, k, subgoals(other)[k][0] + t - start) for other, _, money in known
                              if len(subgoals(other)) > k and t - start < subgoals(other)[k][1] - subgoals(other)[k][0]
                              and (not same or k == 0 or other[subgoals(other)[k][0]][1] == turns[start][1])]
                    act = against(inside(turns, paid, k, t), others, 1e-4)
                    own.append((against(to_go[t], heads[k], 1e-4) if turns[t][1] else act, act))
            wanted.append(own)
    return wanted


def test_thor_as_written_down_again():
    for seed in range(60):
        groups = [[(reward, [ok for _, ok in turns]) for reward, turns in g] for g in marked(seed, True, False, None)]
        s, wanted = called(groups), []
        for group in groups:
            rewards = [reward for reward, _ in group if reward is not None]
            calls = [float(ok) for reward, turns in group if reward is not None for ok in turns if ok is not None]
            for reward, turns in group:
                wanted.append([0.0 if reward is None else against(reward, rewards, 1e-4) + (
                    0.0 if ok is None else 0.5 * against(float(ok), calls, 1e-4)) for ok in turns])
        for mine, other in zip(by_turn(s, thor(s, "ran", weight=0.5)), wanted, strict=True):
            assert mine == pytest.approx(other, abs=1e-6), seed


@each("pieces place", [
    (["<plan>", "go", "</plan>", "x"], (0, 3)), (["a <", "pl", "an>go</pl", "an> x", "y"], (0, 4)),
    (["a", "<plan>x</plan>", "<plan>y</plan>"], (1, 2)), (["", "<plan>", "", "x</plan>", ""], (1, 4)),
    (["<plan>", "go"], (0, 0)), (["</plan>", "<plan>"], (0, 0)), (["</plan><plan>", "x</plan>"], (0, 2)), ([], (0, 0))])
def test_the_tokens_of_a_plan(pieces, place):
    assert plan_span(pieces) == place


class Errand(Task):
    rewards = {"accuracy": 1.0, "step": 0.5, "ran": 0.0}


def group(task, episodes, name="g", text="go"):
    """A group of episodes, each (accuracy, [step part of each turn]); a turn has a token for each character of a text,
    and an observation of one."""
    rollouts, size = [], len(text)
    for i, (accuracy, steps) in enumerate(episodes):
        turns = []
        for t, step in enumerate(steps):
            at = (size + 1) * t
            turns += [Turn(start=at, end=at + size, text=text, parts={"step": step, "ran": float(step > 0)}),
                      Turn(start=at + size, end=at + size + 1, role="observation")]
        mask = np.array(([True] * size + [False]) * len(steps), bool)
        tokens = np.array([ord(c) for c in text + "."] * len(steps))
        parts = {"accuracy": accuracy, "step": sum(steps), "ran": 0.0}
        rollouts.append(Rollout(
            group_id=name, index=i, policy_step=0, parts=parts, reward=task.combine(parts, task.weights_at(0)),
            completion=Completion(tokens=tokens, logprobs=np.zeros(len(mask), np.float32), loss_mask=mask, text=text,
                                  finish_reason="stop", turns=tuple(turns), episode_id=f"{name}-{i}")))
    empty = np.zeros(0, np.int64)
    prompt = Prompt(sample_id="s", text="", ids=empty, raw_ids=empty, positions=np.zeros((1, 0), np.int64))
    return Group(id=name, task="errand", split="train", sample=Sample(id="s"), prompt=prompt, rollouts=tuple(rollouts),
                 weights=task.weights_at(0))


def shown(groups):
    """The column turn_advantages of every rollout."""
    return [_turn_advantages(r) for g in groups for r in g.rollouts]


def plain(s):
    return turn_return(s, normalize=False)


def test_turns_behind_a_shut_gate_are_paid_nothing_and_anchors():
    task = Errand(combine="gate:accuracy>=0.5")
    made = group(task, [(1.0, [1.0, 0.0]), (0.25, [1.0, 1.0])])
    assert made.rewards == [1.5, 0.25]
    # paid .5 1 and 0 .25: the first turns to go 1.5 and .25, the second 1 and .25
    assert shown(credit([made], plain, task)) == [pytest.approx([0.625, 0.375]), pytest.approx([-0.625, -0.375])]
    # without it both turns would be paid .5, which the last one gives back: .25 and -.25 to go
    assert shown(credit([made], plain)) == [pytest.approx([0.625, 0.625]), pytest.approx([-0.625, -0.625])]
    made, seen = group(Errand(), [(1.0, [1.0, 0.0, 1.0])]), []
    (only,), states = made.rollouts, iter(["hall", None, "kitchen"])
    turns = tuple(replace(t, state=next(states)) if t.role == "assistant" else t for t in only.completion.turns)
    acted = replace(made, rollouts=(replace(only, completion=replace(only.completion, turns=turns)),))
    credit([acted], lambda s: seen.extend(s.turns) or plain(s))
    assert [[a.anchor for a in own] for own in seen] == [["", "=hall", None]]


def of_settings(**advantage):
    return validate({"task": "x", "model": {"name": "x"}, "algo": {"advantage": advantage}})


def test_plans_are_read_by_the_policys_tokenizer_and_stored():
    """The column of a run's file has the mean over plan and execution of each turn."""
    task, config = Errand(), of_settings(name="hierarchical", normalize=False)
    tokenizer = SimpleNamespace(batch_decode=lambda ids: ["".join(map(chr, each)) for each in ids])
    policy = SimpleNamespace(processor=SimpleNamespace(tokenizer=tokenizer))
    text = "<plan>x</plan>abcdefghijklmn"  # half of it plan
    made = group(task, [(1.0, [1.0, 1.0]), (0.0, [0.0, 0.0])], text=text)
    (done,) = Credit(Algorithm(config), config, policy, task)([made], 0)
    first = done.rollouts[0].advantage
    # plans to go 2 1.5 and 0 0; executions: .5 and 0 with the mean .75 behind both first turns, 1.5 and 0 in the second
    assert first[[0, 13, 14, 27, 28]].tolist() == pytest.approx([1.0, 1.0, 0.25, 0.25, 0.0])
    assert shown([done]) == [pytest.approx([0.625, 0.75]), pytest.approx([-0.625, -0.75])]


def test_thor_reads_the_parts_of_turns_and_is_stored():
    task, config = Errand(), of_settings(name="thor", part="ran")
    (done,) = Credit(Algorithm(config), config, task=task)([group(task, [(1.0, [1.0, 0.0]), (0.0, [0.0])])], 0)
    assert done.rewards == [1.5, 0.0]
    up, ran, not_ran = (x / (statistics.stdev(of) + 1e-4) for x, of in (
        (0.75, [1.5, 0.0]), (2 / 3, [1.0, 0.0, 0.0]), (-1 / 3, [1.0, 0.0, 0.0])))
    assert shown([done]) == [pytest.approx([up + ran, up + not_ran]), pytest.approx([-up + not_ran])]
    with pytest.raises(ConfigError, match=r"algo\.advantage\.part='rann'.*Did you mean 'ran'"):
        wrong = of_settings(name="thor", part="rann")
        Credit(Algorithm(wrong), wrong, task=task)
