"""Queries of the lists, and their translation to SQL. Every value is an SQL parameter, never part of the SQL text."""

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from vlrl.errors import did_you_mean
from vlrl.store import utf8

from . import AppError

Range = tuple[float | None, float | None]
"""Lowest and highest value, inclusive; None means no bound."""
ANY: Range = (None, None)
SOURCES = {"train": "rollouts", "eval": "eval-rollouts"}
"""Source of rollouts ("train" or "eval") -> subfolder of the run."""
ORDERS = ("step", "best", "worst", "mixed")
SORTS = ("step", "reward", "advantage", "length", "index", "difficulty", "sample_id", "category", "part")
LIMITS = ("turns", "tokens", "media")
"""Finish reasons of episodes that were ended by a limit."""
_LONGEST = 1000  # characters of a regular expression

_KEY = "run, source, split, step, group_id"
_KEY_TYPES = {"run": pa.string(), "source": pa.string(), "split": pa.string(), "step": pa.int64(),
              "group_id": pa.string(), "idx": pa.int64()}
_UNUSUAL = f"""({_KEY}, idx) IN (
    SELECT ({_KEY}, idx) FROM (
        SELECT *, quantile_cont(length, 0.05) OVER earned AS lowest,
               quantile_cont(length, 0.95) OVER earned AS highest FROM (
            SELECT *, max(reward) OVER own AS top, min(reward) OVER own AS bottom FROM rollouts WHERE NOT aside
            WINDOW own AS (PARTITION BY run, source, task)
        ) WHERE reward = top AND top > bottom WINDOW earned AS (PARTITION BY run, source, task)
    ) WHERE length < lowest OR length > highest OR malformed)"""
_PART = "part_values[list_position(part_names, ?)]"
_GROUP_ORDER = {"step": "recency, step {way}", "best": "mean DESC NULLS LAST, step DESC",
                "worst": "mean NULLS LAST, step DESC", "mixed": "std DESC NULLS LAST, step DESC"}
_SORT = {"index": "idx", "part": _PART} | {name: name for name in SORTS if name not in ("index", "part")}


class GroupKey(NamedTuple):
    """Identifies one group of rollouts."""

    run: str
    source: str
    """"train" or "eval"."""
    split: str
    step: int
    group: str


class RolloutKey(NamedTuple):
    """Identifies one rollout."""

    run: str
    source: str
    split: str
    step: int
    group: str
    index: int


@dataclass(frozen=True, kw_only=True)
class Query:
    """Filters and order of a list of groups or rollouts. With the default values, nothing is filtered out."""

    runs: tuple[str, ...] = ()
    """Ids of runs; () = all runs."""
    source: str | None = None
    """"train", "eval", or None for both."""
    split: str | None = None
    steps: Range = ANY
    reward: Range = ANY
    part: str | None = None
    """The reward part that `part_range` filters by, and that sort="part" sorts by."""
    part_range: Range = ANY
    advantage: Range = ANY
    length: Range = ANY
    """Number of tokens of the answer."""
    turns: Range = ANY
    """Number of actions of an episode. A bound excludes answers that are not episodes."""
    ended: str | None = None
    """A finish reason, or "limit" for every limit that can end an episode."""
    tool_errors: bool | None = None
    """True: only episodes with a failed tool call. False: only episodes without one."""
    truncated: bool | None = None
    error: bool | None = None
    """True: only answers whose scoring failed. False: only the other answers."""
    category: str | None = None
    difficulty: Range = ANY
    alike: bool | None = None
    """True: only groups in which all rewards are equal. False: only the other groups."""
    malformed: bool | None = None
    """True: only answers with malformed tags (see table.is_malformed). False: only the other answers."""
    unusual: bool | None = None
    """True: only answers that have the full reward but are unusual. False: only the other answers.

    The full reward is the highest reward of a run and task in which rewards differ. An answer with the full reward is
    unusual if it is malformed, or among the 5 % shortest or longest of these answers."""
    sample_id: str | None = None
    """Only answers to the sample with exactly this id."""
    text: str | None = None
    """A case-insensitive regular expression (RE2) to search for in answer, prompt and error.

    Only the beginning of long texts is searched, see table.SEARCHED."""
    flagged: tuple[RolloutKey, ...] | None = None
    """Keys of the rollouts with notes, for the filter `noted`. None: notes do not matter."""
    noted: bool = True
    """True: only the rollouts in `flagged`. False: only rollouts that are not in `flagged`."""
    order: str = "step"
    """Order of groups: step (newest step of the latest run first), best or worst (by mean reward), or mixed (largest
    spread of rewards first)."""
    sort: str = "step"
    """Sort key of rollouts, one of SORTS."""
    descending: bool = True


