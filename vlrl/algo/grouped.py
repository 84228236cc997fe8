"""Statistics of rewards, [R] -> [R], of each rollout's group or of all. NaN = unscorable, which is in none of them."""

from __future__ import annotations

import torch

from vlrl.algo.inputs import Scores, requires


def total(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Returns the sum over each rollout's group."""
    filled = torch.where(values.isnan(), 0.0, values)
    return filled.new_zeros(_count(group)).index_add(0, group, filled)[group]


def count(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Returns how many values each rollout's group has, as floats."""
    return total(torch.where(values.isnan(), torch.nan, 1.0).to(values.dtype), group)


def mean(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """NaN in a group without values."""
    return total(values, group) / count(values, group)


def std(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """With Bessel's correction; NaN in a group of fewer than two values."""
    squares = (values - mean(values, group)) ** 2
    return (total(squares, group) / (count(values, group) - 1)).sqrt()


def smallest(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Infinite in a group without values."""
    filled = torch.where(values.isnan(), torch.inf, values)
    return filled.new_full((_count(group),), torch.inf).scatter_reduce(0, group, filled, "amin")[group]


def largest(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """-infinite in a group without values."""
    return -smallest(-values, group)


def all_equal(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Returns [R] bool: the group has no two different values, so it carries no preference. Exact."""
    return smallest(values, group) >= largest(values, group)


def centred(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Value - mean of the group; exactly 0 in a settled group, NaN where the value is."""
    away = values - mean(values, group)
    return torch.where(all_equal(values, group) & ~values.isnan(), 0.0, away)


def correct(s: Scores, part: str = "", above: float | None = None, without: float = 0.5) -> torch.Tensor:
    """Returns [R] bool: which rollouts are correct; one that is unscorable is not.

    By what the tasks say (Scores.outcome). With `part` or `above` given: the raw reward part of that name, or the
    reward, is above that value, or above `without`, which also stands in where no outcome is known. Raises ValueError
    when no rollout has the part.
    """
    if part and part not in s.parts:
        raise ValueError(f"there is no reward part '{part}'; there are: {', '.join(s.parts)}")
    if not part and above is None and s.outcome is not None:
        return s.outcome & ~s.rewards.isnan()
    values = s.parts[part] if part else s.rewards
    return (values > (without if above is None else above)) & ~s.rewards.isnan()


def _count(group: torch.Tensor) -> int:
    return int(group.max()) + 1 if len(group) else 0


def whitened(values: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns (x - mean) / sqrt(var + eps) with values [n] counted `weights` [n] times each, Bessel's correction.

    Exactly 0 where all that count are equal. NaN among those that do not count stay NaN.
    """
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
    """Returns every rollout."""
    return torch.ones_like(s.rewards, dtype=torch.bool)
