"""Builds plots as plain data for `site.charts`. Text from run folders must pass through `label`, which shortens it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .html import visible
from .marks import color


def figure(id: str, title: str, traces: Sequence[dict[str, Any]], unit: str = "", x: str = "step",
           **axis: Any) -> dict[str, Any]:
    """One plot from its traces; `axis` holds options of the vertical axis. A plot of several traces has a legend above
    it."""
    named = sum(trace.get("showlegend", True) for trace in traces) > 1
    return {"id": id, "title": title, "data": list(traces),
            "layout": {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": unit}, **axis}, "height": 300,
                       "showlegend": named}}


def label(text: str, most: int = 32) -> str:
    """Shortens a text for a legend or an axis."""
    words = visible(text)
    return words if len(words) <= most else words[:most - 1] + "…"


def line(name: str, x: Sequence[Any], y: Sequence[float | None], place: int, **more: Any) -> dict[str, Any]:
    """A line with a small marker at each value; `place` is the index of its colour."""
    return {"mode": "lines+markers", "name": label(name), "x": list(x), "y": list(y),
            "line": {"color": color(place), "width": 2}, "marker": {"size": 4, "color": color(place)}, **more}