@dataclass
class Where:
    """SQL conditions joined by AND, and their parameters in order."""

    terms: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, term: str, *values: Any) -> None:
        self.terms.append(term)
        self.values += values

    def equal(self, column: str, value: Any) -> None:
        if value is not None:
            self.add(f"{column} = ?", utf8(str(value)))

    def within(self, expression: str, name: str, bounds: Range, *values: Any) -> None:
        """Adds the condition that the SQL `expression`, with the parameters `values`, lies in `bounds`. The condition
        is false for null. Raises AppError, which mentions the filter's `name`, for bounds that are not numbers."""
        for sign, bound in zip((">=", "<="), _bounds(name, bounds), strict=True):
            if bound is not None:
                self.add(f"{expression} {sign} ?", *values, bound)

    def __str__(self) -> str:
        return " AND ".join(self.terms) or "true"


def group_conditions(query: Query, runs: list[str]) -> Where:
    """The conditions that a query sets on groups. Raises AppError for an invalid value."""
    where = Where()
    where.add("run IN (SELECT unnest(?::VARCHAR[]))", runs)
    for column in ("source", "split", "category", "sample_id"):
        where.equal(column, getattr(query, column))
    where.within("step", "steps", query.steps)
    where.within("difficulty", "difficulty", query.difficulty)
    if query.alike is not None:
        where.add(f"({_KEY}) IN (SELECT ({_KEY}) FROM rollouts WHERE run IN (SELECT unnest(?::VARCHAR[])) GROUP BY "
                  f"{_KEY} HAVING count(DISTINCT reward) FILTER (NOT aside) {'<' if query.alike else '>='} 2)", runs)
    return where


def rollout_conditions(query: Query) -> Where:
    """The conditions that a query sets on single answers. Raises AppError for an invalid value. Flagged rollouts are
    looked up in a table named "flagged", see flagged_table."""
    where = Where()
    for column in ("reward", "advantage", "length", "turns"):
        where.within(column, column, getattr(query, column))
    if query.part is not None:
        where.within(_PART, "part_range", query.part_range, utf8(str(query.part)))
    if query.ended == "limit":
        where.add("finish_reason IN (SELECT unnest(?::VARCHAR[]))", list(LIMITS))
    else:
        where.equal("finish_reason", query.ended)
    if query.tool_errors is not None:
        where.add(f"tool_errors {'> 0' if query.tool_errors else '= 0'}")
    if query.truncated is not None:
        where.add("truncated = ?", bool(query.truncated))
    if query.malformed is not None:
        where.add("malformed = ?", bool(query.malformed))
    if query.unusual is not None:
        where.add(_UNUSUAL if query.unusual else f"NOT {_UNUSUAL}")
    if query.error is not None:
        where.add(f"error IS {'NOT ' if query.error else ''}NULL")
    if query.text:
        pattern = checked_pattern(query.text)
        where.add("(regexp_matches(completion, ?, 'i') OR regexp_matches(prompt, ?, 'i') "
                  "OR coalesce(regexp_matches(error, ?, 'i'), false))", pattern, pattern, pattern)
    if query.flagged is not None:
        where.add(f"({_KEY}, idx) {'' if query.noted else 'NOT '}IN (SELECT ({_KEY}, idx) FROM flagged)")
    return where


