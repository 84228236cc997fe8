"""Plots of the metrics of several runs over their steps. Imports no Gradio.

figures = over_steps(library, ["quickstart", "other"], smooth=0.6)      # for vlrl.app.site.chart_value"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from .html import finite, visible
from .library import Library
from .marks import color

MOST_POINTS = 600
"""Largest number of points in a curve; neighbouring points of longer curves are averaged."""
_REWARD = "reward/mean"
_TITLES = {
    _REWARD: "Reward", "completion/length_mean": "Answer length (tokens)", "entropy": "Entropy (nats a token)",
    "kl": "KL to the reference", "mismatch/kl": "Mismatch of sampler and trainer (KL)",
    "groups/zero_variance_frac": "Share of groups without variance",
    "episode/success": "Share of episodes that succeed", "episode/turns_mean": "Turns of an episode",
    "episode/limit_frac": "Share of episodes that a limit ended", "episode/tool_calls_mean": "Tool calls of an episode",
    "episode/tool_errors_frac": "Share of tool calls that failed",
    "environment/errors": "Episodes whose environment failed",
    "completion/truncated_frac": "Share of answers cut off", "clip_frac": "Share of tokens clipped",
    "grad_norm": "Gradient norm", "loss": "Loss", "lr": "Learning rate", "time/total_s": "Seconds a step",
    "time/rollout_s": "Seconds generating", "time/train_s": "Seconds learning", "time/score_s": "Seconds scoring",
    "tokens_per_s": "Tokens a second", "memory/peak_gib": "Peak memory (GiB)",
}
"""Metric -> title of its plot, in display order. The reward and its parts come before these metrics, all others after
them."""
_SYMBOLS = ("circle", "diamond", "square")


class Curve(NamedTuple):
    """Values of one metric over the steps of one run."""

    steps: list[int]
    values: list[float]


def over_steps(library: Library, runs: Sequence[str], smooth: float = 0.6, others: bool = False
               ) -> list[dict[str, Any]]:
    """Builds a figure with all runs for each training metric and, with 95 % intervals, for each evaluation metric.
    `smooth` in [0, 1) is the decay of the exponential moving average; 0 shows raw values. `others` adds the metrics
    without an entry in _TITLES. Raises AppError for an unknown run."""
    metrics, evals = {run: library.metrics(run) for run in runs}, {run: library.evals(run) for run in runs}
    paints = {run: color(place) for place, run in enumerate(runs)}
    figures = []
    for name in _ordered({name for lines in metrics.values() for line in lines for name in line}, others):
        traces = [t for run in runs for t in _traces(run, paints[run], _curve(metrics[run], name), smooth)]
        if name == _REWARD:
            traces += [t for run in runs for t in _evaluated(run, paints[run], evals[run], name)]
        if traces:
            part = f"Reward part: {name.removeprefix('reward/')}" if name.startswith("reward/") else name
            figures.append(_figure(name, _TITLES.get(name) or part, traces))
    place = 1 + max((i for i, f in enumerate(figures) if f["id"].startswith("reward/")), default=-1)
    for name in _evaluations(evals):
        traces = [t for run in runs for t in _evaluated(run, paints[run], evals[run], name)]
        figures.insert(place, _figure(f"eval/{name}", f"Evaluation: {name}", traces))
        place += 1
    return figures


def _ordered(metrics: Iterable[str], others: bool) -> list[str]:
    names = {n for n in metrics if n not in ("step", "time")}
    parts = sorted(n for n in names if n.startswith("reward/") and n not in (_REWARD, "reward/std"))
    first = [n for n in _TITLES if n in names and n != _REWARD]
    rest = sorted(names - {_REWARD, *parts, *first}) if others else []
    return [_REWARD, *parts, *first, *rest]


def _figure(id: str, title: str, traces: list[dict[str, Any]]) -> dict[str, Any]:
    layout: dict[str, Any] = {"xaxis": {"title": {"text": "step"}}}
    values = [value for trace in traces for value in trace["y"]]
    bars = any(length for trace in traces for length in trace.get("error_y", {}).get("array", ()))
    low, high = min(values), max(values)
    if high - low <= 1e-9 * abs(high) and high and not bars:
        layout["yaxis"] = {"range": sorted((0.5 * high, 1.5 * high))}
    return {"id": id, "title": title, "data": traces, "layout": layout}


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> Curve:
    """The values of the metric `name` in the records `lines` of metrics.jsonl. Neighbouring values are averaged so that
    at most MOST_POINTS points remain."""
    points = [(line["step"], value) for line in lines if (value := finite(line.get(name))) is not None]
    width = max(1, -(-len(points) // MOST_POINTS))
    buckets = [points[i:i + width] for i in range(0, len(points), width)]
    return Curve([b[len(b) // 2][0] for b in buckets], [_mean([v for _, v in b]) for b in buckets])


def _mean(values: Sequence[float]) -> float:
    """The mean of the values. The mean of equal values is exact, so that a constant is plotted as a flat line."""
    return values[0] + sum(v - values[0] for v in values) / len(values)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The bias-corrected exponential moving average of the values (Kingma and Ba 2015, arXiv 1412.6980). `weight` in
    [0, 1) is the decay."""
    means, mean, share = [], 0.0, 0.0
    for value in values:
        share = weight * share + (1 - weight)
        mean += (1 - weight) / share * (value - mean)  # exact for constant values
        means.append(mean)
    return means


