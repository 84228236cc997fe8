"""Selects a run's most informative groups, each with the reason. Reads neither texts nor tokens."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vlrl.store import RunFolder

from .html import number

MOST = 20


@dataclass(frozen=True)
class NotableGroup:
    """A group worth showing, and the reason `why`. `before` is None unless the group was chosen because its sample's
    reward changed between the first and the last evaluation."""

    why: str
    source: str
    split: str
    step: int
    group: str
    before: tuple[int, str] | None = None
    """(step, group id) of the same sample's group in the first evaluation."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.source, self.split, self.step, self.group


@dataclass(frozen=True)
class _Row:
    step: int
    group: str
    mean: float
    std: float
    errors: int


def choose(run: RunFolder, splits: Sequence[str], most: int = MOST) -> list[NotableGroup]:
    """Selects at most `most` groups of a run, alternating between these kinds:

    - the largest gains and the largest losses between the first and the last evaluation of each of `splits`
    - the groups with the largest spread of rewards, the best and the worst of the last quarter of training
    - groups with scoring errors

    Unreadable files are added to `run.notes`."""
    rows = _training(run)
    changes = [change for split in splits for change in _changes(run, split)]
    changes.sort(key=lambda change: change[0])
    gains = [t for difference, t in reversed(changes) if difference > 0]
    losses = [t for difference, t in changes if difference < 0]
    late = [row for row in rows if row.step >= 0.75 * max((r.step for r in rows), default=0)]
    mixed = _notable(sorted(late, key=lambda r: -r.std), lambda r: r.std > 0, lambda r: "mixed answers: rewards "
                      f"{number(r.mean)} ± {number(r.std)}, much to learn from")
    best = _notable(sorted(late, key=lambda r: -r.mean), lambda r: True, lambda r: f"among the best groups late in "
                     f"training: mean reward {number(r.mean)}")
    worst = _notable(sorted(late, key=lambda r: r.mean), lambda r: True, lambda r: f"among the worst groups late in "
                      f"training: mean reward {number(r.mean)}")
    errors = _notable(sorted(rows, key=lambda r: (-r.errors, -r.step)), lambda r: r.errors > 0,
                       lambda r: f"scoring failed for {r.errors} of its answers")
    return _in_turn([gains, losses, mixed, best, worst, errors], most)


def _in_turn(kinds: Sequence[list[NotableGroup]], most: int) -> list[NotableGroup]:
    picked: dict[Any, tuple[int, NotableGroup]] = {}
    for row in itertools.zip_longest(*kinds):
        for kind, telling in enumerate(row):
            if telling is not None and len(picked) < most:
                picked.setdefault(telling.key, (kind, telling))
    return [telling for _, telling in sorted(picked.values(), key=lambda item: item[0])]


def _notable(rows: Iterable[_Row], fits: Callable[[_Row], bool], why: Callable[[_Row], str]) -> list[NotableGroup]:
    return [NotableGroup(why(row), "train", "train", row.step, row.group) for row in rows if fits(row)]


def _training(run: RunFolder) -> list[_Row]:
    table = run.rollouts(columns=["step", "group_id", "reward", "error", "advantage", "variant"])
    aside = np.asarray(table["variant"].is_valid()) & np.asarray(table["advantage"].is_null())
    means = table.filter(pa.array(~aside)).group_by(["step", "group_id"]).aggregate(
        [("reward", "mean"), ("reward", "stddev"), ("error", "count")])
    return [_Row(r["step"], r["group_id"], r["reward_mean"], r["reward_stddev"] or 0.0, r["error_count"])
            for r in means.to_pylist() if _known(r["step"], r["group_id"], r["reward_mean"])]


def _known(step: Any, group: Any, reward: Any) -> bool:
    return step is not None and group is not None and reward is not None and math.isfinite(reward)


def _changes(run: RunFolder, split: str) -> list[tuple[float, NotableGroup]]:
    """Returns (gain in mean reward, group of the last evaluation) for each sample that both the first and the last
    stored evaluation of a split contain. [] if there are fewer than two evaluations."""
    table = run.rollouts(split=split, columns=["step", "sample_id", "group_id", "reward"])
    means = table.group_by(["step", "sample_id", "group_id"]).aggregate([("reward", "mean")]).to_pylist()
    means = [r for r in means if _known(r["step"], r["group_id"], r["reward_mean"])]
    steps = sorted({r["step"] for r in means})
    if len(steps) < 2:
        return []
    first = {r["sample_id"]: r for r in means if r["step"] == steps[0]}
    changes = []
    for row in (r for r in means if r["step"] == steps[-1] and r["sample_id"] in first):
        before = first[row["sample_id"]]
        gain = row["reward_mean"] - before["reward_mean"]
        rewards = [number(r["reward_mean"]) for r in (before, row)]
        why = (f"{'gained' if gain > 0 else 'lost'} {number(abs(gain))} on {split}: reward {rewards[0]} at step "
               f"{steps[0]} (the first answer), {rewards[1]} at step {steps[-1]} (the last)")
        group = NotableGroup(why, "eval", split, steps[-1], row["group_id"], (steps[0], before["group_id"]))
        changes.append((gain, group))
    return changes
