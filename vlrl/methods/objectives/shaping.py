"""Reward shaping before the advantage: each function maps `Scores` to [R] shaped rewards. Unscorable rollouts stay NaN.

Rollout files store the reward before shaping. By default the task decides whether a completion is correct
(Task.correct). If `correct` or `part` is set, a completion is correct when its reward, or its raw reward part `part`,
is above `correct` (0.5 by default). All functions except CallCost look at one group at a time."""

from __future__ import annotations

import re
from collections import defaultdict, deque

import torch

from vlrl.algo import grouped
from vlrl.algo.effect import FunctionUse, idle, idle_when, reads
from vlrl.algo.inputs import Scores, requires
from vlrl.algo.state import Saved
from vlrl.config.base import Count, Fraction, NonNegative, Positive, Rate

_WEIGHTLESS = "its weight is 0"


def _beyond_all(use: FunctionUse) -> str:
    longest, limit = use.config.rollout.max_new_tokens, use.values["limit"] or use.config.rollout.max_new_tokens
    if limit - (use.values["buffer"] or limit / 5) < longest:
        return ""
    return f"no answer is longer than limit - buffer with rollout.max_new_tokens={longest}"


@idle(_WEIGHTLESS, weight=0)
@idle_when(_beyond_all)
@requires("local")
def overlong(s: Scores, weight: NonNegative = 1.0, limit: Positive | None = None,
             buffer: Positive | None = None) -> torch.Tensor:
    """A penalty for long completions. Adds weight * p to the reward, where p is 0 up to limit - buffer tokens, falls
    linearly to -1 at limit, and stays at -1 beyond it.

    limit: rollout.max_new_tokens by default. buffer: a fifth of limit by default. DAPO (arXiv 2503.14476) eq. 13; the
    paper has a limit of 20,480 and a buffer of 4,096."""
    most = float(limit or s.max_length)
    room = float(buffer or most / 5)
    return s.rewards - weight * ((s.lengths - (most - room)) / room).clamp(0, 1)


def _begins_late(use: FunctionUse) -> str:
    after, steps = use.values["after"], use.config.steps
    return f"it begins after {after} steps, but steps={steps}" if after >= steps else ""


@reads("outcome")
@idle(_WEIGHTLESS, weight=0)
@idle_when(_begins_late)
@requires("local")
def kimi_length(s: Scores, weight: NonNegative = 1.0, after: Count = 0, correct: float | None = None,
                part: str = "") -> torch.Tensor:
    """Adds weight * l to the reward of a correct completion, and weight * min(0, l) to that of a wrong completion. l =
    0.5 - (L - min) / (max - min), with min and max over the lengths L of the group; l is 0 if all lengths are equal.

    after: number of steps at the start without this shaping, which the authors call warm-up. correct, part: see the top
    of this file. Kimi k1.5 (arXiv 2501.12599) section 2.3.3."""
    lengths = torch.where(s.rewards.isnan(), torch.nan, s.lengths)
    least, most = grouped.smallest(lengths, s.group), grouped.largest(lengths, s.group)
    share = torch.where(most > least, 0.5 - (lengths - least) / (most - least), 0.0)
    bonus = torch.where(grouped.correct(s, part, correct), share, share.clamp(max=0))
    return s.rewards + (weight if s.step >= after else 0.0) * bonus


def _of_no_length(use: FunctionUse) -> str:
    low, high, longest = use.values["low"], use.values["high"], use.config.rollout.max_new_tokens
    if low <= min(high, longest):
        return ""
    return (f"no answer has {low} to {high} tokens with rollout.max_new_tokens={longest}; set {use.setting}.low and "
            "high")


@reads("outcome")
@idle(_WEIGHTLESS, bonus=0)
@idle_when(_of_no_length)
@requires("local")
def length_bonus(s: Scores, bonus: float = 0.2, low: Count = 320, high: Count = 512, correct: float | None = None,
                 part: str = "") -> torch.Tensor:
    """Adds `bonus` to the reward of a correct completion with `low` to `high` tokens, in a group with at least two
    correct completions. correct, part: see the top of this file.

    Video-R1 (arXiv 2503.21776) eq. 4; the constants are those of its code, which counts a reward above 0.1 as correct.
    """
    right = grouped.correct(s, part, correct, without=0.1)
    enough = grouped.total(right.to(s.rewards.dtype), s.group) >= 2
    within = right & enough & (s.lengths >= low) & (s.lengths <= high)
    return s.rewards + bonus * within.to(s.rewards.dtype)


