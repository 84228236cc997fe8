"""Compare: two runs, checkpoints or spans of training steps over the samples that both have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.evaluation.stats import Interval

from .. import AppError, controls
from ..figures import figure
from ..html import Html, el, empty, link, number, table
from ..index import Index
from ..insight import Comparison, Side, compare
from ..marks import color
from ..remarks import remarks_on
from ..rows import Span, compare_spans, part_gains
from ..site import Site, chart_value, query
from . import charted

MOST_LISTED = 20
"""Gains, and losses, that are listed."""
MOST_DRAWN = 5_000


@dataclass(frozen=True)
class Asked:
    """What a location asks to compare. Steps are (first, last), both included; of an evaluation both are the same."""

    source: str
    """eval or train."""
    runs: tuple[str, str]
    steps: tuple[tuple[int | None, int | None], tuple[int | None, int | None]]
    split: str | None


def build(site: Site) -> None:
    """Adds the page."""
    charted.build(site, show)


def show(site: Site, where: Mapping[str, str]) -> charted.Shown:
    """Returns the page at a location."""
    runs = [info.id for info in site.library.runs()]
    if not runs:
        return charted.no_runs()
    form = _form(site, where, runs)
    try:
        asked = asked_by(site, where, runs)
        found = _compared(site.index, asked)
    except AppError as error:
        return el("div", form, empty(str(error), _way_out(where)), class_="v"), chart_value([]), Html("")
    above = el("div", form, *remarks_on(site, asked.runs, found.notes), _facts(found, asked), class_="v")
    below = el("div", _extremes(found), _parts(site.index, found, asked), _categories(found), class_="v")
    return above, chart_value([_scatter(found, asked)]), below


def asked_by(site: Site, where: Mapping[str, str], runs: Sequence[str]) -> Asked:
    """Returns what a location asks for. Without one: the newest run with two evaluations, its first against its last.

    Two runs are compared at their last evaluations. Raises AppError for steps that are no numbers.
    """
    source = "train" if where.get("source") == "train" else "eval"
    a = where.get("a") or next((run for run in runs if len(_evaluated(site, run)) > 1), runs[0])
    b = where.get("b") or a
    if source == "train":
        first, second = ((controls.whole(where, f"{name}_step"), controls.whole(where, f"{name}_last"))
                         for name in "ab")
    else:
        steps = [controls.whole(where, f"{name}_step") for name in "ab"]
        if steps[0] is None and a == b:
            steps[0] = min(_evaluated(site, a), default=None)
        first, second = ((step, step) for step in steps)
    return Asked(source, (a, b), (first, second), where.get("split"))


def _evaluated(site: Site, run: str) -> list[int]:
    try:
        return sorted({record["step"] for record in site.library.evals(run)})
    except AppError:
        return []


def _compared(index: Index, asked: Asked) -> Comparison:
    if asked.source == "train":
        first, second = (Span(run, "train", *steps) for run, steps in zip(asked.runs, asked.steps, strict=True))
        return compare_spans(index, first, second)
    a, b = (Side(run, span[0]) for run, span in zip(asked.runs, asked.steps, strict=True))
    found = compare(index, a, b, asked.split)
    if found.a == found.b:
        raise AppError(f"Both sides are the same evaluation, of {found.a.run} after step {found.a.step}.")
    return found


def _way_out(where: Mapping[str, str]) -> str:
    if where.get("source") == "train":
        return ("Training draws every sample once an epoch, so single steps rarely share one. Widen both spans until "
                "each covers an epoch (see curriculum/epoch on the Runs page), leave the last step empty for all that "
                "follow, or compare evaluations, which ask the same samples every time.")
    return ("Choose another run or step. Evaluations share their samples when both runs have the same task, "
            "data.heldout, data.seed and eval.samples; `vlrl eval` adds one for a checkpoint. Training steps can be "
            "compared as well.")


# --- form -------------------------------------------------------------------------------------------------------------


def _form(site: Site, where: Mapping[str, str], runs: Sequence[str]) -> Html:
    asked = asked_by(site, {k: v for k, v in where.items() if k in ("source", "a", "b")}, runs)
    made = [controls.pick("source", "Compare", where.get("source"), [("", "evaluations"), ("train", "training steps")])]
    named = {"a": f"newest with two: {asked.runs[0]}", "b": f"as A: {asked.runs[0]}"}
    for name, run in zip("ab", asked.runs, strict=True):
        made.append(controls.pick(name, f"{name.upper()}: run", where.get(name), [("", named[name]), *((
            r, r) for r in runs)]))
        if asked.source == "train":
            made += [controls.field(f"{name}_step", "from step", where.get(f"{name}_step"), "number", min=0),
                     controls.field(f"{name}_last", "to step", where.get(f"{name}_last"), "number", min=0)]
        else:
            usual = "first" if name == "a" and asked.runs[0] == asked.runs[1] else "last"
            made.append(controls.pick(f"{name}_step", "after step", where.get(f"{name}_step"), [
                ("", usual), *((step, step) for step in _evaluated(site, run))]))
    if asked.source == "eval":
        splits = sorted({split for run in set(asked.runs) for split in _splits(site, run)})
        made.append(controls.pick("split", "Split", where.get("split"), [("", "first of both"),
                                                                        *((split, split) for split in splits)]))
    return controls.form({"page": "compare"}, *made, label="What is compared")


def _splits(site: Site, run: str) -> set[str]:
    try:
        return {record["split"] for record in site.library.evals(run)}
    except AppError:
        return set()


# --- results ----------------------------------------------------------------------------------------------------------


def _facts(found: Comparison, asked: Asked) -> Html:
    a, b = (_side(found, asked, place) for place in (0, 1))
    tiles = [("samples on both sides", f"{found.n:,}"), ("B wins", f"{found.wins:,}"),
             ("B loses", f"{found.losses:,}"), ("ties", f"{found.ties:,}"), ("mean of A", _interval(found.mean_a)),
             ("mean of B", _interval(found.mean_b)), ("paired gain, 95 %", _interval(found.gain, sign=True))]
    shares = [(found.wins, "win"), (found.ties, "tie"), (found.losses, "loss")]
    bar = el("div", *(el("i", class_=f"v-{name}", style=f"width:{100 * count / max(found.n, 1):.2f}%")
                      for count, name in shares), class_="v-wlt", role="img",
             aria_label=f"{found.wins} wins, {found.ties} ties, {found.losses} losses of B")
    alone = [f"{count:,} samples are only on side {name}" for name, count in (("A", found.only_a), ("B", found.only_b))
             if count]
    left = el("p", "; ".join(alone), " and are left out.", class_="v-dim") if alone else ""
    return el("section", el("p", "A: ", el("b", a), ". B: ", el("b", b), "."), el("div", *(
        el("div", el("span", name), el("b", value), class_="v-tile") for name, value in tiles), class_="v-tiles"),
        bar, el("p", el("b", verdict(found.gain))), left)


def verdict(gain: Interval) -> str:
    """Returns what the interval says, in words."""
    if gain.low > 0:
        return "B is better: the interval of the gain leaves out 0."
    if gain.high < 0:
        return "B is worse: the interval of the gain leaves out 0."
    return "No clear difference: the interval of the gain holds 0."


def _side(found: Comparison, asked: Asked, place: int) -> str:
    side, (first, last) = (found.a, found.b)[place], asked.steps[place]
    if asked.source == "eval":
        return f"{side.run}, {found.split} after step {side.step}"
    return f"{side.run}, training steps {0 if first is None else first} to {'the last' if last is None else last}"


def _interval(value: Interval, sign: bool = False) -> str:
    return f"{number(value.mean, '.3f', sign)} [{number(value.low, '.3f', sign)}, {number(value.high, '.3f', sign)}]"


def _scatter(found: Comparison, asked: Asked) -> dict[str, Any]:
    pairs = found.pairs[:MOST_DRAWN // 2] + found.pairs[MOST_DRAWN // 2:][-MOST_DRAWN // 2:]
    low, high = (least([v for pair in pairs for v in (pair.a, pair.b)]) for least in (min, max))
    points = {"type": "scatter", "mode": "markers", "name": "sample", "x": [pair.a for pair in pairs],
              "y": [pair.b for pair in pairs], "customdata": [query(controls.place(pair.key_b)) for pair in pairs],
              "marker": {"color": color(0), "size": 6, "opacity": 0.6}}
    even = {"type": "scatter", "mode": "lines", "name": "equal", "x": [low, high], "y": [low, high],
            "hoverinfo": "skip", "showlegend": False, "line": {"dash": "dot", "color": "#888", "width": 1}}
    return figure("compare-pairs", "Reward of each sample: above the line B is better", [points, even], "reward of B",
                  x="reward of A")


def _extremes(found: Comparison) -> Html:
    gains = [pair for pair in found.pairs if pair.gain > 0][:MOST_LISTED]
    losses = [pair for pair in reversed(found.pairs) if pair.gain < 0][:MOST_LISTED]
    head = ("sample", "category", "A", "B", "gain")

    def rows(pairs: Iterable[Any]) -> list[tuple]:
        return [(link({"page": "history", "sample": p.sample_id}, p.sample_id), p.category or "–",
                 link(controls.place(p.key_a), number(p.a)), link(controls.place(p.key_b), number(p.b)),
                 number(p.gain, ".3f", sign=True)) for p in pairs]

    parts = [el("section", el("h3", title), table(head, rows(pairs), numeric=(2, 3, 4)) if pairs else
                el("p", "None.", class_="v-dim")) for title, pairs in (("Biggest gains", gains),
                                                                       ("Biggest losses", losses))]
    return el("div", *parts, class_="v-halves")


def _categories(found: Comparison) -> Html:
    if len(found.categories) < 2:
        return Html("")
    rows = [(name or "–", n, wins, losses, ties, number(gain, ".3f", sign=True))
            for name, n, wins, losses, ties, gain in found.categories]
    head = ("category", "samples", "B wins", "B loses", "ties", "mean gain")
    return el("section", el("h3", "Categories"), table(head, rows, numeric=range(1, 6)))


def _parts(index: Index, found: Comparison, asked: Asked) -> Html:
    a, b = (Span(side.run, asked.source, *(steps if asked.source == "train" else (side.step, side.step)),
                 split=found.split if asked.source == "eval" else None)
            for side, steps in zip((found.a, found.b), asked.steps, strict=True))
    rows = [(gain.part, f"{gain.n:,}", number(gain.mean_a, ".3f"), number(gain.mean_b, ".3f"),
             _interval(gain.gain, sign=True)) for gain in part_gains(index, a, b)]
    if not rows:
        return Html("")
    head = ("part", "samples", "A", "B", "paired gain, 95 %")
    return el("section", el("h3", "Parts of the reward"), table(head, rows, numeric=range(1, 5)))
