"""The common layout of pages that show plots between two parts of HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gradio as gr

from ..html import Html, empty
from ..site import Site, chart_value, charts, same

PlotPage = tuple[Html, str, Html]
"""The HTML above the plots, the plots (see site.chart_value), and the HTML below."""


def build(site: Site, show: Callable[[Site, Mapping[str, str]], PlotPage]) -> None:
    """Adds a page whose content `show(site, URL parameters)` returns; it is refreshed every few seconds."""
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
