"""The filters of the rollouts page: between a location and an index's Query. HTML alone, no Gradio.

In a location, `run`, `source`, `split`, `step`, `group` and `rollout` name what is open. The list beside it has names
of its own, so that opening a group leaves it as it is: `in=all` (every run), `kind` (train, eval), `set` (split),
`from` and `to` (steps), and those of RANGES and `_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .controls import decimal, field, pick
from .html import Html, el
from .index import ORDERS, SORTS, Facets, GroupKey, Query, RolloutKey
from .queries import LIMITS

RANGES = {"steps": ("from", "to"), "reward": ("rmin", "rmax"), "part_range": ("pmin", "pmax"),
          "advantage": ("amin", "amax"), "length": ("lmin", "lmax"), "difficulty": ("dmin", "dmax"),
          "turns": ("tmin", "tmax")}
"""Field of Query -> its names in a location."""
_YES = {"yes": True, "no": False}
_OPENED = ("source", "split", "step", "group", "rollout", "in")
_ORDER_WORDS = {"step": "newest first", "best": "best first", "worst": "worst first", "mixed": "most mixed first"}
_SORT_WORDS = {"index": "number in the group", "sample_id": "sample", "part": "reward part", "length": "length"}


def query_of(where: Mapping[str, str], flagged: Sequence[RolloutKey] | None = None) -> Query:
    """Returns the query of a location. Raises AppError for a number that is none.

    `flagged` are the rollouts that `flag=yes` keeps.
    """
    ranges = {name: (decimal(where, low), decimal(where, high)) for name, (low, high) in RANGES.items()}
    open_group = "group" in where
    runs = () if where.get("in") == "all" or not where.get("run") else (where["run"],)
    kind = where.get("kind") or ("" if open_group else where.get("source", ""))
    if not open_group and where.get("step"):
        ranges["steps"] = (decimal(where, "step"), decimal(where, "step"))
    order, sort = where.get("order", "step"), where.get("sort", "step")
    return Query(
        runs=runs, source=kind if kind in ("train", "eval") else None,
        split=where.get("set") or (None if open_group else where.get("split")), part=where.get("part"), **ranges,
        ended=where.get("end"), tool_errors=_YES.get(where.get("tool", "")),
        truncated=_YES.get(where.get("cut", "")), error=_YES.get(where.get("err", "")), category=where.get("cat"),
        alike=_YES.get(where.get("alike", "")), sample_id=where.get("sample"), text=where.get("text"),
        flagged=tuple(flagged) if flagged is not None else None,
        order=order if order in ORDERS else "step", sort=sort if sort in SORTS else "step",
        descending=where.get("dir") != "up")


def keeps(where: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of a location that says what the list shows, for links that open something beside it."""
    filters = {k: v for k, v in where.items() if k not in _OPENED or k == "run"}
    if "group" in where and where.get("in") == "all":
        filters.pop("run", None)
    return filters


def opened(where: Mapping[str, str], key: GroupKey, rollout: int | None = None) -> dict[str, Any]:
    """Returns the location of a group beside the list as it is."""
    filters = keeps(where)
    target = {**filters, "page": "rollouts", "run": key.run, "source": key.source, "split": key.split, "step": key.step,
              "group": key.group}
    return target | ({} if filters.get("run") else {"in": "all"}) | ({} if rollout is None else {"rollout": rollout})


def set_filters(where: Mapping[str, str]) -> int:
    """Returns how many filters are set."""
    names = ["set", "part", "cut", "end", "tool", "err", "cat", "alike", "sample", "text", "flag",
             *sum(RANGES.values(), ())]
    return sum(bool(where.get(name)) for name in names)


def form(runs: Sequence[str], facets: Facets) -> Html:
    """Returns the form; app.js fills it from the location."""
    first = [pick("run", "Run", "", [("", "every run"), *((r, r) for r in runs)]),
             pick("kind", "From", "", [("", "training and evaluation"), ("train", "training"), ("eval", "evaluation")]),
             pick("view", "Show", "", [("", "groups"), ("rollouts", "rollouts")]),
             el("span", pick("order", "Order", "", [("" if o == "step" else o, _ORDER_WORDS[o]) for o in ORDERS]),
                class_="v-of-groups"),
             el("span", pick("sort", "Sort by", "", [("" if s == "step" else s, _SORT_WORDS.get(s, s)) for s in SORTS]),
                pick("dir", "Direction", "", [("", "high first"), ("up", "low first")]), class_="v-of-rollouts"),
             field("text", "Text, as a regular expression", "", "search", maxlength="1000")]
    return el("form", el("div", *first, class_="v-fields"), el("details", el("summary", "More filters"),
              el("div", *_fields(facets), class_="v-fields"), class_="v-more"),
              class_="go v v-form v-filters", data_drop="at in source split step group rollout", aria_label="Filters")


def _fields(facets: Facets) -> list[Html]:
    most = facets.steps[1] if facets.steps else None
    return [
        _range("Steps", "steps", 1, most), _range("Reward", "reward"),
        pick("part", "Reward part", "", [("", "–"), *((p, p) for p in facets.parts)]),
        _range("Its value", "part_range"),
        _range("Advantage", "advantage"), _range("Length in tokens", "length", 1), _range("Difficulty", "difficulty"),
        pick("set", "Split", "", [("", "any"), *((s, s) for s in facets.splits)]),
        pick("cat", "Category", "", [("", "any"), *((c, c) for c in facets.categories)]),
        pick("cut", "Cut off", "", [("", "any"), ("yes", "cut off"), ("no", "whole")]),
        _range("Turns of an episode", "turns", 1),
        pick("end", "Ended by", "", [("", "any"), ("limit", "a limit of the episode"), *(
            (name, f"{name} (episode.max_{name})") for name in LIMITS)]),
        pick("tool", "Tool errors", "", [("", "any"), ("yes", "with one"), ("no", "an episode without")]),
        pick("err", "Scoring error", "", [("", "any"), ("yes", "with an error"), ("no", "without")]),
        pick("alike", "Rewards of a group", "", [("", "any"), ("yes", "all equal"), ("no", "different")]),
        pick("flag", "Notes", "", [("", "any"), ("yes", "flagged or commented")]),
        field("sample", "Sample id", "", "search"),
    ]


def _range(label: str, name: str, step: float | None = None, most: float | None = None) -> Html:
    low, high = RANGES[name]
    shared = {"type": "number", "step": step or "any", "autocomplete": "off"}
    highest = "to" if most is None else f"to {most}"
    return el("fieldset", el("legend", label),
              el("input", name=low, placeholder="from", aria_label=f"{label} from", **shared),
              el("input", name=high, placeholder=highest, aria_label=f"{label} to", **shared),
              class_="v-range")
