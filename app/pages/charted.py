"""Common layout of pages with plots between two parts of HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gradio as gr

from ..html import Html, empty
from ..site import Site, chart_value, charts, same

PlotPage = tuple[Html, str, Html]
"""What stands above the plots, the plots, and what stands below."""


def build(site: Site, show: Callable[[Site, Mapping[str, str]], PlotPage]) -> None:
    """Adds a page rendered by `show(site, location)`, and refreshed at every tick."""
    above = gr.HTML(apply_default_css=False)
    plots, below = charts(f"v-{site.page}-charts"), gr.HTML(apply_default_css=False)
    digests = site.digests(3)
    outputs = [above, plots, below, *digests]
    site.on_location(lambda where: same([""] * 3, show(site, where)), outputs)
    site.on_tick(lambda where, *before: same(before, show(site, where)), outputs, digests)


def no_runs() -> PlotPage:
    """The page for a folder without runs."""
    return empty("There are no runs yet.", "Start one with `vlrl train CONFIG`, or open the folder that has them: "
                 "`vlrl app RUNS_DIR`."), chart_value([]), Html("")
