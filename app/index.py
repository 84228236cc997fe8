"""Lists the rollouts of many runs, with filters, sorting and pages. Imports no torch.

index = Index(Library("runs"))
page = index.groups(Query(runs=("quickstart",), order="mixed"), page=0, size=50)"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from .library import Library
from .queries import (
    ANY,
    ORDERS,
    SORTS,
    GroupKey,
    Query,
    Range,
    RolloutKey,
    clean_key,
    flagged_table,
    group_conditions,
    group_order,
    rollout_conditions,
    rollout_order,
)
from .table import Table

__all__ = ["ANY", "ORDERS", "SORTS", "Facets", "GroupKey", "GroupRow", "Index", "Page", "Query", "Range", "RolloutKey",
           "RolloutRow"]

Row = TypeVar("Row")
SHOWN = 240
"""Number of characters of a prompt or an answer shown in a list."""
_MOST_ROWS = 500  # on a page
_MOST_VALUES = 500  # of a facet
_KEY = "run, source, split, step, group_id"


@dataclass(frozen=True)
class Page(Generic[Row]):
    """One page of a list of rows."""

    rows: tuple[Row, ...]
    total: int
    """Number of rows on all pages."""
    page: int
    """Page number, beginning with 0."""
    size: int
    pending: int = 0
    """Number of rollout files not read yet; another query reads more of them."""
    notes: tuple[str, ...] = ()
    """Rollout files that were skipped, with reasons."""

    @property
    def pages(self) -> int:
        return max(1, -(-self.total // self.size))


@dataclass(frozen=True)
class GroupRow:
    """A group as a row of the list. Its statistics cover all scored answers of the group, including answers that the
    filters exclude."""

    key: GroupKey
    task: str
    sample_id: str
    category: str | None
    difficulty: float | None
    prompt: str
    """The first characters of the prompt."""
    n: int
    """Number of answers."""
    hits: int
    """Number of answers that pass the filters."""
    mean: float | None
    std: float | None
    best: float | None
    worst: float | None
    zero_variance: bool
    truncated: int
    errors: int
    media: str | None = None
    """Name of the first image or video in the run's media/ folder."""
    rewards: tuple[float | None, ...] = ()
    """[n] Rewards of the answers, sorted by index."""


@dataclass(frozen=True)
class RolloutRow:
    """A rollout as a row of the list."""

    key: RolloutKey
    task: str
    sample_id: str
    category: str | None
    difficulty: float | None
    reward: float | None
    advantage: float | None
    parts: dict[str, float | None]
    length: int
    """Number of tokens."""
    truncated: bool
    error: str | None
    policy_step: int | None
    text: str
    """First characters of the answer."""
    media: str | None = None
    turns: int | None = None
    """Number of actions of an episode; None if the answer is not an episode."""
    tool_errors: int | None = None
    """Number of failed tool calls of an episode; None if the answer is not an episode."""

    @property
    def group(self) -> GroupKey:
        return GroupKey(*self.key[:5])


@dataclass(frozen=True)
class Facets:
    """The values that occur in the rollouts of some runs, which the filter form offers."""

    sources: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    """First and last step; None without rollouts."""
    rollouts: int = 0
    pending: int = 0
    """Number of rollout files not read yet."""
    notes: tuple[str, ...] = ()


class Scope(NamedTuple):
    """The runs that a query covers, the number of their files not read yet, and notes on skipped files."""

    runs: list[str]
    pending: int
    notes: tuple[str, ...]


