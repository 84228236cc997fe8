"""The common layout of pages that show plots between two parts of HTML."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from ..html import Html, empty, note, visible
from ..marks import color
from ..site import Site, chart_value, charts, same

PlotPage = tuple[Html, str, Html]
"""The HTML above the plots, the plots (see site.chart_value), and the HTML below."""


def build(site: Site, show: Callable[[Site, Mapping[str, str]], PlotPage]) -> None:
    """Adds a page with the PlotPage that `show(site, URL parameters)` returns, refreshed every few seconds."""
    above = gr.HTML(apply_default_css=False)
    plots, below = charts(f"v-{site.page}-charts"), gr.HTML(apply_default_css=False)
    digests = site.digests(3)
    outputs = [above, plots, below, *digests]
    site.on_location(lambda where: same([""] * 3, show(site, where)), outputs)
    site.on_tick(lambda where, *before: same(before, show(site, where)), outputs, digests)


def no_runs() -> PlotPage:
    """The content of a page if the folder contains no runs."""
    return empty("There are no runs yet.", "Start one with `vlrl train CONFIG`, or open the folder that has them: "
                 "`vlrl app RUNS_DIR`."), chart_value([]), Html("")


MOST = 5
"""Largest number of skipped files listed by name."""


def remarks_on(site: Site, runs: Sequence[str], notes: Sequence[str]) -> list[Html]:
    """Remarks on rollout files still being read, and on skipped files. `notes` has a sentence for each skipped file."""
    pending = site.index.refresh(list(dict.fromkeys(runs)), 0.0).pending
    lines = [note(f"Still reading {pending:,} files; what is below grows until then.")] if pending else []
    lines += [note(words, kind="warn") for words in notes[:MOST]]
    return lines + ([note(f"{len(notes) - MOST:,} more files were skipped.", kind="warn")] if len(notes) > MOST else [])


def figure(id: str, title: str, traces: Sequence[dict[str, Any]], unit: str = "", x: str = "step",
           **axis: Any) -> dict[str, Any]:
    """Returns one plot for site.chart_value. `unit` is the title of the vertical axis and `x` of the horizontal axis.
    `axis` holds further options of the vertical axis."""
    named = sum(trace.get("showlegend", True) for trace in traces) > 1
    return {"id": id, "title": title, "data": list(traces),
            "layout": {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": unit}, **axis}, "height": 300,
                       "showlegend": named}}


def label(text: str, most: int = 32) -> str:
    """Replaces invisible characters (see html.visible) and cuts the text to `most` characters, for a legend or axis."""
    words = visible(text)
    return words if len(words) <= most else words[:most - 1] + "…"


def line(name: str, x: Sequence[Any], y: Sequence[float | None], place: int, **more: Any) -> dict[str, Any]:
    """Returns the trace of a line with a small marker at each value, for `figure`. `place` is the index of its colour,
    and `more` holds further keys of the trace (see site.chart_value)."""
    return {"mode": "lines+markers", "name": label(name), "x": list(x), "y": list(y),
            "line": {"color": color(place), "width": 2}, "marker": {"size": 4, "color": color(place)}, **more}
