"""Analyses over many rollouts: the history of a prompt, comparisons of runs, the curriculum. No torch.

An answer passes if the run marked it correct. If a `part` or `threshold` is given, or the run stores no verdicts, it
passes if its reward (or that part) reaches the threshold: by default half of the largest value in the run, training
and evaluations together, or that value itself if it is not positive.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from vlrl.evaluation.stats import Interval, mean_ci, paired_gain
from vlrl.tools.experiments.pairs import Item, pair

from . import AppError
from .html import finite
from .index import GroupKey, Index
from .library import Library

EDGES = (0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0)
"""Edges of the pass rate bins."""
_KEY = "run, source, split, step, group_id"
_RUNS = "(SELECT unnest(?::VARCHAR[]))"
_VALUE = ("CASE WHEN ?::BOOLEAN AND correct IS NOT NULL THEN correct::DOUBLE "
          "WHEN ?::VARCHAR IS NULL THEN reward ELSE part_values[list_position(part_names, ?::VARCHAR)] END")
"""SQL of the value an answer is judged by: the verdict, the reward, or the named part."""
CONTENT = ("first(sample_id) AS sample_id, coalesce(first(shown), first(media)) AS shown, first(target) AS target, "
           "min(prompt) AS prompt, bool_or(turns IS NOT NULL) AS episode")
"""Columns that identify the content of a sample; `item` uses them for pairing."""
SAMPLE = "sample_id, coalesce(shown, media), target"
"""Answers equal in these belong to one sample."""
_EQUAL = 1e-9  # rewards that are as near are a tie
_MOST_CATEGORIES = 40


@dataclass(frozen=True)
class Visit:
    """One group of a sample: a visit of the run to this prompt."""

    key: GroupKey
    n: int
    """Number of answers."""
    mean: float | None
    """Of the reward, as the next three; None without a scored answer."""
    std: float | None
    best: float | None
    worst: float | None
    pass_rate: float | None
    """In [0, 1], over the scored answers."""
    visits: int
    """Number of training groups of this sample in the run so far, including this one."""
    weight: float | None
    """visits / mean visits of all samples drawn so far in the run: 1 = drawn as often as the average."""


@dataclass(frozen=True)
class History:
    """Every group of one sample."""

    sample_id: str
    visits: tuple[Visit, ...]
    """By run, then step; evaluations in between."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Run -> reward at which an answer passes."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the evaluation of a run after `step` steps; None = the last one."""

    run: str
    step: int | None = None


@dataclass(frozen=True)
class Pair:
    """One sample on both sides; rewards are means over its scored answers."""

    sample_id: str
    category: str | None
    a: float
    b: float
    key_a: GroupKey
    key_b: GroupKey

    @property
    def gain(self) -> float:
        return self.b - self.a


@dataclass(frozen=True)
class Comparison:
    """Two sides over their common samples. A win is a sample on which b has the larger mean reward."""

    a: Side
    b: Side
    """Both with the resolved step."""
    split: str
    n: int
    wins: int
    losses: int
    ties: int
    mean_a: Interval
    mean_b: Interval
    gain: Interval
    """b - a, paired over the samples, with a 95 % bootstrap interval."""
    pairs: tuple[Pair, ...]
    """By gain, largest first."""
    categories: tuple[tuple[str, int, int, int, int, float], ...] = ()
    """(category, n, wins, losses, ties, mean gain), by name."""
    only_a: int = 0
    """Samples that b does not have."""
    only_b: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CategoryView:
    """One category of the training data over the whole run."""

    name: str
    groups: int
    rollouts: int
    mean: float | None
    pass_rate: float | None
    zero_variance: float | None
    """Share of its groups, in [0, 1]."""
    share: tuple[float, ...]
    """[bins] share of all groups drawn in those steps, in [0, 1]: the weight given by the curriculum."""
    pass_rates: tuple[float | None, ...]
    """[bins]"""


@dataclass(frozen=True)
class Curriculum:
    """The training groups of a run, binned by step."""

    run: str
    threshold: float | None
    """The reward at which an answer passes; None if nothing was scored."""
    judged: bool
    """Whether answers pass by the stored verdict instead of a threshold."""
    bins: tuple[tuple[int, int], ...]
    """First and last step of each bin."""
    edges: tuple[float, ...]
    """[classes + 1] edges of the pass rate classes: class i is [edges[i], edges[i + 1]), but the first and the last
    hold exactly 0 and 1.
    """
    counts: tuple[tuple[int, ...], ...]
    """[bins][classes] groups by pass rate."""
    wasted: tuple[float | None, ...]
    """[bins] share of rollouts in groups with equal rewards, which give no gradient."""
    truncated: tuple[float | None, ...]
    """[bins] share of rollouts."""
    errors: tuple[float | None, ...]
    dropped: tuple[float | None, ...]
    """[bins] mean of the metric groups/wasted: groups generated but not trained on."""
    categories: tuple[CategoryView, ...]
    weights: dict[str, tuple[tuple[int, float], ...]]
    """Name -> (step, value) of every metric curriculum/...."""
    notes: tuple[str, ...] = ()


def history(index: Index, sample_id: str, runs: Sequence[str] = (), *, part: str | None = None,
            threshold: float | None = None) -> History:
    """Every group of `sample_id` in some runs (() = all). Raises AppError for an unknown run."""
    scope = index.refresh(runs)
    limits = _thresholds(index, scope.runs, part, threshold)
    rows = index.table.fetch(f"""
        SELECT {_KEY}, count(*) AS n, avg(reward) AS mean, round(stddev_samp(reward), 12) AS std, max(reward) AS best,
               min(reward) AS worst, list({_VALUE}) AS scored,
               {CONTENT}
        FROM rollouts WHERE sample_id = ? AND run IN {_RUNS} AND NOT aside GROUP BY {_KEY}
        ORDER BY run, step, source DESC, split, group_id""", [*_value(part, threshold), sample_id, scope.runs])
    rows, notes = _of_one_sample(rows)
    drawn = {run: _drawn(index, run) for run in {row["run"] for row in rows}}
    visits, sums = [], dict[str, int]()
    for row in rows:
        run, training = row["run"], row["source"] == "train"
        sums[run] = sums.get(run, 0) + training
        usual = drawn[run](row["step"])
        visits.append(Visit(
            GroupKey(*(row[name] for name in _KEY.split(", "))), row["n"], row["mean"],
            0.0 if row["best"] is not None and row["best"] == row["worst"] else row["std"], row["best"], row["worst"],
            _pass_rate(row["scored"], limits.get(run)), sums[run], sums[run] / usual if training and usual else None))
    return History(sample_id, tuple(visits), {run: limits[run] for run in drawn if run in limits},
                   (*scope.notes, *notes))


def compare(index: Index, a: Side, b: Side, split: str | None = None) -> Comparison:
    """Compares two evaluations over their common samples; `split` None selects the first common split.

    Raises AppError if a side has no such evaluation, or no sample is in both.
    """
    scope = index.refresh(list(dict.fromkeys((a.run, b.run))))
    split = split or _common_split(index, a, b)
    (a, first), (b, second) = (_evaluated(index, side, split) for side in (a, b))
    both, others = matched(first, second)
    if not both:
        raise AppError(f"the evaluations of {split!r} in run {a.run!r} at step {a.step} and run {b.run!r} at step "
                       f"{b.step} have no sample in common{f'. {others}' if others else ''}")
    pairs = [Pair(one["sample_id"], one["category"], one["mean"], other["mean"], _eval_key(a, split, one),
                  _eval_key(b, split, other)) for one, other in both]
    return comparison(a, b, split, pairs, (len(first), len(second)),
                      (*([others] if others else ()), *scope.notes))


def comparison(a: Side, b: Side, split: str, pairs: Sequence[Pair], samples: tuple[int, int],
               notes: tuple[str, ...]) -> Comparison:
    """The Comparison of paired samples; `samples`: the number on each side."""
    pairs = sorted(pairs, key=lambda pair: (-pair.gain, pair.sample_id))
    before, after = [pair.a for pair in pairs], [pair.b for pair in pairs]
    names = sorted({pair.category for pair in pairs if pair.category is not None})
    return Comparison(
        a, b, split, len(pairs), *_outcomes(pairs), mean_ci(before), mean_ci(after), paired_gain(before, after),
        tuple(pairs), tuple(_category_outcomes(name, [p for p in pairs if p.category == name]) for name in names),
        samples[0] - len(pairs), samples[1] - len(pairs), notes)


def curriculum(index: Index, library: Library, run: str, *, part: str | None = None, threshold: float | None = None,
               bins: int = 24) -> Curriculum:
    """The training samples of a run and their results over `bins` ranges of steps. Raises AppError for an unknown run.
    """
    scope = index.refresh([run])
    limit = _thresholds(index, [run], part, threshold).get(run)
    rows = index.table.fetch(f"""
        SELECT step, first(category) AS category, count(*) AS n, sum(reward) AS total, count(reward) AS scored,
               count(DISTINCT reward) < 2 AS equal, count(*) FILTER (truncated) AS truncated, count(error) AS errors,
               count({_VALUE}) AS valued, count(*) FILTER ({_VALUE} >= ?) AS passed
        FROM rollouts WHERE run = ? AND source = 'train' AND NOT aside GROUP BY {_KEY} ORDER BY step""",
        [*_value(part, threshold) * 2, limit, run])
    metrics = library.metrics(run)
    names = sorted({name for line in metrics for name in line if name.startswith("curriculum/")})
    weights = {name: tuple((line["step"], value) for line in metrics if (value := finite(line.get(name))) is not None)
               for name in names}
    spans = _spans([row["step"] for row in rows], bins)
    binned = [[row for row in rows if first <= row["step"] <= last] for first, last in spans]
    wasted = [(line["step"], value) for line in metrics if (value := finite(line.get("groups/wasted"))) is not None]
    dropped = [_mean([value for step, value in wasted if first <= step <= last]) for first, last in spans]
    return Curriculum(
        run, limit, part is None and threshold is None and _judged(index, run), tuple(spans), EDGES,
        tuple(_classes(of_bin) for of_bin in binned),
        tuple(_share(of_bin, lambda row: row["n"] if row["equal"] else 0) for of_bin in binned),
        tuple(_share(of_bin, lambda row: row["truncated"]) for of_bin in binned),
        tuple(_share(of_bin, lambda row: row["errors"]) for of_bin in binned), tuple(dropped),
        tuple(_categories(rows, binned)), weights, scope.notes)


# --- passing ----------------------------------------------------------------------------------------------------------


def _value(part: str | None, threshold: float | None) -> list[Any]:
    """The parameters of _VALUE."""
    return [part is None and threshold is None, part, part]


def _thresholds(index: Index, runs: Sequence[str], part: str | None, given: float | None) -> dict[str, float]:
    """Run -> value at which an answer passes; runs without a scored answer are missing."""
    rows = index.table.fetch(f"""
        SELECT run, max({_VALUE}) AS best, bool_or(correct IS NOT NULL) AS judged
        FROM rollouts WHERE run IN {_RUNS} GROUP BY run""", [*_value(part, given), list(runs)])
    known = [row for row in rows if row["best"] is not None]
    if part is None and given is None:  # whether an answer is correct is 0 or 1
        return {r["run"]: 0.5 if r["judged"] else r["best"] / 2 if r["best"] > 0 else r["best"] for r in known}
    half = {r["run"]: r["best"] / 2 if r["best"] > 0 else r["best"] for r in known}
    return half if given is None else dict.fromkeys(half, float(given))


def _judged(index: Index, run: str) -> bool:
    """Whether a run stores a verdict on its answers."""
    rows = index.table.fetch("SELECT bool_or(correct IS NOT NULL) AS judged FROM rollouts WHERE run = ?", [run])
    return bool(rows[0]["judged"])


def _pass_rate(values: Sequence[float | None], threshold: float | None) -> float | None:
    scored = [v for v in values if v is not None]
    return sum(v >= threshold for v in scored) / len(scored) if scored and threshold is not None else None


# --- history ----------------------------------------------------------------------------------------------------------


def _of_one_sample(rows: Sequence[_Row]) -> tuple[list[_Row], list[str]]:
    """The rows of the most frequent sample among those with this id, and a note on the others.

    Runs may use the same id for different images, or ask about the same image in other words.
    """
    counts = Counter(item(row)._replace(value=None) for row in rows)
    if len(counts) < 2:
        return list(rows), []
    usual = max(counts, key=lambda content: counts[content])
    pairings = {content: pair([usual], [content]) for content in counts}
    same = [row for row in rows if pairings[item(row)._replace(value=None)].pairs]
    notes, same_ids = [], {id(row) for row in same}
    if len(same) < len(rows):
        others = sorted({row["run"] for row in rows if id(row) not in same_ids})
        differs = sorted({word for pairing in pairings.values() for left in pairing.second for word in left.differs})
        notes.append(f"{len(rows) - len(same):,} groups of this id are of another sample (other "
                     f"{', '.join(differs) or 'content'}: another data.seed, or other rows) and are left out, of "
                     f"{', '.join(others[:5])}.")
    if any(pairing.reworded for pairing in pairings.values()):
        notes.append("Some of its groups were asked in other words (another task.prompt, or a model with another chat "
                     "template).")
    return same, notes


def _drawn(index: Index, run: str) -> Callable[[int], float]:
    """The mean number of training groups per drawn sample up to a step."""
    rows = index.table.fetch("""
        WITH drawn AS (SELECT DISTINCT step, split, group_id, sample_id FROM rollouts
                       WHERE run = ? AND source = 'train'),
             first AS (SELECT min(step) AS step, sample_id FROM drawn GROUP BY sample_id)
        SELECT step, count(*) AS groups, (SELECT count(*) FROM first WHERE first.step = drawn.step) AS fresh
        FROM drawn GROUP BY step ORDER BY step""", [run])
    steps = [row["step"] for row in rows]
    groups = list(accumulate(row["groups"] for row in rows))
    samples = list(accumulate(row["fresh"] for row in rows))

    def mean(step: int) -> float:
        place = bisect_right(steps, step) - 1
        return groups[place] / samples[place] if place >= 0 else 0.0

    return mean


# --- comparing --------------------------------------------------------------------------------------------------------


def _common_split(index: Index, a: Side, b: Side) -> str:
    rows = index.table.fetch(f"""
        SELECT split FROM rollouts WHERE source = 'eval' AND run IN {_RUNS}
        GROUP BY split HAVING count(DISTINCT run) = ? ORDER BY split LIMIT 1""",
        [[a.run, b.run], len({a.run, b.run})])
    if not rows:
        raise AppError(f"runs {a.run!r} and {b.run!r} have no evaluated split in common. Evaluations run every "
                       "eval.every steps, before the first and after the last")
    return rows[0]["split"]


_Row = dict[str, Any]


def item(row: _Row) -> Item:
    """A row with the columns of CONTENT as an item for pairing; its value is the row."""
    return Item(row["sample_id"], (row["shown"],) if row["shown"] else (), row["prompt"] or "", str(row["target"]),
                episode=bool(row["episode"]), value=row)


def matched(first: Sequence[_Row], second: Sequence[_Row]) -> tuple[list[tuple[_Row, _Row]], str]:
    """Rows of the same sample on both sides, and notes on the unmatched ones.

    Samples are equal if media, prompt and target are (vlrl.tools.experiments.pairs).
    """
    pairing = pair([item(row) for row in first], [item(row) for row in second])
    return [(one.value, other.value) for one, other in pairing.pairs], " ".join(
        f"{words.rstrip('.')}." for words in pairing.notes("A", "B"))


def _evaluated(index: Index, side: Side, split: str) -> tuple[Side, list[_Row]]:
    """The side with its step, and mean reward, category, group and content of each sample."""
    records = index.table.fetch("SELECT DISTINCT step FROM rollouts WHERE source = 'eval' AND run = ? AND split = ? "
                                "ORDER BY step", [side.run, split])
    steps = [row["step"] for row in records]
    step = side.step if side.step is not None else max(steps, default=None)
    if step not in steps or step is None:
        available = f"it was evaluated at steps {', '.join(map(str, steps[-20:]))}" if steps else "it has none"
        raise AppError(f"run {side.run!r} has no evaluation of {split!r}"
                       f"{'' if step is None else f' at step {step}'}: {available}")
    rows = index.table.fetch(f"""
        SELECT avg(reward) AS mean, first(category) AS category, min(group_id) AS group_id, {CONTENT} FROM rollouts
        WHERE source = 'eval' AND run = ? AND split = ? AND step = ? AND NOT aside AND reward IS NOT NULL
        GROUP BY {SAMPLE} ORDER BY first(sample_id), min(group_id)""", [side.run, split, step])
    return Side(side.run, step), rows


def _eval_key(side: Side, split: str, row: dict[str, Any]) -> GroupKey:
    assert side.step is not None
    return GroupKey(side.run, "eval", split, side.step, row["group_id"])


def _outcomes(pairs: Sequence[Pair]) -> tuple[int, int, int]:
    """Number of wins, losses and ties of b."""
    wins, losses = sum(p.gain > _EQUAL for p in pairs), sum(p.gain < -_EQUAL for p in pairs)
    return wins, losses, len(pairs) - wins - losses


def _category_outcomes(name: str, pairs: Sequence[Pair]) -> tuple[str, int, int, int, int, float]:
    return name, len(pairs), *_outcomes(pairs), sum(p.gain for p in pairs) / len(pairs)


# --- the curriculum ---------------------------------------------------------------------------------------------------


def _spans(steps: Sequence[int], bins: int) -> list[tuple[int, int]]:
    """At most `bins` ranges of equally many steps that cover the ascending `steps`."""
    if not steps:
        return []
    width = max(1, math.ceil((steps[-1] - steps[0] + 1) / max(1, bins)))
    return [(first, min(first + width - 1, steps[-1])) for first in range(steps[0], steps[-1] + 1, width)]


def _classes(rows: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """[classes] number of groups by pass rate; groups without a scored answer are not counted."""
    counts = [0] * (len(EDGES) - 1)
    for row in rows:
        if row["valued"]:
            rate = row["passed"] / row["valued"]
            counts[0 if rate == 0 else len(counts) - 1 if rate == 1 else bisect_right(EDGES, rate) - 1] += 1
    return tuple(counts)


def _share(rows: Sequence[dict[str, Any]], count: Callable[[dict[str, Any]], int]) -> float | None:
    """Share of the rollouts."""
    total = sum(row["n"] for row in rows)
    return sum(map(count, rows)) / total if total else None


def _categories(rows: Sequence[dict[str, Any]], binned: Sequence[Sequence[dict[str, Any]]]) -> Iterator[CategoryView]:
    """Yields the categories with the most groups, by name."""
    common = Counter(row["category"] for row in rows if row["category"] is not None).most_common(_MOST_CATEGORIES)
    for name in sorted(name for name, _ in common):
        own = [row for row in rows if row["category"] == name]
        of_bins = [[row for row in of_bin if row["category"] == name] for of_bin in binned]
        scored = sum(row["scored"] for row in own)
        yield CategoryView(
            name, len(own), sum(row["n"] for row in own),
            sum(row["total"] or 0.0 for row in own) / scored if scored else None, _passed(own),
            sum(row["equal"] for row in own) / len(own),
            tuple(len(mine) / len(all_) if all_ else 0.0 for mine, all_ in zip(of_bins, binned, strict=True)),
            tuple(map(_passed, of_bins)))


def _passed(rows: Sequence[dict[str, Any]]) -> float | None:
    valued = sum(row["valued"] for row in rows)
    return sum(row["passed"] for row in rows) / valued if valued else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
