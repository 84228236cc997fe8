"""Statistics of rewards over each rollout's group: (values [R], group index [R]) -> [R].

Every rollout gets the statistic of its group. NaN (unscorable) is excluded from all statistics."""

from __future__ import annotations

import torch

from vlrl.algo.inputs import Scores, requires


def total(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """For each rollout, the sum of its group's values."""
    filled = torch.where(values.isnan(), 0.0, values)
    return filled.new_zeros(_count(group)).index_add(0, group, filled)[group]


def count(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """For each rollout, the number of its group's values, as float."""
    return total(torch.where(values.isnan(), torch.nan, 1.0).to(values.dtype), group)


def mean(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """For each rollout, the mean of its group's values; NaN if the group has no values."""
    return total(values, group) / count(values, group)


def std(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """For each rollout, the standard deviation of its group's values (Bessel's correction); NaN for fewer than two."""
    squares = (values - mean(values, group)) ** 2
    return (total(squares, group) / (count(values, group) - 1)).sqrt()


def smallest(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """For each rollout, the smallest of its group's values; infinity if the group has no values."""
    filled = torch.where(values.isnan(), torch.inf, values)
    return filled.new_full((_count(group),), torch.inf).scatter_reduce(0, group, filled, "amin")[group]


def largest(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """For each rollout, the largest of its group's values; -infinity if the group has no values."""
    return -smallest(-values, group)


def all_equal(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """[R] bool: whether all values of the rollout's group are exactly equal; such a group has no training signal."""
    return smallest(values, group) >= largest(values, group)


def centred(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Each value minus the mean of its group; exactly 0 if all group values are equal, NaN if the value is NaN."""
    away = values - mean(values, group)
    return torch.where(all_equal(values, group) & ~values.isnan(), 0.0, away)


def normalized(values: torch.Tensor, group: torch.Tensor, eps: float, normalize: bool = True) -> torch.Tensor:
    """Each value minus the mean of its group; with `normalize`, divided by the group's standard deviation + eps."""
    away = centred(values, group)
    return away / (std(values, group) + eps) if normalize else away


def correct(s: Scores, part: str = "", above: float | None = None, without: float = 0.5) -> torch.Tensor:
    """[R] bool: whether each rollout is correct; False for unscorable rollouts.

    By default the task decides (Scores.outcome). If the task reports no outcomes, the reward must exceed `without`.
    With `part`, the raw reward part of this name must exceed `above`; with only `above`, the reward must exceed
    `above`. The default of `above` is `without`. Raises ValueError if no rollout has the part."""
    if part and part not in s.parts:
        raise ValueError(f"there is no reward part '{part}'; the reward parts are: {', '.join(s.parts)}")
    if not part and above is None and s.outcome is not None:
        return s.outcome & ~s.rewards.isnan()
    values = s.parts[part] if part else s.rewards
    return (values > (without if above is None else above)) & ~s.rewards.isnan()


def _count(group: torch.Tensor) -> int:
    return int(group.max()) + 1 if len(group) else 0


def whitened(values: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) of the values x [n], with mean and variance (Bessel's correction) in which each
    value counts `weights` [n] times. Exactly 0 if all counted values are equal. NaN with weight 0 stays NaN."""
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
    """[R] bool, True everywhere: trains on every rollout (algo.batch=all)."""
    return torch.ones_like(s.rewards, dtype=torch.bool)