@reads("outcome", alone={})
@requires("local")
def cosine(s: Scores, correct_short: float = 2.0, correct_long: float = 1.0, wrong_short: float = -10.0,
           wrong_long: float = 0.0, exceed: float = -10.0, limit: Positive | None = None, correct: float | None = None,
           part: str = "") -> torch.Tensor:
    """Replaces the reward of a completion of length L by long + (short - long) * (1 + cos(pi L / limit)) / 2. For a
    correct completion (short, long) is (correct_short, correct_long), for a wrong one (wrong_short, wrong_long). A
    truncated completion has the reward `exceed`.

    Short correct completions gain most, short wrong ones lose most. limit: rollout.max_new_tokens by default. correct,
    part: see the top of this file. Demystifying long chain-of-thought (arXiv 2502.03373) section 4.2."""
    most = float(limit or s.max_length)
    right = grouped.correct(s, part, correct)
    fall = (1 + torch.cos(torch.pi * (s.lengths / most).clamp(max=1))) / 2
    values = torch.where(right, correct_long + (correct_short - correct_long) * fall,
                         wrong_long + (wrong_short - wrong_long) * fall)
    over = s.lengths >= most if s.truncated is None else s.truncated
    return torch.where(s.rewards.isnan(), torch.nan, torch.where(over, exceed, values))


@reads("outcome")
@requires("local")
def dast(s: Scores, slope: float = -0.5, offset: float = 0.5, limit: Positive | None = None,
         correct: float | None = None, part: str = "") -> torch.Tensor:
    """Adds max(slope * l + offset, 0.1) to the reward of a correct completion, and min(0.9 * l - 0.1, -0.1) to that of
    a wrong one.

    l = (L - B) / B is the relative distance of the length L from the budget B = p * (mean length of the group's correct
    completions) + (1 - p) * limit, where p is the group's share of correct completions. So hard prompts may have longer
    reasoning. limit: rollout.max_new_tokens by default. correct, part: see the top of this file. DAST (arXiv
    2503.04472) as in UI-R1-E (arXiv 2503.21620)."""
    right = grouped.correct(s, part, correct)
    share = grouped.total(right.to(s.rewards.dtype), s.group) / grouped.count(s.rewards, s.group)
    length = grouped.mean(torch.where(right, s.lengths, torch.nan), s.group)
    budget = torch.where(share > 0, share * length, 0.0) + (1 - share) * float(limit or s.max_length)
    away = s.lengths / budget.clamp(min=1) - 1
    return s.rewards + torch.where(right, (slope * away + offset).clamp(min=0.1), (0.9 * away - 0.1).clamp(max=-0.1))


@reads("outcome")
@requires("local", "texts")
def step_pruner(s: Scores, weight: NonNegative = 0.5, correct: float | None = None, part: str = "") -> torch.Tensor:
    """Subtracts weight * (1 - fewest / steps) from the reward of a correct completion. Here `steps` is the completion's
    number of reasoning steps, and `fewest` the smallest such number among the group's correct completions. Positive
    rewards of wrong completions are set to 0.

    A reasoning step is a paragraph, so that merging sentences saves nothing. correct, part: see the top of this file.
    Step Pruner (arXiv 2510.03805), as described in the paper; the size of the penalty is ours. The paper's automatic
    stop at overlong steps is not included."""
    right = grouped.correct(s, part, correct)
    steps = torch.tensor([max(1, len(_pieces(_PARAGRAPHS, text))) for text in s.texts], dtype=s.rewards.dtype)
    fewest = grouped.smallest(torch.where(right, steps, torch.nan), s.group)
    return torch.where(right, s.rewards - weight * (1 - fewest / steps), s.rewards.clamp(max=0))


