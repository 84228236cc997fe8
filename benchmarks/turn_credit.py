"""Whose credit is it? Five turns, of which the third alone decides: every rule of credit by turn against plain grpo.

    python benchmarks/turn_credit.py --out benchmarks/results/turn_credit.md         # about a minute on one core

There is no model: actions are drawn from a softmax over weights that all turns share, so that credit on turns that do
not matter moves the one that does. The advantages are those of vlrl.algo. States repeat across the episodes of a group:
the number of the turn, and behind the third whether it was right. Best is an advantage of [right] - p on the third turn
and 0 on all others, which is what GAE gives with the true value of every state.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vlrl.algo.advantage import grpo
from vlrl.algo.inputs import ActionCredit, Scores
from vlrl.evaluation.stats import mean_ci
from vlrl.methods.objectives.turn_advantage import gigpo, hierarchical, mobgrpo, thor, turn_return
from vlrl.task.combine import make_combine, make_gate

TURNS, DECIDES, ACTIONS, GROUP = 5, 2, 16, 8
BUSY = 0.15
"""What action 1 pays in any turn where rewards distract."""
PLANNED = (0, DECIDES)
"""Turns that begin with a plan."""
PROMPTS = 2
"""Groups of a step of learning."""
MOST = 3_200
"""Answers after which a run is given up."""
ENOUGH = 0.9
RATES = (1.0, 2.0, 4.0, 8.0, 16.0)
TUNING, TESTED = range(100, 106), range(5)
"""Seeds that choose the learning rate, and seeds that are reported."""
WEIGHTS = {"outcome": 1.0, "step": 1.0, "busy": BUSY}
Rule = Callable[["Played", Scores], Sequence[torch.Tensor] | torch.Tensor]


@dataclass(frozen=True)
class Paid:
    """How the chain pays."""

    late: bool = True
    """Whether the third turn is paid at the end, by the outcome, or at once, by a part of the turn."""
    busy: bool = False
    combine: str = "sum"


WORLDS: Mapping[str, Paid] = {
    "outcome": Paid(), "step": Paid(late=False), "distracting": Paid(busy=True),
    "gated": Paid(busy=True, combine="gate:outcome>=1")}
TOLD = {"outcome": "the reward comes at the end", "step": "the third turn is paid when it is made",
        "distracting": f"action 1 pays {BUSY} in every turn, and the outcome 1 at the end",
        "gated": "the same with `task.combine=gate:outcome>=1` (G-RA)"}


@dataclass(frozen=True)
class Played:
    """Episodes of policies: each plays `groups` groups side by side."""

    chances: np.ndarray
    """[policies, ACTIONS]"""
    policy: np.ndarray
    """[E] whose episode it is."""
    actions: np.ndarray
    """[E, TURNS]"""
    paid: Paid

    @property
    def right(self) -> np.ndarray:
        return self.actions[:, DECIDES] == 0

    @property
    def rewards(self) -> np.ndarray:
        """[E, TURNS] what each turn is paid, without a gate."""
        out = BUSY * (self.actions == 1) * self.paid.busy
        out[:, TURNS - 1 if self.paid.late else DECIDES] += self.right
        return out

    def scores(self) -> Scores:
        combine, opens = make_combine(self.paid.combine, WEIGHTS), make_gate(self.paid.combine)
        steps = self.rewards
        if self.paid.late:
            steps[:, -1] -= self.right  # not of the turn: it is left of the reward
        totals, turns = [], []
        for right, acts, own in zip(self.right.tolist(), self.actions.tolist(), steps.tolist(), strict=True):
            parts = {"outcome" if self.paid.late else "step": float(right),
                     "busy": float(sum(a == 1 for a in acts)) * self.paid.busy}
            totals.append(combine(parts, WEIGHTS))
            counts = opens(parts)
            after = "right" if right else "wrong"
            turns.append([ActionCredit(
                2 * t, 2 * t + 2, own[t] if counts else 0.0,
                f"={t}{after * (t > DECIDES)}" if t else "", {"called": float(right)} if t == DECIDES else {},
                (2 * t, 2 * t + 1) if t in PLANNED else (0, 0)) for t in range(TURNS)])
        count = len(totals)
        tokens, mask = np.zeros(2 * TURNS, np.int64), np.ones(2 * TURNS, bool)
        return Scores(rewards=torch.tensor(totals, dtype=torch.float64), group=torch.arange(count) // GROUP,
                      lengths=torch.full((count,), 2.0 * TURNS, dtype=torch.float64),
                      task=torch.zeros(count, dtype=torch.int64), outcome=torch.from_numpy(self.right),
                      tokens=[tokens] * count, masks=[mask] * count, turns=turns)


def gae(played: Played, _: Scores, decay: float = 0.0) -> list[torch.Tensor]:
    """GAE (arXiv 1506.02438) of what is paid, with the true value of every state under the policy that played."""
    chance, rewards = played.chances[played.policy], played.rewards
    values = np.zeros((len(rewards), TURNS + 1))
    for t in reversed(range(TURNS)):
        busy = BUSY * chance[:, 1] * played.paid.busy
        values[:, t] = values[:, t + 1] + busy
        if t == DECIDES:  # from here back whether it is right is not known
            values[:, t] += chance[:, 0] - played.right * played.paid.late
        elif t == TURNS - 1:
            values[:, t] += played.right * played.paid.late
    deltas, later, out = rewards + values[:, 1:] - values[:, :-1], np.zeros(len(rewards)), np.zeros_like(rewards)
    for t in reversed(range(TURNS)):
        later = deltas[:, t] + decay * later
        out[:, t] = later
    return [torch.from_numpy(np.repeat(own, 2)) for own in out]


RULES: Mapping[str, Rule] = {
    "grpo": lambda _, s: grpo(s), "gigpo": lambda _, s: gigpo(s), "turn_return": lambda _, s: turn_return(s),
    "mobgrpo": lambda _, s: mobgrpo(s), "hierarchical": lambda _, s: hierarchical(s),
    "thor": lambda _, s: thor(s, part="called"),
    "gae, lambda 1": lambda p, s: gae(p, s, 1.0), "gae, lambda 0": gae}


def chances(weights: np.ndarray) -> np.ndarray:
    """Returns [policies, ACTIONS] weights -> the chance of each action."""
    up = np.exp(weights - weights.max(-1, keepdims=True))
    return up / up.sum(-1, keepdims=True)


def play(weights: np.ndarray, groups: int, seeds: Sequence[np.random.Generator], paid: Paid) -> Played:
    """Returns episodes of each policy, drawn from its own stream."""
    chance = chances(weights)
    drawn = [(rng.random((groups * GROUP, TURNS, 1)) > own.cumsum(-1)).sum(-1).clip(max=ACTIONS - 1)
             for own, rng in zip(chance, seeds, strict=True)]
    return Played(chance, np.repeat(np.arange(len(weights)), groups * GROUP), np.concatenate(drawn), paid)


def gradients(rule: Rule, played: Played) -> np.ndarray:
    """Returns [groups of all, ACTIONS] the mean over a group of the sum over turns of A d log p / d weights."""
    s = played.scores()
    found = rule(played, s)
    credit = found[:, None].expand(-1, TURNS).numpy() if torch.is_tensor(found) else np.stack(found)[:, 1::2]
    slope = credit[..., None] * (np.eye(ACTIONS)[played.actions] - played.chances[played.policy][:, None])
    return slope.sum(1).reshape(-1, GROUP, ACTIONS).mean(1)


def start(chance: float) -> np.ndarray:
    """Returns [1, ACTIONS] weights of a policy that is right so often, and even otherwise."""
    weights = np.zeros((1, ACTIONS))
    weights[0, 0] = math.log(chance * (ACTIONS - 1) / (1 - chance))
    return weights


def noise(rule: Rule, paid: Paid, chance: float, seed: int, groups: int = 250) -> tuple[float, float]:
    """Returns the variance of a group's gradient relative to the square of its mean, and the cosine of that mean with
    the gradient of success."""
    weights = start(chance)
    played = play(weights, groups, [np.random.default_rng(seed)], paid)
    found = gradients(rule, played)
    mean, variance = found.mean(0), found.var(0, ddof=1).sum()
    signal = max(mean @ mean - variance / groups, 1e-12)
    truth = np.eye(ACTIONS)[0] - played.chances[0]
    cosine = mean @ truth / np.linalg.norm(mean) / np.linalg.norm(truth) if mean.any() else 0.0
    return variance / signal, float(cosine)


def answers_needed(rule: Rule, paid: Paid, rates: Sequence[float], seeds: Sequence[int]) -> np.ndarray:
    """Returns [rates, seeds] answers until an even policy is right in ENOUGH of the cases, infinite where it is not
    within MOST. All learn side by side; their groups know nothing of each other."""
    count = len(rates) * len(seeds)
    weights, out = np.zeros((count, ACTIONS)), np.full(count, np.inf)
    rate, streams = np.repeat(rates, len(seeds)), [np.random.default_rng(s) for _ in rates for s in seeds]
    step = PROMPTS * GROUP
    for taken in range(step, MOST + 1, step):
        left = np.flatnonzero(np.isinf(out))
        if not len(left):
            break
        played = play(weights[left], PROMPTS, [streams[i] for i in left], paid)
        slope = gradients(rule, played).reshape(len(left), PROMPTS, ACTIONS).mean(1)
        weights[left] += rate[left, None] * slope
        out[left[chances(weights[left])[:, 0] >= ENOUGH]] = taken
    return out.reshape(len(rates), len(seeds))


def tuned(rule: Rule, paid: Paid) -> tuple[float, list[float]]:
    """Returns the learning rate that is best on seeds of its own, and the answers needed on the others."""
    cost = np.minimum(answers_needed(rule, paid, RATES, TUNING), 2 * MOST).mean(1)
    rate = RATES[int(cost.argmin())]
    return rate, answers_needed(rule, paid, [rate], TESTED)[0].tolist()


def _needed(answers: Sequence[float]) -> str:
    reached = [a for a in answers if a < math.inf]
    if len(reached) < len(answers):
        return f"{len(reached)} of {len(answers)} within {MOST}"
    found = mean_ci(answers)
    return f"{found.mean:.0f} [{found.low:.0f}, {found.high:.0f}]"


def table(name: str) -> list[str]:
    """The section of one world."""
    paid = WORLDS[name]
    lines = [f"## {name}: {TOLD[name]}", "",
             "| rule | noise at p = 1/16 | noise at p = 1/2 | cosine at 1/2 | answers to 0.9 | of grpo | rate |",
             "|---|---|---|---|---|---|---|"]
    base = math.nan
    for label, rule in RULES.items():
        if paid.combine != "sum" and label.startswith("gae"):
            continue  # its values are those of plain sums
        early, late = ([noise(rule, paid, p, seed) for seed in TESTED] for p in (1 / ACTIONS, 0.5))
        rate, answers = tuned(rule, paid)
        mean = statistics.fmean(answers)
        base = mean if label == "grpo" else base
        share = f"{mean / base:.2f}" if math.isfinite(mean / base) and math.isfinite(base) else "-"
        spread = [mean_ci([v for v, _ in found]) for found in (early, late)]
        noisy = [f"{s.mean:.1f} [{s.low:.1f}, {s.high:.1f}]" for s in spread]
        lines.append(f"| {label} | {noisy[0]} | {noisy[1]} | {statistics.fmean(c for _, c in late):.3f} | "
                     f"{_needed(answers)} | {share} | {rate:g} |")
    return [*lines, ""]


def report() -> str:
    lines = [
        "# Credit by turn on a chain", "",
        "`python benchmarks/turn_credit.py --out benchmarks/results/turn_credit.md`", "",
        f"{TURNS} turns of {ACTIONS} actions, of which the third alone decides; groups of {GROUP}. Means of "
        f"{len(TESTED)} seeds with 95 % intervals (bootstrap).", "",
        "- noise: variance of a group's gradient over the square of its mean, at a policy that is right with chance p",
        "- cosine: of that mean with the gradient of success",
        f"- answers: until an even policy is right in {ENOUGH:.0%}, in steps of {PROMPTS} groups, plain gradient "
        f"ascent; each rule has the best of the rates {', '.join(f'{r:g}' for r in RATES)} on {len(TUNING)} other "
        "seeds",
        "- of grpo: answers relative to grpo's, where all seeds of both got there",
        "- gae has the true value of every state, which no run has; thor is told which turn was a call that succeeded, "
        "the third one; hierarchical has plans in turns 1 and 3", ""]
    for name in WORLDS:
        lines += table(name)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = report()
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