class Index:
    """The rollouts of all runs in a library; each rollout file is read when it is first needed. Thread-safe. A call
    reads new files for at most `budget_s` seconds; `Page.pending` counts the files that remain."""

    def __init__(self, library: Library, budget_s: float = 0.8):
        self.library = library
        self.table = Table(library, budget_s)

    def close(self) -> None:
        """Frees memory and temporary files."""
        self.table.close()

    def refresh(self, runs: Sequence[str] = (), budget_s: float | None = None) -> Scope:
        """Reads new files of the given runs (() = all runs) for at most `budget_s` seconds. Returns a Scope: the ids of
        the runs, the number of files not read yet, and notes on skipped files. Raises AppError for an unknown run."""
        names = list(runs) or [info.id for info in self.library.runs()]
        return Scope(names, *self.table.refresh(names, budget_s))

    def groups(self, query: Query, page: int = 0, size: int = 50) -> Page[GroupRow]:
        """One page of the groups with at least one answer that passes the filters. A page number past the end returns
        the last page. Raises AppError for an invalid query."""
        scope = self.refresh(query.runs)
        source, values = _groups(query, scope.runs)
        order = group_order(query)
        sql = f"""
            WITH found AS ({source}), shown AS (SELECT * FROM found ORDER BY {order} LIMIT ? OFFSET ?)
            SELECT shown.*, more.*, (SELECT count(*) FROM found) AS total
            FROM shown JOIN (
                SELECT {_KEY}, {_GROUP_COLUMNS} FROM rollouts SEMI JOIN shown USING ({_KEY}) GROUP BY {_KEY}
            ) AS more USING ({_KEY}) ORDER BY {order}"""
        return self._page(query, scope, sql, values, page, size, _group_row)

    def rollouts(self, query: Query, page: int = 0, size: int = 50) -> Page[RolloutRow]:
        """One page of the answers that pass the filters. A page number past the end returns the last page. Raises
        AppError for an invalid query."""
        scope = self.refresh(query.runs)
        groups, rollouts = group_conditions(query, scope.runs), rollout_conditions(query)
        order, order_values = rollout_order(query, scope.runs)
        sql = f"""
            WITH found AS (SELECT rowid AS row, row_number() OVER (ORDER BY {order}) AS place FROM rollouts
                           WHERE {groups} AND {rollouts}),
                 shown AS (SELECT * FROM found ORDER BY place LIMIT ? OFFSET ?)
            SELECT rollouts.* REPLACE (completion[:{SHOWN}] AS completion), (SELECT count(*) FROM found) AS total
            FROM shown JOIN rollouts ON rollouts.rowid = shown.row ORDER BY place"""
        return self._page(query, scope, sql, [*order_values, *groups.values, *rollouts.values], page, size,
                          _rollout_row)

    def neighbours(self, query: Query, key: GroupKey) -> tuple[GroupKey | None, GroupKey | None]:
        """The groups before and after `key` in the order of `groups(query)`; None where there is no such group. Both
        are None if the list does not contain `key`."""
        scope = self.refresh(query.runs)
        source, values = _groups(query, scope.runs)
        sql = f"""
            WITH found AS ({source}),
                 placed AS (SELECT {_KEY}, row_number() OVER (ORDER BY {group_order(query)}) AS place FROM found),
                 here AS (SELECT place AS mine FROM placed WHERE ({_KEY}) = (?, ?, ?, ?, ?))
            SELECT {_KEY}, place - mine AS side FROM placed, here WHERE place BETWEEN mine - 1 AND mine + 1"""
        rows = self._fetch(query, sql, [*values, *clean_key(key)])
        sides = {row["side"]: _group_key(row) for row in rows}
        return sides.get(-1), sides.get(1)

    def facets(self, runs: Sequence[str] = (), budget_s: float | None = None) -> Facets:
        """Collects the values that the filter form offers for the given runs (() = all runs): for each filter, the 500
        most frequent values. New rollout files are read first, for at most `budget_s` seconds."""
        scope = self.refresh(runs, budget_s)

        def common(value: str) -> tuple[str, ...]:
            rows = self.table.fetch(
                f"SELECT value FROM (SELECT {value} AS value FROM rollouts WHERE run IN (SELECT unnest(?::VARCHAR[])))"
                f" WHERE value IS NOT NULL GROUP BY value ORDER BY count(*) DESC, value LIMIT {_MOST_VALUES}",
                [scope.runs])
            return tuple(sorted(row["value"] for row in rows))

        [span] = self.table.fetch("SELECT min(step) AS first, max(step) AS last, count(*) AS count FROM rollouts "
                                  "WHERE run IN (SELECT unnest(?::VARCHAR[]))", [scope.runs])
        steps = None if span["first"] is None else (span["first"], span["last"])
        return Facets(common("source"), common("split"), common("category"), common("unnest(part_names)"),
                      common("task"), steps, span["count"], scope.pending, scope.notes)

    def _fetch(self, query: Query, sql: str, values: list[Any]) -> list[dict[str, Any]]:
        tables = {} if query.flagged is None else {"flagged": flagged_table(query)}
        return self.table.fetch(sql, values, tables, query.text)

    def _page(self, query: Query, scope: Scope, sql: str, values: list[Any], page: int, size: int, make: Any) -> Page:
        size = min(max(1, int(size)), _MOST_ROWS)
        page = max(0, int(page))
        rows = self._fetch(query, sql, [*values, size, page * size])
        if not rows and page:  # after the last one
            first = self._page(query, scope, sql, values, 0, size, make)
            last = first.pages - 1
            return first if last == 0 else self._page(query, scope, sql, values, min(last, page - 1), size, make)
        total = rows[0]["total"] if rows else 0
        return Page(tuple(make(row) for row in rows), total, page, size, scope.pending, scope.notes)


