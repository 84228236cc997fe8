"""Advantage estimators with a value per turn of an episode: each maps `Scores` to one array [T] per rollout, with 0 on
tokens that are not trained.

A turn is paid its weighted reward parts, or nothing if the condition of task.combine=gate:... is not met. The rest of
the reward (an outcome from `Task.score`, shaping) is paid at the last turn, so the rewards of an episode's turns add up
to the episode's reward. A completion without an environment is an episode of one turn."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from vlrl.algo import grouped
from vlrl.algo.advantage import nan_to_zero
from vlrl.algo.effect import FunctionUse, idle_when, reads
from vlrl.algo.grouped import normalized
from vlrl.algo.inputs import Scores, requires, turn_rewards
from vlrl.config.base import Fraction, NonNegative

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def as_grpo(use: FunctionUse) -> str:
    """Returns the reason why an advantage that differs from grpo only between turns is equal to grpo in this run; "" if
    the two differ. `use` holds the function's options and the config."""
    return use.one_turn and f"{use.one_turn} grpo"


@idle_when(as_grpo)
@requires("local", "turns")
def gigpo(s: Scores, weight: NonNegative = 1.0, gamma: Fraction = 0.95, normalize: bool = True,
          eps: NonNegative = 1e-6) -> list[torch.Tensor]:
    """The advantage A_E + weight * A_S on the tokens of each turn. A_E = R - mean of the group. A_S is the discounted
    return of the turn, sum_{k >= t} gamma^(k - t) r_k, minus the mean return of all turns of the group that began in
    the same state.

    normalize: A_E and A_S are divided by their std + eps, with Bessel's correction. The state in which a turn begins is
    `Step.state` of the previous turn; all first turns of a group begin in the same state. A_S is 0 if the state is
    unknown or occurred only once. GiGPO: Group-in-Group Policy Optimization (arXiv 2505.10978) eq. 3, 7 and 8."""
    episode = normalized(s.rewards, s.group, eps, normalize)
    turns = [(i, t) for i, own in enumerate(s.turns) for t in range(len(own))]
    keys: list[Hashable] = [
        (int(s.group[i]), s.turns[i][t].anchor) if s.turns[i][t].anchor is not None else ("alone", i, t)
        for i, t in turns]
    if any(len(own) > 1 for own in s.turns) and all(a.anchor is None for own in s.turns for a in own[1:]):
        warn_once("algo.advantage=gigpo: no Step has a state, so turns after the first have the advantage of their "
                  "episode alone: return Step(..., state=...) from the environment")
    step = normalized(_flat(_returns(s, gamma)), _numbered(keys), eps, normalize)
    values = nan_to_zero(episode)[_episode_of(s)] + weight * nan_to_zero(step)
    return _on_tokens(s, values)


@idle_when(as_grpo)
@requires("local", "turns")
def turn_return(s: Scores, gamma: Fraction = 1.0, normalize: bool = True,
                eps: NonNegative = 1e-4) -> list[torch.Tensor]:
    """The advantage G_t - mean on the tokens of turn t. G_t = sum_{k >= t} gamma^(k - t) r_k is the return to go, and
    its mean is over the turns with the same index in all episodes of the group. normalize: G_t - mean is divided by
    the standard deviation of these returns + eps, with Bessel's correction.

    A turn that only one episode of the group reached has advantage 0. The step-level advantage of StepPO; with
    algo.loss=gspo_turn the ratio is computed per turn too."""
    keys = [(int(s.group[i]), t) for i, own in enumerate(s.turns) for t in range(len(own))]
    return _on_tokens(s, nan_to_zero(normalized(_flat(_returns(s, gamma)), _numbered(keys), eps, normalize)))


