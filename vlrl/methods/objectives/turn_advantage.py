"""Advantages that differ between turns of an episode: `Scores -> list of [T]`, 0 on tokens that are not trained.

A turn is paid its weighted reward parts, and nothing where the gate of `task.combine` is closed. The rest of the reward
(an outcome from `Task.score`, shaping) is paid with the last turn, so the turns of an episode add up to its reward. A
completion without an environment is an episode of one turn."""

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
    """Why an advantage that differs from grpo only between turns does not differ."""
    return use.one_turn and f"{use.one_turn} grpo"


@idle_when(as_grpo)
@requires("local", "turns")
def gigpo(s: Scores, weight: NonNegative = 1.0, gamma: Fraction = 0.95, normalize: bool = True,
          eps: NonNegative = 1e-6) -> list[torch.Tensor]:
    """A_E + weight * A_S on the tokens of each turn. A_E: R - mean of the group. A_S: the discounted return of the
    turn, sum_{k >= t} gamma^(k - t) r_k, minus its mean over all turns of the group that began in the same state.

    normalize: each divided by its std + eps, Bessel's correction. A turn begins in the `Step.state` of the turn before,
    the first one in the shared start of the group; A_S is 0 in a state that occurred once, or is unknown. GiGPO:
    Group-in-Group Policy Optimization (arXiv 2505.10978) eq. 3, 7 and 8."""
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
    """G_t - mean on the tokens of turn t, G_t = sum_{k >= t} gamma^(k - t) r_k the return to go, its mean over the
    turns of the group with the same index. normalize: divided by their std + eps, Bessel's correction.

    A turn that no other episode of the group reached has 0. The step-level advantage of StepPO; with
    algo.loss=gspo_turn a turn is one decision in the ratio too."""
    keys = [(int(s.group[i]), t) for i, own in enumerate(s.turns) for t in range(len(own))]
    return _on_tokens(s, nan_to_zero(normalized(_flat(_returns(s, gamma)), _numbered(keys), eps, normalize)))


@reads("outcome", alone={})
@requires("local", "turns")
def mobgrpo(s: Scores, decay: Fraction = 0.9, penalty: NonNegative = 0.5,
            eps: NonNegative = 1e-4) -> torch.Tensor:
    """(R' - mean) / (std + eps) of the group, the same on all turns. R' = decay^(turns beyond the fewest of a correct
    episode of the group) where it is correct, -penalty where it ended by itself without success, else 0.

    MobGRPO of MobileGUI-RL (arXiv 2507.05720), which publishes no coefficients. A group without variance has 0."""
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
    """A_E + weight * A_T. A_E: (R - mean) / (std + eps) of the group. A_T, on turns that have the reward part: (part -
    mean) / (std + eps) over all such turns of the group, in successful and failed episodes; 0 on others.

    The part is 1 where a turn's tool calls succeeded, else 0: `tool_success` is provided by tools for a task that names
    it in its rewards. With a weight of 0 there it is in A_T alone. THOR (arXiv 2509.13761): episode-level and
    step-level GRPO, whose step groups are regenerated from before a failed call; here they are the calls of the group.
    """
    steps = [[turn.parts.get(part, math.nan) if reward == reward else math.nan for turn in own]
             for own, reward in zip(s.turns, s.rewards.tolist(), strict=True)]
    if s.turns and all(part not in turn.parts for own in s.turns for turn in own):
        warn_once(f"algo.advantage=thor: no turn has the reward part {part!r}, so turns have the advantage of their "
                  "episode alone: name it in the rewards of a task with tools, or name another by algo.advantage.part")
    called = nan_to_zero(normalized(_flat(steps), s.group[_episode_of(s)], eps))
    return _on_tokens(s, nan_to_zero(normalized(s.rewards, s.group, eps))[_episode_of(s)] + weight * called)


