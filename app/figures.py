"""Figures as plain data, for `site.charts`. Texts of run folders go through `label`, which cuts them off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .html import visible
from .marks import color


def figure(id: str, title: str, traces: Sequence[dict[str, Any]], unit: str = "", x: str = "step",
           **axis: Any) -> dict[str, Any]:
    """Returns one plot; `axis` are settings of the vertical one. Several traces get a legend above it."""
    named = sum(trace.get("showlegend", True) for trace in traces) > 1
    return {"id": id, "title": title, "data": list(traces),
            "layout": {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": unit}, **axis}, "height": 300,
                       "showlegend": named}}


def label(text: str, most: int = 32) -> str:
    """Returns a text for a legend or an axis, cut off."""
    words = visible(text)
    return words if len(words) <= most else words[:most - 1] + "…"


def line(name: str, x: Sequence[Any], y: Sequence[float | None], place: int, **more: Any) -> dict[str, Any]:
    """Returns a line with a small mark at each value, in the colour of its place."""
    return {"mode": "lines+markers", "name": label(name), "x": list(x), "y": list(y),
            "line": {"color": color(place), "width": 2}, "marker": {"size": 4, "color": color(place)}, **more}
