"""Compares two evaluations on the samples that they have in common, from the answers in run folders. Does not import
torch.

found = compare([parse_side("runs/a")], [parse_side("runs/b@50")])
found.metrics["reward/mean"].difference, found.verdict"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vlrl.errors import RunError, did_you_mean
from vlrl.evaluation.stats import Interval, mean_ci
from vlrl.store import RunFolder, checkpoint
from vlrl.tools.experiments.differences import difference, effect_size, outcomes
from vlrl.tools.experiments.pairs import COLUMNS, VALUE_COLUMNS, Item, Pairing, items, pair, sample_means

_STEPS = ("first", "last", "best")
_READ = (*COLUMNS, *VALUE_COLUMNS, "step", "completion")


@dataclass(frozen=True)
class Side:
    """One evaluation of the run in `folder`: the evaluation after `step` completed training steps. `step` may also be
    first, last or best."""

    folder: Path
    step: int | Literal["first", "last", "best"] = "last"

    def __str__(self) -> str:
        return f"{self.folder}@{self.step}"


class Metric(NamedTuple):
    """One metric of a comparison: its mean on side a and on side b, and the mean difference b - a. Only the `n` samples
    that have a value on both sides count. `effect` is the effect size (Cohen's d)."""

    n: int
    a: Interval
    b: Interval
    difference: Interval  # mean of b - a over the pairs of samples, with its 95 % interval
    effect: float


class Outcome(NamedTuple):
    """One sample of a comparison: its scores on side a and on side b, and one answer of each side. A score is the mean
    over the side's seeds and answers."""

    id: str
    other: str  # the id of the sample in b, usually equal to `id`
    a: float
    b: float
    answers: tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """The result of comparing side b with side a on one split. A side is one evaluation, or the evaluations of several
    runs that differ in the seed."""

    a: tuple[Side, ...]
    b: tuple[Side, ...]
    """The evaluations of side b. In `a` and `b`, the `step` of each Side is a number, not a name like "last"."""
    split: str
    metric: str  # the metric that decides which side wins a sample
    metrics: dict[str, Metric]
    wins: int
    losses: int
    ties: int
    samples: tuple[Outcome, ...]  # the compared samples, sorted by the gain of b over a, the largest gain first
    unpaired: int  # number of evaluated samples, summed over all runs, that have no counterpart in another run
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One sentence that says whether side b differs from side a in the metric `metric`."""
        paired = self.metrics[self.metric]
        change, where = paired.difference, f"{self.metric} on {paired.n:,} samples of {self.split}"
        if math.isnan(change.low):
            return f"no difference can be shown: {where} are too few for an interval"
        bounds = f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
        if change.low <= 0 <= change.high:
            return f"no difference shown: {where}, b - a is {bounds}, and the 95 % interval includes 0"
        return f"b is {'higher' if change.mean > 0 else 'lower'} than a: {where}, b - a is {bounds}"

    def plain(self) -> dict[str, Any]:
        """The comparison as the JSON value that `vlrl compare --json` prints."""
        metrics = {name: {"a": m.a.mean, "b": m.b.mean, "difference": m.difference.mean, "low": m.difference.low,
                          "high": m.difference.high, "n": m.n, "effect": m.effect} for name, m in self.metrics.items()}
        samples = [{"id": s.id, "other": s.other, "a": s.a, "b": s.b} for s in self.samples]
        names = ("split", "metric", "wins", "losses", "ties", "unpaired", "verdict", "notes")
        return {"a": [*map(str, self.a)], "b": [*map(str, self.b)], "metrics": metrics, "samples": samples,
                **{name: getattr(self, name) for name in names}}


def parse_side(text: str) -> Side:
    """Parses `RUN` or `RUN@STEP` into a Side. RUN is a run folder. STEP is a number of completed steps, or one of
    first, last and best; the default is last.

    Raises RunError if the folder RUN does not exist or contains no evaluated answers, or if STEP is invalid."""
    name, _, step = (text, "", "last") if os.path.isdir(text) or "@" not in text else text.rpartition("@")
    if not os.path.isdir(Path(name) / "eval-rollouts"):
        raise RunError(f"{name!r} holds no evaluated answers (eval-rollouts/): name a run folder such as "
                       "runs/quickstart, or a folder written by `vlrl eval CONFIG --rollouts FOLDER`. A run stores "
                       "its answers if store.rollouts=true and eval.samples is above 0")
    if step not in _STEPS and not step.isdecimal():
        raise RunError(f"{text!r}: @{step} is not a step: give a number of completed steps, or one of "
                       f"{', '.join(_STEPS)}")
    return Side(Path(name), int(step) if step.isdecimal() else step)  # type: ignore[arg-type]


def compare(a: Sequence[Side], b: Sequence[Side], split: str | None = None, metric: str = "reward/mean", *,
            seed: int = 0) -> Comparison:
    """Compares the evaluations `b` with the evaluations `a` on the samples that all these evaluations contain. Each of
    the two sides is one evaluation, or the evaluations of several runs that differ in the seed. Samples are paired
    by content (pairs.py).

    split: the split to compare; by default heldout, or else the first split that all runs were evaluated on. metric:
    the metric that decides which side wins a sample. seed: for the resampling. With several runs per side, both seeds
    and samples are resampled (differences.difference). Each metric is computed from the samples that have a value on
    both sides.

    Raises RunError if a run has no evaluation of the split or step, if no sample is in all evaluations, or if no answer
    has the metric."""
    split = split or _common_split([*a, *b])
    settled = [_resolved(one, split) for one in (*a, *b)]
    evaluated = [_read_items(one, split) for one in settled]
    matched, unpaired, notes = _match_samples(evaluated, [str(one) for one in settled])
    if not matched:
        raise RunError(f"no sample of {split!r} is in all of the evaluations {', '.join(map(str, settled))}. "
                       f"{'; '.join(notes)}")
    runs = [[sample_means(row.value) for row in run] for run in zip(*matched, strict=True)]
    names_by_run = [dict.fromkeys(name for sample in run for name in sample) for run in runs]
    names = [name for name in names_by_run[0] if all(name in others for others in names_by_run)]
    tables = {name: _metric(runs[:len(a)], runs[len(a):], name, seed) for name in names}
    if metric not in tables:
        raise RunError(f"no answer has the metric {metric!r}.{did_you_mean(metric, tables)} The answers have: "
                       f"{', '.join(tables)}. A metric of a whole split, such as mAP, has no value for one sample")
    samples = _outcomes(matched, runs, len(a), metric)
    won = outcomes(np.array([s.a for s in samples]), np.array([s.b for s in samples]))
    first = {metric: tables.pop(metric)}
    if min(len(a), len(b)) == 1 < max(len(a), len(b)):
        notes = [*notes, "one side has a single run, so the intervals do not include the variation between seeds"]
    return Comparison(tuple(settled[:len(a)]), tuple(settled[len(a):]), split, metric, first | tables, *won, samples,
                      unpaired, tuple(notes))


# --- what was evaluated -----------------------------------------------------------------------------------------------


def _common_split(sides: Sequence[Side]) -> str:
    splits = [{name for _, _, name in RunFolder(one.folder).rollout_files("eval-rollouts") if name} for one in sides]
    common = set.intersection(*splits)
    if not common:
        raise RunError("no split was evaluated in every run: " + "; ".join(
            f"{one.folder} has {', '.join(sorted(names)) or 'none'}" for one, names in zip(sides, splits, strict=True)))
    return "heldout" if "heldout" in common else min(common)


def _resolved(one: Side, split: str) -> Side:
    files = RunFolder(one.folder).rollout_files("eval-rollouts")
    steps = sorted({step for _, steps, name in files if name == split for step in steps})
    best = checkpoint.best_record(one.folder / "checkpoints").get("step")
    named = {"first": steps[0], "last": steps[-1], "best": best} if steps else {}
    step = named.get(one.step) if isinstance(one.step, str) else one.step
    if step is None or step not in steps:
        there = f"there are answers at steps {', '.join(map(str, steps[-20:]))}" if steps else "this split has none"
        raise RunError(f"{one.folder} has no answers to {split!r} at step {one.step}: {there}. Give another step as "
                       f"{one.folder}@STEP, or another --split")
    return Side(one.folder, step)


def _read_items(one: Side, split: str) -> list[Item]:
    run = RunFolder(one.folder)
    assert isinstance(one.step, int)
    rows = run.rollouts(one.step, split=split, columns=_READ).to_pylist()
    if run.notes:
        raise RunError(f"{one}: {run.notes[0]}. Without the answers in this file the comparison would cover "
                       "fewer samples. Evaluate the model again, e.g. with vlrl eval CONFIG --rollouts FOLDER")
    return items(rows)


def _match_samples(evaluated: Sequence[list[Item]], names: Sequence[str]
                   ) -> tuple[list[tuple[Item, ...]], int, list[str]]:
    """Matches the samples of several evaluations, which are called `names` in the notes. Returns three values: a tuple
    of matching items (one per evaluation) for each sample that all evaluations contain, in the order of the first
    evaluation; the number of other samples, summed over the evaluations; notes on why these were not matched."""
    first, *others = evaluated
    pairings: list[Pairing] = [pair(first, other) for other in others]
    partners = [{id(one): other for one, other in pairing.pairs} for pairing in pairings]
    matched = [(item, *(own[id(item)] for own in partners)) for item in first
               if all(id(item) in own for own in partners)]
    notes = [line for name, pairing in zip(names[1:], pairings, strict=True) for line in pairing.notes(names[0], name)]
    return matched, sum(map(len, evaluated)) - len(matched) * len(evaluated), list(dict.fromkeys(notes))


# --- metrics ----------------------------------------------------------------------------------------------------------

def _metric(a: Sequence[Sequence[dict[str, float]]], b: Sequence[Sequence[dict[str, float]]], name: str,
            seed: int) -> Metric:
    scores = np.array([[values.get(name, np.nan) for values in run] for run in (*a, *b)])
    scores = scores[:, np.isfinite(scores).all(axis=0)]
    first, second = scores[:len(a)], scores[len(a):]
    return Metric(scores.shape[1], mean_ci(first.mean(axis=0), seed), mean_ci(second.mean(axis=0), seed),
                  difference(first, second, seed), effect_size(first, second))


def _outcomes(matched: Sequence[tuple[Item, ...]], runs: Sequence[Sequence[dict[str, float]]], n: int, metric: str
             ) -> tuple[Outcome, ...]:
    outcomes = []
    for place, row in enumerate(matched):
        values = [run[place].get(metric) for run in runs]
        if None not in values:
            means = (float(np.mean(values[:n])), float(np.mean(values[n:])))  # type: ignore[arg-type]
            answers = (row[0].value[0]["completion"] or "", row[n].value[0]["completion"] or "")
            outcomes.append(Outcome(row[0].id, row[n].id, *means, answers))
    return tuple(sorted(outcomes, key=lambda s: (s.a - s.b, s.id)))