@idle_when(lambda use: "" if use.values["same_plan"] else as_grpo(use))
@requires("local", "turns", "plans", "tokens")
def hierarchical(s: Scores, gamma: Fraction = 1.0, same_plan: bool = False, normalize: bool = True,
                 eps: NonNegative = 1e-4) -> list[torch.Tensor]:
    """Tokens inside <plan> have the advantage of their subgoal, all others that of their turn inside it. A turn with a
    plan begins a subgoal, which lasts until the next such turn.

    Plan: return to go of its turn, sum_{k >= t} gamma^(k - t) r_k, against the plans of the same number in the other
    episodes of the group. Execution: the same sum up to the end of the subgoal, where the mean return of the group's
    next plans replaces the rest, against the turns at the same position of the same subgoal. same_plan: against those
    under a plan of the same tokens alone. Each minus its mean; normalize: / (std + eps), Bessel's correction; 0 where
    there is no other.

    HiPER's hierarchical advantage estimation (arXiv 2602.16165) at lambda = 1, with group means for its two critics;
    same_plan: the macro and micro groups of HiMAC (arXiv 2603.00977)."""
    places = [place for own in _subgoals(s) for place in own]
    group, returns = s.group[_episode_of(s)], _flat(_returns(s, gamma))
    if s.turns and not any(plan for _, _, plan in places):
        warn_once("algo.advantage=hierarchical: no action has a <plan>...</plan>, so each turn has its return to go "
                  "against the same turn of the other episodes: ask for plans in the prompt")
    macro_key = _numbered([(int(g), number) if place == 0 else ("none", i)
                           for i, (g, (number, place, _)) in enumerate(zip(group, places, strict=True))])
    macro = normalized(returns, macro_key, eps, normalize)
    micro_key = _numbered([(int(g), number, place, plan if same_plan else None)
                           for g, (number, place, plan) in zip(group, places, strict=True)])
    inside = _inside(s, places, gamma, grouped.mean(returns, macro_key))
    return _on_tokens(s, nan_to_zero(normalized(inside, micro_key, eps, normalize)), nan_to_zero(macro))


def _subgoals(s: Scores) -> list[list[tuple[int, int, tuple[int, ...]]]]:
    """[R][turns] number of plans so far, turns since the last one, and its tokens."""
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


def _inside(s: Scores, places: Sequence[tuple[int, int, Any]], gamma: float, after: torch.Tensor) -> torch.Tensor:
    """[turns] return of each turn up to the end of its subgoal, bootstrapped there with the value `after` [turns] of
    the next subgoal's first turn; NaN where the episode is unscorable."""
    paid, out, i = [turn for own in _paid(s) for turn in own], [], len(places)
    for own in reversed(s.turns):
        later = 0.0
        for _ in own:
            i -= 1
            later = paid[i] + gamma * later
            out.append(later)
            if places[i][1] == 0:
                later = float(after[i])
    return torch.tensor(out[::-1], dtype=torch.float64)


def _paid(s: Scores) -> list[list[float]]:
    """[R][turns] reward of each turn; NaN where the episode is unscorable."""
    out = []
    for own, reward in zip(s.turns, s.rewards.tolist(), strict=True):
        paid = turn_rewards(own, reward)
        out.append(paid if reward == reward else [reward] * len(paid))
    return out


def _returns(s: Scores, gamma: float) -> list[list[float]]:
    """[R][turns] discounted returns; NaN where the episode is unscorable."""
    return [[*accumulate(reversed(paid), lambda later, now: now + gamma * later)][::-1] for paid in _paid(s)]


def _episode_of(s: Scores) -> torch.Tensor:
    """[turns of all rollouts] the number of each turn's rollout."""
    return torch.tensor([i for i, own in enumerate(s.turns) for _ in own], dtype=torch.int64)


def _flat(values: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([v for own in values for v in own], dtype=torch.float64)


def _numbered(keys: Sequence[Hashable]) -> torch.Tensor:
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def _on_tokens(s: Scores, values: torch.Tensor, plans: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Spreads values of turns, [turns of all rollouts], over their trained tokens; `plans` over those of plans."""
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
