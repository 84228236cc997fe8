"""Which rollouts of a step are trained on: `Scores -> [R] bool`. All others are in no term and no count of the loss."""

from __future__ import annotations

import math

import torch

from vlrl.algo import grouped
from vlrl.algo.inputs import Scores, requires
from vlrl.config.base import Fraction, Positive


@requires("local")
def whole(s: Scores) -> torch.Tensor:
    """Returns every rollout."""
    return torch.ones_like(s.rewards, dtype=torch.bool)


@requires("local")
def rorecomp(s: Scores, keep: Fraction = 0.5, decay: Positive = 200, floor: Fraction = 0.0,
             correct: float | None = None, part: str = "") -> torch.Tensor:
    """Priority batches: of each group the shortest `keep` of the correct answers and the longest `keep` of the wrong
    ones (rounded up, ties included). In a compensation step the rest is trained on too.

    Compensation steps come with a frequency that falls from 1 to `floor` by a cosine over `decay` steps; they lie where
    its sum passes a whole number, so they are the same on a resumed run. Advantages are those of the whole group.
    RoRecomp (arXiv 2509.25958), as described there: here the compensation batch is what the same step left over, drawn
    by the policy as it is, instead of a replay buffer's.
    """
    if _compensates(s.step, decay, floor):
        return whole(s)
    right = grouped.correct(s, part, correct)
    wrong = ~right & ~s.rewards.isnan()
    return _first(right, s.lengths, s.group, keep) | _first(wrong, -s.lengths, s.group, keep)


def _compensates(step: int, decay: int, floor: float) -> bool:
    def so_far(steps: int) -> int:
        falling = min(steps, decay)
        area = falling / 2 + decay / (2 * math.pi) * math.sin(math.pi * falling / decay)
        return math.floor(floor * steps + (1 - floor) * area + 1e-9)
    return so_far(step + 1) > so_far(step)


def _first(among: torch.Tensor, key: torch.Tensor, group: torch.Tensor, keep: float) -> torch.Tensor:
    """Returns [R] bool: among those, the `keep` of each group with the smallest keys."""
    chosen = torch.zeros_like(among)
    for number in group[among].unique().tolist():
        own = among & (group == number)
        count = math.ceil(keep * int(own.sum()))
        if count:
            chosen |= own & (key <= key[own].sort().values[count - 1])
    return chosen


BATCHES = {"all": whole, "rorecomp": rorecomp}