@reads("outcome", alone={})
@requires("local", "turns")
def mobgrpo(s: Scores, decay: Fraction = 0.9, penalty: NonNegative = 0.5,
            eps: NonNegative = 1e-4) -> torch.Tensor:
    """The advantage (R' - mean) / (std + eps) of the group, the same on all turns. For a correct episode, R' =
    decay^(its number of turns - the smallest number of turns of a correct episode in the group). For an episode that
    ended by itself without success R' = -penalty, and for a truncated one R' = 0.

    MobGRPO of MobileGUI-RL (arXiv 2507.05720), which does not publish its coefficients. A group with equal R' has
    advantage 0."""
    right = grouped.correct(s)
    turns = torch.tensor([float(len(own)) for own in s.turns], dtype=torch.float64)
    fewest = grouped.smallest(torch.where(right, turns, torch.nan), s.group)
    truncated = torch.zeros_like(right) if s.truncated is None else s.truncated
    early = torch.where(truncated, 0.0, -torch.full_like(turns, penalty))
    paid = torch.where(right, decay ** torch.where(right, turns - fewest, 0.0), early)
    return nan_to_zero(normalized(torch.where(s.rewards.isnan(), torch.nan, paid), s.group, eps))


def _without_steps(use: FunctionUse) -> str:
    part = use.values["part"]
    if use.one_turn or use.task is None or any(part in one.weights for one in use.task.members):
        return as_grpo(use)
    return f"the rewards of task '{use.task.name}' have no part '{part}', and without it this acts as grpo"


@idle_when(_without_steps)
@requires("local", "turns")
def thor(s: Scores, part: str = "tool_success", weight: NonNegative = 1.0, eps: NonNegative = 1e-4
         ) -> list[torch.Tensor]:
    """The advantage A_E + weight * A_T. A_E = (R - mean) / (std + eps) of the group. On turns that have the reward part
    `part`, A_T = (part - mean) / (std + eps), with mean and std over all such turns of the group, in successful and
    failed episodes. On other turns A_T is 0.

    The default part, `tool_success`, is 1 if the turn's tool calls succeeded, else 0. Tools provide it for a task that
    names it in its rewards. With weight 0 in these rewards, the part affects only A_T. THOR (arXiv 2509.13761):
    episode-level and step-level GRPO. The paper regenerates groups of steps from the point before a failed call; here
    the tool calls of the group's episodes are compared instead."""
    steps = [[turn.parts.get(part, math.nan) if reward == reward else math.nan for turn in own]
             for own, reward in zip(s.turns, s.rewards.tolist(), strict=True)]
    if s.turns and all(part not in turn.parts for own in s.turns for turn in own):
        warn_once(f"algo.advantage=thor: no turn has the reward part {part!r}, so turns have the advantage of their "
                  "episode alone: name it in the rewards of a task with tools, or set algo.advantage.part to another "
                  "part")
    called = nan_to_zero(normalized(_flat(steps), s.group[_episode_of(s)], eps))
    return _on_tokens(s, nan_to_zero(normalized(s.rewards, s.group, eps))[_episode_of(s)] + weight * called)


@idle_when(lambda use: "" if use.values["same_plan"] else as_grpo(use))
@requires("local", "turns", "plans", "tokens")
def hierarchical(s: Scores, gamma: Fraction = 1.0, same_plan: bool = False, normalize: bool = True,
                 eps: NonNegative = 1e-4) -> list[torch.Tensor]:
    """The advantage is computed separately for plans and for all other tokens. Tokens inside <plan> have the advantage
    of their plan, other tokens that of their turn. A turn with a plan begins a subgoal, which lasts until the next
    turn with a plan.

    Plans and subgoals of an episode are numbered. The return of a plan is that of its turn, sum_{k >= t} gamma^(k - t)
    r_k. The advantage of the n-th plan is its return minus the mean return of the n-th plans of the group. The return
    of a turn in subgoal n is summed to the end of the subgoal only; for the rest it has the mean return of the (n+1)-th
    plans. The advantage of a turn is its return minus the mean over the turns at the same position of subgoal n in the
    group.

    same_plan: the mean for a turn is only over turns under a plan with the same tokens. normalize: both advantages are
    divided by the std of the returns compared + eps, with Bessel's correction. The advantage is 0 if there is nothing
    to compare with.

    HiPER's hierarchical advantage estimation (arXiv 2602.16165) at lambda = 1, with group means in place of its two
    critics. same_plan: the macro and micro groups of HiMAC (arXiv 2603.00977)."""
    places = [place for own in _subgoals(s) for place in own]
    group, returns = s.group[_episode_of(s)], _flat(_returns(s, gamma))
    if s.turns and not any(plan for _, _, plan in places):
        warn_once("algo.advantage=hierarchical: no action has a <plan>...</plan>, so the return to go of each turn is "
                  "compared with the same turn of the other episodes: ask for plans in the prompt")
    macro_key = _numbered([(int(g), number) if place == 0 else ("none", i)
                           for i, (g, (number, place, _)) in enumerate(zip(group, places, strict=True))])
    macro = normalized(returns, macro_key, eps, normalize)
    micro_key = _numbered([(int(g), number, place, plan if same_plan else None)
                           for g, (number, place, plan) in zip(group, places, strict=True)])
    inside = _inside(s, places, gamma, grouped.mean(returns, macro_key))
    return _on_tokens(s, nan_to_zero(normalized(inside, micro_key, eps, normalize)), nan_to_zero(macro))


