"""Reads all rollouts that match a query, and compares ranges of training steps and their reward parts."""

from typing import Any, NamedTuple

from vlrl.evaluation.stats import Interval, paired_gain

from . import AppError
from .analysis import CONTENT, SAMPLE, Comparison, Pair, Side, comparison, matched
from .index import Index, RolloutRow
from .queries import GroupKey, Query

_PAGE = 500  # rows at a time, the most that an Index returns


class Span(NamedTuple):
    """The answers of a run in the steps `first` to `last`, from training or evaluation (`source`). A `first` or `last`
    of None means no limit, and a `split` of None means every split."""

    run: str
    source: str
    first: int | None = None
    last: int | None = None
    split: str | None = None

    @property
    def filter(self) -> tuple[str, list[Any]]:
        """The SQL condition that selects these answers, and its parameters. Answers that do not count in group
        statistics are excluded."""
        wanted = {"run = ?": self.run, "source = ?": self.source, "step >= ?": self.first, "step <= ?": self.last,
                  "split = ?": self.split}
        tests = {test: value for test, value in wanted.items() if value is not None}
        return " AND ".join([*tests, "NOT aside"]), list(tests.values())


def every_rollout(index: Index, query: Query, most: int) -> list[RolloutRow]:
    """The first `most` rollouts that a query matches, read page by page."""
    rows: list[RolloutRow] = []
    while len(rows) < most:
        page = index.rollouts(query, len(rows) // _PAGE, _PAGE)
        rows += page.rows
        if not page.rows or len(rows) >= page.total:
            break
    return rows[:most]


def compare_spans(index: Index, a: Span, b: Span) -> Comparison:
    """Compares two ranges of training steps on their common samples, by the mean reward of each sample. Samples are
    paired by content (see analysis.matched). The keys of a Pair name the last group of the sample in each range.
    Raises AppError if the ranges have no sample in common."""
    scope = index.refresh(list(dict.fromkeys((a.run, b.run))))
    first, second = (_samples(index, span) for span in (a, b))
    both, others = matched(first, second)
    if not both:
        sides = [f"steps {span.first or 0} to {'the last' if span.last is None else span.last} of {span.run} "
                 f"({len(side):,} samples)" for span, side in ((a, first), (b, second))]
        raise AppError(f"{sides[0]} and {sides[1]} have no sample in common.{f' {others}' if others else ''}")
    return comparison(Side(a.run, a.first), Side(b.run, b.first), "train", [_pair(*rows) for rows in both],
                      (len(first), len(second)), (*([others] if others else ()), *scope.notes))


def _samples(index: Index, span: Span) -> list[dict[str, Any]]:
    where, values = span.filter
    return index.table.fetch(f"""
        SELECT avg(reward) AS mean, first(category) AS category, {CONTENT},
               arg_max((run, source, split, step, group_id), step) AS place
        FROM rollouts WHERE {where} AND reward IS NOT NULL GROUP BY {SAMPLE} ORDER BY first(sample_id)""", values)


def _pair(before: dict[str, Any], after: dict[str, Any]) -> Pair:
    a, b = (GroupKey(*(side["place"].values() if isinstance(side["place"], dict) else side["place"]))
            for side in (before, after))
    return Pair(before["sample_id"], after["category"], before["mean"], after["mean"], a, b)


class PartGain(NamedTuple):
    """One reward part, compared over the `n` samples that have a value of this part in both Spans, a and b."""

    part: str
    n: int
    mean_a: float
    mean_b: float
    gain: Interval
    """Mean of b - a, paired over the samples, with its 95 % interval."""


def part_gains(index: Index, a: Span, b: Span) -> list[PartGain]:
    """Compares each reward part that occurs in both Spans, over their common samples. Values are averaged per sample;
    the result is sorted by name."""
    pairs, _ = matched(*(_samples(index, span) for span in (a, b)))
    ids = [(_place(one), _place(other)) for one, other in pairs]
    first, second = (_parts(index, span) for span in (a, b))
    gains = []
    for part in sorted(first.keys() & second.keys()):
        both = [(one, other) for one, other in ids if one in first[part] and other in second[part]]
        if both:
            before, after = ([side[part][pair[place]] for pair in both] for place, side in enumerate((first, second)))
            gains.append(PartGain(part, len(both), sum(before) / len(both), sum(after) / len(both),
                                  paired_gain(before, after)))
    return gains


_Sample = tuple[str, str | None, int | None]


def _place(row: dict[str, Any]) -> _Sample:
    return row["sample_id"], row["shown"], row["target"]


def _parts(index: Index, span: Span) -> dict[str, dict[_Sample, float]]:
    where, values = span.filter
    rows = index.table.fetch(f"""
        SELECT part, sample_id, shown, target, avg(value) AS mean FROM (
            SELECT sample_id, coalesce(shown, media) AS shown, target, unnest(part_names) AS part,
                   unnest(part_values) AS value FROM rollouts WHERE {where})
        WHERE value IS NOT NULL GROUP BY part, sample_id, shown, target""", values)
    means: dict[str, dict[_Sample, float]] = {}
    for row in rows:
        means.setdefault(row["part"], {})[_place(row)] = row["mean"]
    return means