def flagged_table(query: Query) -> pa.Table:
    """The keys of the query's flagged rollouts as an Arrow table."""
    columns = list(zip(*(clean_key(key) for key in query.flagged or ()), strict=True)) or [()] * len(_KEY_TYPES)
    return pa.table({name: pa.array(column, kind) for (name, kind), column
                     in zip(_KEY_TYPES.items(), columns, strict=True)})


def clean_key(key: GroupKey | RolloutKey) -> tuple[Any, ...]:
    """The fields of a key as SQL parameters. Raises AppError if step or index is not an integer."""
    try:
        return tuple(int(v) if name in ("step", "index") else utf8(str(v))
                     for name, v in zip(key._fields, key, strict=True))
    except (TypeError, ValueError, OverflowError):
        raise AppError(f"{str(tuple(key))[:200]}: step and index must be whole numbers") from None


def group_order(query: Query) -> str:
    """The ORDER BY terms for groups. They use the columns of index._groups, and define a total order."""
    order = _GROUP_ORDER[_chosen("order", query.order, ORDERS)]
    return f"{order.format(way=_way(query))}, run, source, split, group_id"


def rollout_order(query: Query, runs: list[str]) -> tuple[str, list[Any]]:
    """Returns the ORDER BY terms for rollouts, which define a total order, and their parameters. `runs` must be sorted
    by start time. Raises AppError for sort="part" without a selected part."""
    column = _SORT[_chosen("sort", query.sort, SORTS)]
    if query.sort == "part" and query.part is None:
        raise AppError("the list cannot be sorted by a reward part, because none is selected: select the part "
                       "in the filters")
    values = [utf8(str(query.part))] if query.sort == "part" else []
    if query.sort == "step":
        column, values = f"list_position(?::VARCHAR[], run), {column}", [runs]
    return f"{column} {_way(query)} NULLS LAST, step DESC, run, source, split, group_id, idx", values


def checked_pattern(pattern: str) -> str:
    """The search pattern as valid UTF-8. Raises AppError if it is too long."""
    pattern = utf8(str(pattern))
    if len(pattern) > _LONGEST:
        raise AppError(f"the search text has {len(pattern)} characters; the limit is {_LONGEST}")
    return pattern


def pattern_error(pattern: str, message: str) -> AppError:
    """An AppError that says where `pattern`, which RE2 rejected with `message`, is wrong."""
    words = message.split("Error:")[-1].strip().splitlines()[0]
    at = pattern.find(words.rpartition(": ")[2])
    try:
        re.compile(pattern)
    except re.error as error:
        at = error.pos if error.pos is not None else at
    except (RecursionError, OverflowError):
        pass
    place = f" at character {at + 1}" if at >= 0 else ""
    return AppError(f"the search text {pattern!r} is not a valid regular expression{place}: {words}. Put a backslash "
                    "before a special character that is meant literally: \\( \\[ \\* \\?. Lookahead and backreferences "
                    "are not supported.")


def _way(query: Query) -> str:
    return "DESC" if query.descending else "ASC"


def _chosen(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise AppError(f"{name} {str(value)[:100]!r} is unknown: choose one of {', '.join(known)}."
                       f"{did_you_mean(str(value)[:100], known)}")
    return value


def _bounds(name: str, bounds: Any) -> tuple[float | None, float | None]:
    try:
        low, high = (None if v is None else float(v) for v in bounds)
    except (TypeError, ValueError, OverflowError):
        raise AppError(f"{name} {str(bounds)[:100]} must be a pair of numbers (lowest, highest)") from None
    return tuple(None if v is None or math.isnan(v) else v for v in (low, high))  # type: ignore[return-value]