@reads("outcome")
@idle(_WEIGHTLESS, weight=0)
@requires("local", "texts")
def grsp(s: Scores, weight: NonNegative = 0.1, clusters: Positive = 4, ratio: Rate = 0.5, correct: float | None = None,
         part: str = "") -> torch.Tensor:
    """Subtracts weight * sum_k w_k z_k from the reward of a correct completion. c_k is the number of the completion's
    reasoning segments in length cluster k, and z_k = (c_k - mean) / std over the group.

    Reasoning is split into segments at paragraphs and at turning words (but, wait, so, ...). The segments of a group
    are sorted by their number of words and cut into clusters of equal size. w_k falls by the factor `ratio` from the
    shortest cluster to the longest, and sums to 1, so many short segments, a sign of meandering thought, cost most. z
    is clipped to +-3. correct, part: see the top of this file. Mitigating overthinking through reasoning shaping (GRSP,
    arXiv 2510.09535), as described in the paper; the constants are ours."""
    right = grouped.correct(s, part, correct)
    segments = [[len(piece.split()) for piece in _pieces(_TURNS, text)] for text in s.texts]
    counts = torch.zeros(clusters, len(segments), dtype=s.rewards.dtype)
    members: dict[int, list[int]] = defaultdict(list)
    for i, number in enumerate(s.group.tolist()):
        members[number].append(i)
    for rollouts in members.values():
        lengths = torch.tensor([n for i in rollouts for n in segments[i]], dtype=torch.float64)
        if not len(lengths):
            continue
        bounds = torch.quantile(lengths, torch.arange(1, clusters, dtype=torch.float64) / clusters)
        for i in rollouts:
            own = torch.bucketize(torch.tensor(segments[i], dtype=torch.float64), bounds)
            counts[:, i] = torch.bincount(own, minlength=clusters).to(counts.dtype)
    share = ratio ** torch.arange(clusters, dtype=s.rewards.dtype)
    penalty = torch.zeros_like(s.rewards)
    for k in range(clusters):
        known = torch.where(s.rewards.isnan(), torch.nan, counts[k])
        z = grouped.centred(known, s.group) / grouped.std(known, s.group)
        penalty += share[k] / share.sum() * torch.where(z.isnan(), 0.0, z.clamp(-3, 3))
    return torch.where(right, s.rewards - weight * penalty, s.rewards)


@idle(_WEIGHTLESS, alpha=0)
class CallCost(Saved):
    """Mixes the reward R with the cheapness C of a completion: (1 - alpha) R + alpha C for R >= 0. C = 1 - (sqrt(cost)
    - low) / (high - low), clipped to [0, 1], where low and high are quantiles of the square roots of the last
    `window` costs, including those of this step. C is 0.5 if low and high are equal.

    The cost of a completion is its raw reward part `part`, which has weight 0 in the task, e.g. price x tokens of the
    models that it called. A reward below 0 (in the paper, for a wrong format) is unchanged, and so is the reward of a
    completion without this part. Router-R1 (arXiv 2506.09033), with the constants of its code, except that alpha is 0
    there by default."""

    requires = frozenset[str]()
    saved = ("seen",)

    def __init__(self, alpha: Fraction = 0.6, part: str = "cost", window: Positive = 1000, quantile: Fraction = 0.05):
        if quantile >= 0.5:
            raise ValueError(f"quantile={quantile:g} must be below 0.5, because the upper quantile is 1 - quantile")
        self.alpha, self.part, self.quantile = alpha, part, quantile
        self.seen: deque[float] = deque(maxlen=window)

    def __call__(self, s: Scores) -> torch.Tensor:
        """The shaped rewards [R]. Raises ValueError if no task has the reward part `part`, or if a cost is below 0."""
        if self.part not in s.parts:
            raise ValueError(f"there is no reward part '{self.part}'; the reward parts are: {', '.join(s.parts)}")
        cost = s.parts[self.part]
        if bool((cost < 0).any()):
            raise ValueError(f"the reward part '{self.part}' is {float(cost.nan_to_num().min()):g}, but a cost "
                             "must be at least 0")
        self.seen.extend(cost[~cost.isnan() & ~s.rewards.isnan()].sqrt().tolist())
        known = torch.tensor(self.seen or [0.0], dtype=torch.float64)
        low, high = torch.quantile(known, torch.tensor([self.quantile, 1 - self.quantile], dtype=torch.float64))
        cheap = 1 - ((cost.sqrt() - low) / (high - low)).clamp(0, 1) if high - low >= 1e-8 else torch.where(
            cost.isnan(), cost, 0.5)
        paid = (1 - self.alpha) * s.rewards + self.alpha * cheap
        return torch.where((s.rewards >= 0) & ~cost.isnan(), paid, s.rewards)


_PARAGRAPHS = re.compile(r"\n\s*\n")
_TURNS = re.compile(r"\n\s*\n|(?=\b(?:but|wait|however|alternatively|hmm|so|therefore|thus|hence|then|next|also|first|"
                    r"second|third|finally|let me|let's)\b)", re.IGNORECASE)
"""Matches the boundaries of reasoning segments: empty lines, and the positions before "but", "wait", "so" etc."""


def _pieces(boundary: re.Pattern[str], text: str) -> list[str]:
    """Splits the reasoning of a completion at matches of `boundary` and returns the non-empty pieces. The reasoning is
    the text inside the think tags, before the answer tag."""
    reasoning = text.partition("<answer>")[0].replace("<think>", "").partition("</think>")[0]
    return [piece for piece in boundary.split(reasoning) if piece.strip()]