def _traces(run: str, paint: str, curve: Curve, smooth: float) -> list[dict[str, Any]]:
    if not curve.steps:
        return []
    shared = {"x": curve.steps, "name": visible(run), "meta": {"go": step_query(run)},
              "mode": "lines" if len(curve.steps) > 50 else "lines+markers", "marker": {"color": paint, "size": 4}}
    if not smooth or len(curve.steps) < 3:
        return [{**shared, "y": curve.values, "line": {"color": paint, "width": 1.8}}]
    raw = {**shared, "y": curve.values, "line": {"color": paint, "width": 1}, "opacity": 0.35, "tip": "raw"}
    return [raw, {**shared, "y": smoothed(curve.values, smooth), "line": {"color": paint, "width": 2},
                  "tip": "smoothed"}]


def step_query(run: str, source: str = "train", split: str = "") -> str:
    """Returns the URL query that opens the rollouts of one step of a run, with {x} in place of the step."""
    filters = {"page": "rollouts", "run": run, "kind": source, "set": split}
    return f"?{urlencode({k: v for k, v in filters.items() if v})}&from={{x}}&to={{x}}"


def _evaluations(evals: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    return sorted({name for lines in evals.values() for line in lines for name in line if f"{name}/ci95_low" in line
                   and name != _REWARD and "completion/" not in name})


def _evaluated(run: str, paint: str, lines: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    traces = []
    for place, split in enumerate(dict.fromkeys(line["split"] for line in lines)):
        points = [(line["step"], value, finite(line.get(f"{name}/ci95_low")), finite(line.get(f"{name}/ci95_high")))
                  for line in lines if line["split"] == split and (value := finite(line.get(name))) is not None]
        if not points:
            continue
        bars = {"array": [0.0 if high is None else max(0.0, high - value) for _, value, _, high in points],
                "arrayminus": [0.0 if low is None else max(0.0, value - low) for _, value, low, _ in points]}
        traces.append({"mode": "lines+markers", "x": [f[0] for f in points],
                       "y": [f[1] for f in points], "error_y": bars, "name": visible(f"{run}, {split}"),
                       "line": {"color": paint, "dash": "dot", "width": 1},
                       "meta": {"go": step_query(run, "eval", split)},
                       "marker": {"color": paint, "size": 7, "symbol": _SYMBOLS[place % len(_SYMBOLS)]}})
    return traces
