"""Analyses over many rollouts: the history of a prompt, comparisons of runs, and the curriculum. Imports no torch.

By default an answer passes if the run stored that it is correct. If a reward part or a threshold is requested, or if
the run does not store which answers are correct, an answer passes when its reward (or the requested part) is at least
the threshold. The default threshold is half of the largest value in the run's training and evaluation rollouts, or the
largest value itself if it is not positive."""

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
"""Edges of the six pass rate classes. The first class holds only the pass rate 0, and the last only the pass rate 1."""
_KEY = "run, source, split, step, group_id"
_RUNS = "(SELECT unnest(?::VARCHAR[]))"
_VALUE = ("CASE WHEN ?::BOOLEAN AND correct IS NOT NULL THEN correct::DOUBLE "
          "WHEN ?::VARCHAR IS NULL THEN reward ELSE part_values[list_position(part_names, ?::VARCHAR)] END")
"""SQL for the value that decides whether an answer passes: its correctness (1 or 0), its reward, or a reward part."""
CONTENT = ("first(sample_id) AS sample_id, coalesce(first(shown), first(media)) AS shown, first(target) AS target, "
           "min(prompt) AS prompt, bool_or(turns IS NOT NULL) AS episode")
"""SQL columns with the content of a sample (id, media, target, prompt, whether the sample is an episode). `item`
converts a row with these columns to an Item, to pair the samples of two runs."""
SAMPLE = "sample_id, coalesce(shown, media), target"
"""SQL columns that identify a sample: two answers belong to the same sample if these columns are equal."""
_EQUAL = 1e-9  # rewards that differ by less are a tie
_MOST_CATEGORIES = 40


@dataclass(frozen=True)
class Visit:
    """One group of answers to a sample, that is, one time the run asked this prompt."""

    key: GroupKey
    n: int
    """Number of answers."""
    mean: float | None
    """Mean reward of the scored answers. `mean`, `std`, `best` and `worst` are None if no answer is scored."""
    std: float | None
    best: float | None
    worst: float | None
    pass_rate: float | None
    """Share of the scored answers that pass, in [0, 1]."""
    visits: int
    """Number of training groups of this sample that the run has drawn so far; a training group counts itself."""
    weight: float | None
    """`visits` divided by the mean number of visits of all samples drawn so far in the run; 1 means that the sample was
    drawn as often as the average sample. None in evaluations."""


@dataclass(frozen=True)
class History:
    """Every group of answers to one sample, in one or more runs."""

    sample_id: str
    visits: tuple[Visit, ...]
    """Sorted by run, then by step, with training and evaluation groups interleaved."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Run id -> the lowest value (1 or 0 for a correct or wrong answer, the reward, or a reward part) that passes."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run, and the step of the evaluation to compare (None: the run's last evaluation)."""

    run: str
    step: int | None = None


@dataclass(frozen=True)
class Pair:
    """A sample that was evaluated on both sides, a and b, of a comparison. `a` and `b` are the mean rewards of its
    answers on the two sides, and `key_a` and `key_b` identify the groups of these answers."""

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
    """Two evaluations (or ranges of training steps), a and b, compared on their common samples. b wins a sample if the
    mean reward of b is higher."""

    a: Side
    b: Side
    """The second evaluation. In `a` and `b`, a step of None is replaced by the step of the run's last evaluation."""
    split: str
    n: int
    wins: int
    losses: int
    ties: int
    mean_a: Interval
    mean_b: Interval
    gain: Interval
    """Mean of b - a, paired over the samples, with a 95 % bootstrap interval."""
    pairs: tuple[Pair, ...]
    """Sorted by gain, largest first."""
    categories: tuple[tuple[str, int, int, int, int, float], ...] = ()
    """(category, number of samples, wins, losses, ties, mean gain) for each category, sorted by name."""
    only_a: int = 0
    """Number of samples that only a evaluated. `only_b` is the number of samples that only b evaluated."""
    only_b: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CategoryView:
    """Statistics of the training groups in one sample category, over the whole run."""

    name: str
    groups: int
    rollouts: int
    mean: float | None
    pass_rate: float | None
    zero_variance: float | None
    """Share of the category's groups in which all rewards are equal, in [0, 1]."""
    share: tuple[float, ...]
    """[bins] Share of this category among all groups drawn in each range of steps, in [0, 1]."""
    pass_rates: tuple[float | None, ...]
    """[bins] Pass rate of the category in each range of steps; None without scored answers."""


