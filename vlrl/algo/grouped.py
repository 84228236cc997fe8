"""Statistics of rewards [R] over each rollout's group, or over all rollouts: [R] -> [R].

Every rollout gets the statistic of its group. NaN = unscorable, excluded from all statistics."""

from __future__ import annotations

import torch

from vlrl.algo.inputs import Scores, requires


def total(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Sum of the values of each rollout's group."""
    filled = torch.where(values.isnan(), 0.0, values)
    return filled.new_zeros(_count(group)).index_add(0, group, filled)[group]


def count(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Number of values of each rollout's group, as floats."""
    return total(torch.where(values.isnan(), torch.nan, 1.0).to(values.dtype), group)


def mean(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Mean of the values of each rollout's group; NaN in a group without values."""
    return total(values, group) / count(values, group)


def std(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each rollout's group, with Bessel's correction; NaN in a group of fewer than two values."""
    squares = (values - mean(values, group)) ** 2
    return (total(squares, group) / (count(values, group) - 1)).sqrt()


def smallest(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Smallest value of each rollout's group; infinity in a group without values."""
    filled = torch.where(values.isnan(), torch.inf, values)
    return filled.new_full((_count(group),), torch.inf).scatter_reduce(0, group, filled, "amin")[group]


def largest(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Largest value of each rollout's group; -infinity in a group without values."""
    return -smallest(-values, group)


def all_equal(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[R] bool: whether all values of the rollout's group are exactly equal, so that it has no training signal."""
    return smallest(values, group) >= largest(values, group)


def centred(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Value - group mean; exactly 0 where all values of the group are equal, NaN where the value is NaN."""
    away = values - mean(values, group)
    return torch.where(all_equal(values, group) & ~values.isnan(), 0.0, away)


def normalized(values: torch.Tensor, group: torch.Tensor, eps: float, normalize: bool = True) -> torch.Tensor:
    """Value - group mean; with `normalize` divided by the group's std + eps."""
    away = centred(values, group)
    return away / (std(values, group) + eps) if normalize else away


def correct(s: Scores, part: str = "", above: float | None = None, without: float = 0.5) -> torch.Tensor:
    """[R] bool: which rollouts are correct; False for unscorable rollouts.

    By default the task decides (Scores.outcome). With `part` or `above`, a rollout is correct if the raw reward part
    named `part`, or else its reward, exceeds `above`. A missing `above` is `without`, which is also the threshold of
    the reward where no outcome is known. Raises ValueError when no rollout has the part."""
    if part and part not in s.parts:
        raise ValueError(f"there is no reward part '{part}'; the reward parts are: {', '.join(s.parts)}")
    if not part and above is None and s.outcome is not None:
        return s.outcome & ~s.rewards.isnan()
    values = s.parts[part] if part else s.rewards
    return (values > (without if above is None else above)) & ~s.rewards.isnan()


def _count(group: torch.Tensor) -> int:
    return int(group.max()) + 1 if len(group) else 0


def whitened(values: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) of values [n], each counted `weights` [n] times; with Bessel's correction.

    Exactly 0 where all counted values are equal. Values with weight 0 may be NaN and stay NaN."""
    counted = values[weights > 0]
    total = weights.sum()
    if not len(counted) or total <= 1 or bool((counted == counted[0]).all()):
        return torch.zeros_like(values)
    filled = torch.where(weights > 0, values, 0.0)
    mean = (filled * weights).sum() / total
    variance = ((filled - mean) ** 2 * weights).sum() / (total - 1)
    return (values - mean) * (variance + eps).rsqrt()


@requires("local")
def every_rollout(s: Scores) -> torch.Tensor:
    """[R] bool, all True: keeps every rollout."""
    return torch.ones_like(s.rewards, dtype=torch.bool)
