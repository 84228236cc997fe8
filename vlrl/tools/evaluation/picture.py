"""The plot of an evaluation: metrics at each setting with their intervals, and pass@k and maj@k over k. Does not import
torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlrl.store.files import replacing
from vlrl.tools.evaluation.summary import Metric, Result

_COLORS = ("#1f5fa8", "#d1591b", "#3a7d44", "#7a4ea3", "#8a6d1d", "#b03060", "#2e8b8b", "#555555")
_AT = re.compile(r"(pass|maj)@(\d+)")
_MOST_BARS = 12


def plot_evaluation(results: Sequence[Result], path: Path, title: str) -> Path:
    """Plots all metrics that lie in [0, 1] as a PNG at `path`. With several answers per sample, also plots pass@k
    (solid) and maj@k (dashed). Returns `path`."""
    from matplotlib.figure import Figure

    curves = any(_AT.fullmatch(name) for r in results for name in r.metrics)
    figure = Figure(figsize=(12 if curves else 7, 4.5), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
    _points(panels[0], results)
    if curves:
        _curves(panels[1], results)
    panels[0].set_title(title[-80:], loc="left", fontsize=11, parse_math=False)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
    with replacing(path, sync=False) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _points(axes: Any, results: Sequence[Result]) -> None:
    names = [n for n in dict.fromkeys(name for r in results for name in r.metrics)
             if not _AT.match(n) and "completion/length" not in n
             and all(0 <= r.metrics[n].mean <= 1 for r in results if n in r.metrics)][:_MOST_BARS]
    for i, result in enumerate(results):
        place = (i - (len(results) - 1) / 2) * 0.8 / max(len(results), 1)
        points = [(x + place, result.metrics[n]) for x, n in enumerate(names) if n in result.metrics]
        if points:
            _draw_line(axes, [x for x, _ in points], [m for _, m in points], "o", _label(result, results), i)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8, parse_math=False)
    axes.set_ylim(-0.02, 1.02)
    if results:
        axes.legend(frameon=False, fontsize=8)


def _curves(axes: Any, results: Sequence[Result]) -> None:
    for i, result in enumerate(results):
        for kind, form in (("pass", "o-"), ("maj", "s--")):
            points = sorted((int(at[2]), m) for name, m in result.metrics.items()
                            if (at := _AT.fullmatch(name)) and at[1] == kind)
            if points:
                _draw_line(axes, [k for k, _ in points], [m for _, m in points], form,
                           f"{kind}@k, {_label(result, results)}", i)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="k answers", ylabel="share of samples that are right", ylim=(-0.02, 1.02))
    axes.legend(frameon=False, fontsize=8)


def _draw_line(axes: Any, xs: Sequence[float], metrics: Sequence[Metric], form: str, label: str, color: int) -> None:
    spread = [[max(0.0, m.mean - m.low) if m.low is not None else 0.0 for m in metrics],
              [max(0.0, m.high - m.mean) if m.high is not None else 0.0 for m in metrics]]
    axes.errorbar(xs, [m.mean for m in metrics], yerr=spread, fmt=form, markersize=4, capsize=3, linewidth=1,
                  color=_COLORS[color % len(_COLORS)], label=label.replace("$", r"\$"))


def _label(result: Result, results: Sequence[Result]) -> str:
    several = len({r.split for r in results}) > 1
    return f"{result.split}, {result.setting.name}" if several else result.setting.name