_GROUP_COLUMNS = f"""
    count(*) FILTER (NOT aside) AS n, max(reward) FILTER (NOT aside) AS best, min(reward) FILTER (NOT aside) AS worst,
    first(task) AS task, first(sample_id) AS sample_id, first(category) AS category, first(difficulty) AS difficulty,
    first(prompt)[:{SHOWN}] AS prompt, first(media) AS media, count(*) FILTER (truncated) AS truncated,
    count(error) AS errors, list(reward ORDER BY idx) FILTER (NOT aside) AS rewards"""


def _groups(query: Query, runs: list[str]) -> tuple[str, list[Any]]:
    groups, rollouts = group_conditions(query, runs), rollout_conditions(query)
    # rounded, so that equal rewards have a spread of 0 whatever the order in which they are added up
    sql = f"""
        SELECT {_KEY}, list_position(?::VARCHAR[], run) AS recency, count(*) FILTER ({rollouts}) AS hits,
               avg(reward) FILTER (NOT aside) AS mean, round(stddev_samp(reward) FILTER (NOT aside), 12) AS std
        FROM rollouts WHERE {groups} GROUP BY {_KEY} HAVING hits > 0"""
    return sql, [runs, *rollouts.values, *groups.values]


def _group_key(row: dict[str, Any]) -> GroupKey:
    return GroupKey(row["run"], row["source"], row["split"], row["step"], row["group_id"])


def _group_row(row: dict[str, Any]) -> GroupRow:
    rewards = tuple(row["rewards"] or ())
    scored = [r for r in rewards if r is not None]
    std = 0.0 if len(scored) == 1 else row["std"]
    return GroupRow(_group_key(row), row["task"] or "", row["sample_id"], row["category"], row["difficulty"],
                    row["prompt"], row["n"], row["hits"], row["mean"], std, row["best"], row["worst"],
                    len(set(scored)) < 2, row["truncated"], row["errors"], row["media"], rewards)


def _rollout_row(row: dict[str, Any]) -> RolloutRow:
    parts: dict[str, float | None] = dict(zip(row["part_names"] or (), row["part_values"] or (), strict=True))
    return RolloutRow(RolloutKey(*_group_key(row), row["idx"]), row["task"] or "", row["sample_id"], row["category"],
                      row["difficulty"], row["reward"], row["advantage"], parts, row["length"], row["truncated"],
                      row["error"], row["policy_step"], row["completion"], row["media"],
                      row["turns"], row["tool_errors"])