@dataclass(frozen=True)
class Curriculum:
    """The training groups of a run, binned by step."""

    run: str
    threshold: float | None
    """The lowest value with which an answer passes; None if no answer is scored."""
    judged: bool
    """True: answers pass if the run stored that they are correct. False: if their value is at least `threshold`."""
    bins: tuple[tuple[int, int], ...]
    """First and last training step of each range of steps; [bins] below means one value for each range."""
    edges: tuple[float, ...]
    """[classes + 1] Edges of the pass rate classes. Class i covers [edges[i], edges[i + 1]), but only the first class
    holds 0, and only the last class holds 1."""
    counts: tuple[tuple[int, ...], ...]
    """[bins][classes] Number of groups in each pass rate class."""
    wasted: tuple[float | None, ...]
    """[bins] Share of the rollouts that are in groups whose rewards are all equal and so give no gradient."""
    truncated: tuple[float | None, ...]
    """[bins] Share of the rollouts that are truncated."""
    errors: tuple[float | None, ...]
    dropped: tuple[float | None, ...]
    """[bins] Mean of the metric groups/wasted: the number of groups generated but not trained on."""
    categories: tuple[CategoryView, ...]
    weights: dict[str, tuple[tuple[int, float], ...]]
    """Metric name -> its (step, value) pairs, for every metric whose name begins with curriculum/."""
    notes: tuple[str, ...] = ()


def history(index: Index, sample_id: str, runs: Sequence[str] = (), *, part: str | None = None,
            threshold: float | None = None) -> History:
    """Collects every group of `sample_id` in the given runs (() = all runs). An answer passes if its reward, or its
    reward part `part`, is at least `threshold` (defaults: see the module). Raises AppError for an unknown run."""
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
    """Compares the evaluations `a` and `b` of a data split on the samples that both contain. If `split` is None, the
    first split that both runs evaluated is taken. Raises AppError if a run has no evaluation of the split at the
    given step, or if the evaluations have no sample in common."""
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
    """Builds the Comparison from paired samples. `samples` has the numbers of samples in a and b, paired or not."""
    pairs = sorted(pairs, key=lambda pair: (-pair.gain, pair.sample_id))
    before, after = [pair.a for pair in pairs], [pair.b for pair in pairs]
    names = sorted({pair.category for pair in pairs if pair.category is not None})
    return Comparison(
        a, b, split, len(pairs), *_outcomes(pairs), mean_ci(before), mean_ci(after), paired_gain(before, after),
        tuple(pairs), tuple(_category_outcomes(name, [p for p in pairs if p.category == name]) for name in names),
        samples[0] - len(pairs), samples[1] - len(pairs), notes)


def curriculum(index: Index, library: Library, run: str, *, part: str | None = None, threshold: float | None = None,
               bins: int = 24) -> Curriculum:
    """Summarizes the training groups of a run in at most `bins` ranges of steps. An answer passes if its reward, or its
    reward part `part`, is at least `threshold` (defaults: see the module). Raises AppError for an unknown run."""
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


def _value(part: str | None, threshold: float | None) -> list[Any]:
    return [part is None and threshold is None, part, part]


def _thresholds(index: Index, runs: Sequence[str], part: str | None, given: float | None) -> dict[str, float]:
    """Returns {run id: lowest value with which an answer passes}, for the runs with scored answers. `part` is the
    reward part that decides, or None. The value is `given`; if that is None, the default (see the module)."""
    rows = index.table.fetch(f"""
        SELECT run, max({_VALUE}) AS best, bool_or(correct IS NOT NULL) AS judged
        FROM rollouts WHERE run IN {_RUNS} GROUP BY run""", [*_value(part, given), list(runs)])
    known = [row for row in rows if row["best"] is not None]
    if part is None and given is None:  # the verdict is 0 or 1
        return {r["run"]: 0.5 if r["judged"] else r["best"] / 2 if r["best"] > 0 else r["best"] for r in known}
    half = {r["run"]: r["best"] / 2 if r["best"] > 0 else r["best"] for r in known}
    return half if given is None else dict.fromkeys(half, float(given))


def _judged(index: Index, run: str) -> bool:
    """Whether the run stored a verdict (correct or wrong) for at least one of its answers."""
    rows = index.table.fetch("SELECT bool_or(correct IS NOT NULL) AS judged FROM rollouts WHERE run = ?", [run])
    return bool(rows[0]["judged"])


def _pass_rate(values: Sequence[float | None], threshold: float | None) -> float | None:
    scored = [v for v in values if v is not None]
    return sum(v >= threshold for v in scored) / len(scored) if scored and threshold is not None else None