def _subgoals(s: Scores) -> list[list[tuple[int, int, tuple[int, ...]]]]:
    """For each turn of each rollout: (plans so far, turns since the last plan, tokens of the last plan)."""
    out = []
    for own, tokens in zip(s.turns, s.tokens, strict=True):
        number, place, plan, places = 0, -1, (), []
        for turn in own:
            place += 1
            if turn.plan[0] < turn.plan[1]:
                number, place, plan = number + 1, 0, tuple(tokens[slice(*turn.plan)].tolist())
            places.append((number, place, plan))
        out.append(places)
    return out


def _inside(s: Scores, subgoals: Sequence[tuple[int, int, Any]], gamma: float, after: torch.Tensor) -> torch.Tensor:
    """The return of each turn up to the end of its subgoal, plus the discounted entry in `after` of the turn that
    begins the next subgoal. NaN if the episode is unscorable. The result, `subgoals` (the tuples of `_subgoals`) and
    `after` each have one entry per turn, in order over all rollouts."""
    paid, out, i = [turn for own in _paid(s) for turn in own], [], len(subgoals)
    for own in reversed(s.turns):
        later = 0.0
        for _ in own:
            i -= 1
            later = paid[i] + gamma * later
            out.append(later)
            if subgoals[i][1] == 0:
                later = float(after[i])
    return torch.tensor(out[::-1], dtype=torch.float64)


def _paid(s: Scores) -> list[list[float]]:
    out = []
    for own, reward in zip(s.turns, s.rewards.tolist(), strict=True):
        paid = turn_rewards(own, reward)
        out.append(paid if reward == reward else [reward] * len(paid))
    return out


def _returns(s: Scores, gamma: float) -> list[list[float]]:
    """For each rollout, the discounted return of each turn; NaN if the episode is unscorable."""
    return [[*accumulate(reversed(paid), lambda later, now: now + gamma * later)][::-1] for paid in _paid(s)]


def _episode_of(s: Scores) -> torch.Tensor:
    return torch.tensor([i for i, own in enumerate(s.turns) for _ in own], dtype=torch.int64)


def _flat(values: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([v for own in values for v in own], dtype=torch.float64)


def _numbered(keys: Sequence[Hashable]) -> torch.Tensor:
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def _on_tokens(s: Scores, values: torch.Tensor, plans: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Assigns the value of each turn to the turn's trained tokens. Returns one array [T] per rollout. `values` has one
    entry per turn, in order over all rollouts. If `plans` is given, the tokens inside a turn's plan get the turn's
    entry of `plans` instead."""
    out, left = [], iter(zip(values.tolist(), (values if plans is None else plans).tolist(), strict=True))
    for own, mask in zip(s.turns, s.masks, strict=True):
        tokens = np.zeros(len(mask))
        for turn in own:
            tokens[turn.start:turn.end], planned = next(left)
            tokens[slice(*turn.plan)] = planned
        out.append(torch.from_numpy(np.where(np.asarray(mask, bool), tokens, 0.0)))
    return out


def warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)
