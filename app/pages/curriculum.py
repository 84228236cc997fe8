"""The Curriculum page: difficulty of the drawn prompts over time, categories drawn, and groups without a gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

from .. import AppError, controls
from ..analysis import Curriculum, curriculum
from ..html import Html, el, empty, note, number, table
from ..marks import color
from ..site import Site, chart_value, query
from . import charted
from .charted import figure, label, line, remarks_on

MOST_LINES = 12
"""Largest number of categories in a plot; the most frequent ones are plotted. The table lists more."""
MOST_ROWS = 300


def build(site: Site) -> None:
    """Adds the page to the app."""
    charted.build(site, show)


def show(site: Site, where: Mapping[str, str]) -> charted.PlotPage:
    """The content of the page for these URL parameters."""
    runs = [info.id for info in site.library.runs()]
    if not runs:
        return charted.no_runs()
    form = controls.form(
        {"page": "curriculum", **controls.selection(where)},
        controls.field("threshold", "An answer passes from reward", where.get("threshold"), "number", step="any",
                       placeholder="what is correct"), label="What passes")
    try:
        threshold = controls.decimal(where, "threshold")
        summary = curriculum(site.index, site.library, where.get("run") or runs[0], threshold=threshold)
    except AppError as error:
        return el("div", form, empty(str(error), "Choose a run above."), class_="v"), chart_value([]), Html("")
    remarks = remarks_on(site, [summary.run], summary.notes)
    if not summary.bins:
        nothing = empty("This run has no training rollouts yet.", "Each training step writes them to the run's "
                        "folder rollouts/. A run of evaluations alone draws nothing from the curriculum.")
        return el("div", form, *remarks, nothing, class_="v"), chart_value(figures(summary)), Html("")
    return el("div", form, *remarks, _facts(summary), class_="v"), chart_value(figures(summary)), el(
        "div", _categories(summary), class_="v")


def _facts(summary: Curriculum) -> Html:
    groups, rollouts = sum(map(sum, summary.counts)), sum(c.rollouts for c in summary.categories)
    ends = [_last(values) for values in (summary.wasted, summary.dropped)]
    epoch = summary.weights.get("curriculum/epoch")
    facts = [("groups drawn", f"{groups:,}"), ("rollouts", f"{rollouts:,}"),
             ("passes", "if correct" if summary.judged else f"from reward {number(summary.threshold)}"),
             ("rollouts without a lesson, at the end", _percent(ends[0])),
             ("groups dropped per step, at the end", number(ends[1])),
             ("epochs", number(epoch[-1][1]) if epoch else "–")]
    return el("div", *(el("div", el("span", name), el("b", value), class_="v-tile") for name, value in facts),
              class_="v-tiles")


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def figures(summary: Curriculum) -> list[dict[str, Any]]:
    """The plots of the page: pass rates as a heat map, wasted rollouts, draws by category, pass rates by category, and
    the metrics of the sampler."""
    spans = [f"{first}" if first == last else f"{first}–{last}" for first, last in summary.bins]
    plots = [_heat_map(summary, spans), _wasted(summary, spans)] if summary.bins else []
    lines = sorted(summary.categories, key=lambda c: -c.groups)[:MOST_LINES]
    if len(summary.categories) > 1:
        shares = [{"mode": "lines", "name": label(c.name), "x": spans, "y": c.share,
                   "stackgroup": "a", "line": {"color": color(i), "width": 1}} for i, c in enumerate(lines)]
        passes = [line(c.name, spans, c.pass_rates, i) for i, c in enumerate(lines)]
        plots += [figure("curriculum-draws", "Weight of each category: its share of the groups drawn", shares, "share",
                         range=[0, 1]),
                  figure("curriculum-passes", "Pass rate of each category", passes, "share of answers",
                         range=[-0.04, 1.04])]
    for plot in plots if any("–" in span for span in spans) else ():
        plot["layout"]["xaxis"]["type"] = "category"  # step ranges as labels
    epoch = {name: points for name, points in summary.weights.items() if name == "curriculum/epoch"}
    others = {name: points for name, points in summary.weights.items() if name not in epoch}
    for id, title, series in (("curriculum-weights", "Numbers of the curriculum", others),
                              ("curriculum-epoch", "Epochs: how often the data has been gone through", epoch)):
        if series:
            traces = [line(name, [step for step, _ in points], [v for _, v in points], i)
                      for i, (name, points) in enumerate(series.items())]
            plots.append(figure(id, title, traces, ""))
    return plots


def _heat_map(summary: Curriculum, spans: Sequence[str]) -> dict[str, Any]:
    """A heat map of pass rate classes over ranges of steps. The shares of the classes in a range add up to 1."""
    classes, sums = len(summary.edges) - 1, [sum(row) or 1 for row in summary.counts]
    names = ["0", *(f"{summary.edges[i]:.2g}–{summary.edges[i + 1]:.2g}" for i in range(1, classes - 1)), "1"]
    shares = [[row[i] / total for row, total in zip(summary.counts, sums, strict=True)] for i in range(classes)]
    counts = [[row[i] for row in summary.counts] for i in range(classes)]
    links = [[query({"page": "rollouts", "run": summary.run, "kind": "train", "from": first, "to": last})
              for first, last in summary.bins]] * classes
    trace = {"customdata": links, "x": list(spans), "y": names, "z": shares, "text": counts}
    return figure("curriculum-heat", "Pass rates of the groups drawn: only those between 0 and 1 teach", [trace],
                  "pass rate of a group")


def _wasted(summary: Curriculum, spans: Sequence[str]) -> dict[str, Any]:
    series = {"in groups of equal rewards": summary.wasted, "cut off": summary.truncated,
              "scoring failed": summary.errors}
    traces = [line(name, spans, values, i) for i, (name, values) in enumerate(series.items())
              if any(v is not None for v in values)]
    right = {"rangemode": "tozero", "title": {"text": "groups"}}
    if any(summary.dropped):
        traces.append(line("groups dropped per step (right)", spans, summary.dropped, 3, yaxis="y2"))
    plot = figure("curriculum-wasted", "Rollouts that teach nothing or little", traces, "share of rollouts",
                  rangemode="tozero")
    return plot | {"layout": plot["layout"] | ({"yaxis2": right} if any(summary.dropped) else {})}


def _categories(summary: Curriculum) -> Html:
    rows = [(c.name, f"{c.groups:,}", f"{c.rollouts:,}", number(c.mean), _percent(c.pass_rate),
             _percent(c.zero_variance), _percent(_last(c.share))) for c in summary.categories[:MOST_ROWS]]
    head = ("category", "groups drawn", "rollouts", "mean reward", "pass rate", "groups of equal rewards",
            "share of draws, at the end")
    left = len(summary.categories) - MOST_ROWS
    more = note(f"{left:,} more categories are left out of this table.") if left > 0 else ""
    return el("section", el("h3", "Categories"), table(head, rows, numeric=range(1, 7)), more)