def _of_one_sample(rows: Sequence[_Row]) -> tuple[list[_Row], list[str]]:
    """Reduces `rows`, which have the same sample id, to the rows of the most frequent sample; returns these rows, and
    notes on the other rows. An id belongs to different samples if runs use it for different media or targets."""
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
        notes.append(f"{len(rows) - len(same):,} groups with this id are left out, because they are of another sample "
                     f"(other {', '.join(differs) or 'content'}: another data.seed, or other rows), in the runs "
                     f"{', '.join(others[:5])}.")
    if any(pairing.reworded for pairing in pairings.values()):
        notes.append("Some groups of this sample were asked in other words (another task.prompt, or a model with "
                     "another chat template).")
    return same, notes


def _drawn(index: Index, run: str) -> Callable[[int], float]:
    """Returns a function step -> mean number of training groups per sample, over the samples drawn until that step."""
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


def _common_split(index: Index, a: Side, b: Side) -> str:
    rows = index.table.fetch(f"""
        SELECT split FROM rollouts WHERE source = 'eval' AND run IN {_RUNS}
        GROUP BY split HAVING count(DISTINCT run) = ? ORDER BY split LIMIT 1""",
        [[a.run, b.run], len({a.run, b.run})])
    if not rows:
        raise AppError(f"runs {a.run!r} and {b.run!r} have no evaluated split in common. A run is evaluated "
                       "before its first step, every eval.every steps, and after its last step")
    return rows[0]["split"]


_Row = dict[str, Any]


def item(row: _Row) -> Item:
    """Converts a row with the columns of CONTENT to an Item for pairing samples. The row becomes `Item.value`."""
    return Item(row["sample_id"], (row["shown"],) if row["shown"] else (), row["prompt"] or "", str(row["target"]),
                episode=bool(row["episode"]), value=row)


def matched(first: Sequence[_Row], second: Sequence[_Row]) -> tuple[list[tuple[_Row, _Row]], str]:
    """Pairs the rows of two runs or evaluations that belong to the same sample; returns the pairs, and a text on
    unmatched rows. Samples are the same if their content is equal, see vlrl.tools.experiments.pairs."""
    pairing = pair([item(row) for row in first], [item(row) for row in second])
    return [(one.value, other.value) for one, other in pairing.pairs], " ".join(
        f"{words.rstrip('.')}." for words in pairing.notes("A", "B"))


def _evaluated(index: Index, side: Side, split: str) -> tuple[Side, list[_Row]]:
    """Finds the evaluation of `split` that `side` asks for; returns `side` with its step filled in, and a row for each
    sample (mean reward, category, group, content). Raises AppError if there is no such evaluation."""
    records = index.table.fetch("SELECT DISTINCT step FROM rollouts WHERE source = 'eval' AND run = ? AND split = ? "
                                "ORDER BY step", [side.run, split])
    steps = [row["step"] for row in records]
    step = side.step if side.step is not None else max(steps, default=None)
    if step not in steps or step is None:
        at = ", ".join(map(str, steps[-20:]))
        available = f"it was evaluated at steps {at}" if steps else "no such split is stored"
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
    wins, losses = sum(p.gain > _EQUAL for p in pairs), sum(p.gain < -_EQUAL for p in pairs)
    return wins, losses, len(pairs) - wins - losses


def _category_outcomes(name: str, pairs: Sequence[Pair]) -> tuple[str, int, int, int, int, float]:
    return name, len(pairs), *_outcomes(pairs), sum(p.gain for p in pairs) / len(pairs)


def _spans(steps: Sequence[int], bins: int) -> list[tuple[int, int]]:
    if not steps:
        return []
    width = max(1, math.ceil((steps[-1] - steps[0] + 1) / max(1, bins)))
    return [(first, min(first + width - 1, steps[-1])) for first in range(steps[0], steps[-1] + 1, width)]


def _classes(rows: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    counts = [0] * (len(EDGES) - 1)
    for row in rows:
        if row["valued"]:
            rate = row["passed"] / row["valued"]
            counts[0 if rate == 0 else len(counts) - 1 if rate == 1 else bisect_right(EDGES, rate) - 1] += 1
    return tuple(counts)


def _share(rows: Sequence[dict[str, Any]], count: Callable[[dict[str, Any]], int]) -> float | None:
    total = sum(row["n"] for row in rows)
    return sum(map(count, rows)) / total if total else None


def _categories(rows: Sequence[dict[str, Any]], binned: Sequence[Sequence[dict[str, Any]]]) -> Iterator[CategoryView]:
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
