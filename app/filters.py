"""The filters of the Rollouts page: converts between URL parameters and queries of the index. HTML only, no Gradio.

The URL parameters `run`, `source`, `split`, `step`, `group` and `rollout` name the open group. The filters of the list
of groups have other names, so that opening a group does not change the list: `in=all` (every run), `kind` (train,
eval), `set` (split), `from` and `to` (steps), and the names in RANGES and `_fields`. Without `kind` the list has
training groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import controls
from .controls import decimal, field, pick
from .html import Html, el, link
from .index import ORDERS, SORTS, Facets, GroupKey, Query, RolloutKey
from .queries import LIMITS

if TYPE_CHECKING:
    from .site import Site

RANGES = {"steps": ("from", "to"), "reward": ("rmin", "rmax"), "part_range": ("pmin", "pmax"),
          "advantage": ("amin", "amax"), "length": ("lmin", "lmax"), "difficulty": ("dmin", "dmax"),
          "turns": ("tmin", "tmax")}
"""Field of Query -> the URL parameters for its lower and upper bound."""
_YES = {"yes": True, "no": False}
_NO = {"yes": False, "no": True}
_OPENED = ("source", "split", "step", "group", "rollout", "in")
_NAMES = ("set", "part", "cut", "end", "tool", "err", "cat", "alike", "form", "odd", "sample", "text", "flag")
"""URL parameters of the filters that have a single value. Filters with two bounds are in RANGES."""
PRESETS: Mapping[str, Mapping[str, str]] = {
    "zero variance": {"alike": "yes"}, "cut off": {"cut": "yes"}, "malformed": {"form": "no"},
    "full reward, but unusual": {"odd": "yes", "view": "rollouts"}, "tool errors": {"tool": "yes", "view": "rollouts"},
    "ended by a limit": {"end": "limit", "view": "rollouts"}, "to review": {"flag": "no", "order": "mixed"},
    "to review by reward": {"flag": "no", "view": "rollouts", "sort": "reward"}}
"""Title of a common query -> its URL parameters."""
_ORDER_WORDS = {"step": "newest first", "best": "best first", "worst": "worst first", "mixed": "most mixed first"}
_SORT_WORDS = {"index": "number in the group", "sample_id": "sample", "part": "reward part", "length": "length"}


def query_of(where: Mapping[str, str], flagged: Sequence[RolloutKey] | None = None) -> Query:
    """Converts URL parameters to a Query. Raises AppError for an invalid number. `flagged` are the rollouts with notes:
    `flag=no` excludes these rollouts, and `flag=yes` selects only them. None if no filter concerns notes."""
    ranges = {name: (decimal(where, low), decimal(where, high)) for name, (low, high) in RANGES.items()}
    open_group = "group" in where
    runs = () if where.get("in") == "all" or not where.get("run") else (where["run"],)
    kind = where.get("kind") or where.get("source") or "train"
    if not open_group and where.get("step"):
        ranges["steps"] = (decimal(where, "step"), decimal(where, "step"))
    order, sort = where.get("order", "step"), where.get("sort", "step")
    return Query(
        runs=runs, source=kind if kind in ("train", "eval") else None,
        split=where.get("set") or (None if open_group else where.get("split")), part=where.get("part"), **ranges,
        ended=where.get("end"), tool_errors=_YES.get(where.get("tool", "")),
        truncated=_YES.get(where.get("cut", "")), error=_YES.get(where.get("err", "")), category=where.get("cat"),
        alike=_YES.get(where.get("alike", "")), malformed=_NO.get(where.get("form", "")),
        unusual=_YES.get(where.get("odd", "")), sample_id=where.get("sample"), text=where.get("text"),
        flagged=tuple(flagged) if flagged is not None else None, noted=where.get("flag") != "no",
        order=order if order in ORDERS else "step", sort=sort if sort in SORTS else "step",
        descending=where.get("dir") != "up")


def list_query(where: Mapping[str, str]) -> dict[str, str]:
    """The URL parameters that determine the list of groups, for links that open a group and keep the list as it is."""
    filters = {k: v for k, v in where.items() if k not in _OPENED or k == "run"}
    if "group" in where and where.get("in") == "all":
        filters.pop("run", None)
    return filters


def open_query(where: Mapping[str, str], key: GroupKey, rollout: int | None = None) -> dict[str, Any]:
    """The URL parameters that open a group, or one of its answers, and keep the list of groups as it is."""
    filters = list_query(where)
    target = {**filters, "page": "rollouts", "run": key.run, "source": key.source, "split": key.split, "step": key.step,
              "group": key.group}
    return target | ({} if filters.get("run") else {"in": "all"}) | ({} if rollout is None else {"rollout": rollout})


def site_query(site: Site, where: Mapping[str, str]) -> Query:
    """Converts URL parameters to a Query as `query_of` does, with the rollouts that have notes if a filter concerns
    notes. If the parameters name no run, archived runs are excluded. Raises AppError for an invalid number."""
    by_notes = where.get("flag") in ("yes", "no")
    query = query_of(where, site.notes.flagged(where.get("by", "")) if by_notes else None)
    archived = site.archived() if not query.runs else set()
    left = tuple(run.id for run in site.library.runs() if run.id not in archived) if archived else ()
    return replace(query, runs=left) if left else query


def set_filters(where: Mapping[str, str]) -> int:
    """The number of filters that the URL parameters set."""
    return sum(bool(where.get(name)) for name in (*_NAMES, *sum(RANGES.values(), ())))


def chips(where: Mapping[str, str]) -> list[Html]:
    """Returns a link for each active filter; following the link removes the filter."""
    given: list[tuple[str, tuple[str, ...]]] = [(words, (name,)) for name, words in _words(where).items()]
    for name, (low, high) in RANGES.items():
        if where.get(low) or where.get(high):
            part = where.get("part", "its value") if name == "part_range" else _RANGE_WORDS.get(name, name)
            given.append((f"{part} {_span(where.get(low), where.get(high))}", (low, high)))
    here = {**list_query(where), "page": "rollouts"}
    return [link({k: v for k, v in here.items() if k not in (*names, "at")}, words, " ×", class_="v-chip v-away",
                 title="take this filter away", data_replace=True) for words, names in given]


def presets(where: Mapping[str, str]) -> Html:
    """Links to common queries. If such a query is active, its link removes the filters of the query."""
    base = controls.selection(where) | {k: where[k] for k in ("kind", "sort", "dir") if k in where}
    links = []
    for words, wanted in PRESETS.items():
        on = all(where.get(k) == v for k, v in wanted.items())
        links.append(link({"page": "rollouts", **base, **({} if on else wanted)}, words, class_="v-pick",
                          aria_current="true" if on else None))
    return el("nav", *links, class_="v-picks v-presets", aria_label="Often asked for")


_RANGE_WORDS = {"length": "tokens"}
_VALUE_WORDS = {
    ("cut", "yes"): "cut off", ("cut", "no"): "whole", ("tool", "yes"): "tool errors", ("tool", "no"): "no tool error",
    ("err", "yes"): "scoring error", ("err", "no"): "no scoring error", ("alike", "yes"): "zero variance",
    ("alike", "no"): "different rewards", ("form", "no"): "malformed", ("form", "yes"): "well formed",
    ("odd", "yes"): "full reward, but unusual", ("odd", "no"): "not unusual", ("flag", "yes"): "flagged or commented",
    ("flag", "no"): "without a note"}
_NAME_WORDS = {"set": "split", "end": "ended by", "cat": "category"}


def _words(where: Mapping[str, str]) -> dict[str, str]:
    return {name: _VALUE_WORDS.get((name, where[name]), f"{_NAME_WORDS.get(name, name)} {where[name]}")[:80]
            for name in _NAMES if where.get(name)}


def _span(low: str | None, high: str | None) -> str:
    if low and high:
        return low if low == high else f"{low} to {high}"
    return f"≥ {low}" if low else f"≤ {high}"


def form(facets: Facets) -> Html:
    """The filter form, whose fields app.js fills from the URL."""
    sources = [("train", "training"), ("eval", "evaluation"), ("all", "training and evaluation")]
    first = [_choice("kind", "From", sources),
             _choice("view", "Show", [("groups", "groups"), ("rollouts", "rollouts")]),
             el("span", _choice("order", "Order", [(o, _ORDER_WORDS[o]) for o in ORDERS]), class_="v-of-groups"),
             el("span", _choice("sort", "Sort by", [(s, _SORT_WORDS.get(s, s)) for s in SORTS]),
                _choice("dir", "Direction", [("down", "high first"), ("up", "low first")]), class_="v-of-rollouts"),
             field("text", "Text, as a regular expression", "", "search", maxlength="1000")]
    return el("form", el("div", *first, class_="v-fields"), el("details", el("summary", "More filters"),
              el("div", *_fields(facets), class_="v-fields"), class_="v-more"),
              class_="go v v-form v-filters", data_drop="at in source split step group rollout", aria_label="Filters")


def _choice(name: str, label: str, options: Sequence[tuple[str, str]]) -> Html:
    return pick(name, label, options[0][0], options, data_default=options[0][0])


def _fields(facets: Facets) -> list[Html]:
    return [
        _range("Reward", "reward"),
        pick("part", "Reward part", "", [("", "–"), *((p, p) for p in facets.parts)]),
        _range("Its value", "part_range"),
        _range("Advantage", "advantage"), _range("Length in tokens", "length", 1), _range("Difficulty", "difficulty"),
        pick("cat", "Category", "", [("", "any"), *((c, c) for c in facets.categories)]),
        pick("cut", "Cut off", "", [("", "any"), ("yes", "cut off"), ("no", "whole")]),
        _range("Turns of an episode", "turns", 1),
        pick("end", "Ended by", "", [("", "any"), ("limit", "a limit of the episode"), *(
            (name, f"{name} (episode.max_{name})") for name in LIMITS)]),
        pick("tool", "Tool errors", "", [("", "any"), ("yes", "with one"), ("no", "an episode without")]),
        pick("err", "Scoring error", "", [("", "any"), ("yes", "with an error"), ("no", "without")]),
        pick("alike", "Rewards of a group", "", [("", "any"), ("yes", "all equal"), ("no", "different")]),
        pick("form", "Form", "", [("", "any"), ("no", "malformed"), ("yes", "well formed")]),
        pick("odd", "Unusual", "", [("", "any"), ("yes", "full reward, but unusual"), ("no", "others")]),
        pick("flag", "Notes", "", [("", "any"), ("yes", "flagged or commented"), ("no", "not yet")]),
        field("sample", "Sample id", "", "search"),
    ]


def _range(label: str, name: str, step: float | None = None) -> Html:
    low, high = RANGES[name]
    shared = {"type": "number", "step": step or "any", "autocomplete": "off"}
    return el("fieldset", el("legend", label),
              el("input", name=low, placeholder="from", aria_label=f"{label} from", **shared),
              el("input", name=high, placeholder="to", aria_label=f"{label} to", **shared),
              class_="v-range")
