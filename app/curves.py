"""Curves over training steps as small SVG images, so that a report needs no plotting library."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vlrl.tools.experiments.report import smooth

from .html import Html, el, finite, join, number
from .marks import COLORS

_W, _H = 340, 190  # of the viewBox
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 24
_MOST = 400  # points of a line


class EvalPoints(NamedTuple):
    """The evaluations of one split, whose name is `name`, as (step, mean, low, high) tuples. `low` and `high` bound the
    confidence interval of the mean; they are None if unknown."""

    name: str
    points: Sequence[tuple[float, float, float | None, float | None]]


def curve(title: str, points: Sequence[tuple[float, float]], dots: Sequence[EvalPoints] = ()) -> Html:
    """A plot of the metric `title` over the steps. `points` are its (step, value) pairs, drawn with their moving
    average, and `dots` are evaluations, drawn with 95 % intervals. Empty if there is no value."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    every = [*points, *((x, v) for d in dots for x, *ys in d.points for v in ys if v is not None)]
    if not every:
        return Html("")
    area = _Area([x for x, _ in every], [y for _, y in every])
    drawn = [area.axes()]
    if points:
        xs, ys = _thin(np.asarray(points, float))
        drawn.append(area.line(xs, ys, "v-raw" if len(points) > 8 else "v-smooth", COLORS[0]))
        if len(points) > 8:
            values = np.asarray([y for _, y in points], float)
            means = smooth(values, max(3, len(values) // 10))
            drawn.append(area.line(*_thin(np.column_stack([[x for x, _ in points], means])), "v-smooth", COLORS[0]))
    drawn += [area.dots(d, COLORS[(i + 1) % len(COLORS)]) for i, d in enumerate(dots)]
    last = f"last {number(points[-1][1])}" if points else ""
    keys = [el("span", el("i", class_="v-swatch", style=f"background:{COLORS[(i + 1) % len(COLORS)]}"), d.name)
            for i, d in enumerate(dots)]
    picture = el("svg", *drawn, viewBox=f"0 0 {_W} {_H}", role="img", aria_label=f"{title} over the steps. {last}")
    return el("figure", el("h3", title, " ", el("span", last, class_="v-dim")), picture,
              el("div", *keys, class_="v-keys") if keys else "", class_="v-curve")


class _Area:
    def __init__(self, xs: Sequence[float], ys: Sequence[float]):
        self.x0, self.x1 = _wide(min(xs), max(xs), 0.0)
        self.y0, self.y1 = _wide(min(ys), max(ys), 0.06)

    def x(self, value: float) -> float:
        return _LEFT + (_W - _LEFT - _RIGHT) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        return _H - _BOTTOM - (_H - _TOP - _BOTTOM) * (value - self.y0) / (self.y1 - self.y0)

    def axes(self) -> Html:
        lines = []
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            lines += [el("line", x1=_LEFT, x2=_W - _RIGHT, y1=round(y, 1), y2=round(y, 1), class_="v-grid"),
                      el("text", number(value), x=_LEFT - 5, y=round(y + 4, 1), text_anchor="end")]
        lines += [el("text", number(value, ".6g"), x=round(self.x(value), 1), y=_H - 6, text_anchor="middle")
                  for value in ticks(self.x0, self.x1)]
        return join(lines)

    def line(self, xs: np.ndarray, ys: np.ndarray, class_: str, paint: str) -> Html:
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in zip(xs.tolist(), ys.tolist(), strict=True))
        only = el("circle", cx=round(self.x(xs[0]), 1), cy=round(self.y(ys[0]), 1), r=3, class_="v-at")
        return el("g", el("polyline", points=points, class_=class_) if len(xs) > 1 else only, style=f"--v-c:{paint}")

    def dots(self, dots: EvalPoints, paint: str) -> Html:
        marks = []
        for step, mean, low, high in dots.points:
            x = round(self.x(step), 1)
            bounds = f" [{number(low)}, {number(high)}]" if low is not None and high is not None else ""
            words = el("title", f"{dots.name}, step {number(step, '.6g')}: {number(mean)}{bounds}")
            bar = el("line", x1=x, x2=x, y1=round(self.y(low), 1), y2=round(self.y(high), 1),
                     class_="v-err") if low is not None and high is not None else ""
            marks.append(el("g", words, bar, el("circle", cx=x, cy=round(self.y(mean), 1), r=3.5, class_="v-at")))
        return el("g", *marks, style=f"--v-c:{paint}")


def _wide(low: float, high: float, margin: float) -> tuple[float, float]:
    low, high = max(low, -1e300), min(high, 1e300)
    apart = (high - low) * margin or (0.0 if high > low else max(abs(low) * 0.1, 1e-6, 0.5 if margin == 0 else 0.0))
    return low - apart, high + apart


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round values between `low` and `high` for the ticks of an axis; `low` must be below `high`."""
    raw = (high - low) / count
    step = 10.0 ** math.floor(math.log10(raw))
    step *= next((f for f in (1, 2, 5, 10) if f * step >= raw * 0.999), 10)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, first + 2 * count + 2) if i * step <= high + 1e-9 * step]


def _thin(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduces points [N, 2] to at most _MOST, each the mean of neighbouring points. Returns their x and y."""
    if len(points) > _MOST:
        points = np.stack([part.mean(axis=0) for part in np.array_split(points, _MOST)])
    return points[:, 0], points[:, 1]


_SHOWN = {"reward/mean": "Reward", "completion/length_mean": "Answer length (tokens)",
          "completion/truncated_frac": "Share cut off", "episode/success": "Episodes that succeed (share)",
          "episode/turns_mean": "Turns of an episode", "episode/limit_frac": "Episodes that a limit ended (share)",
          "episode/tool_calls_mean": "Tool calls of an episode", "episode/tool_errors_frac": "Tool calls that failed "
          "(share)", "environment/errors": "Episodes whose environment failed",
          "groups/zero_variance_frac": "Groups without variance",
          "entropy": "Entropy (nats)", "kl": "KL to the reference", "mismatch/kl": "KL sampler to trainer",
          "loss": "Loss", "grad_norm": "Gradient norm", "tokens_per_s": "Tokens per second",
          "time/total_s": "Seconds per step"}
_MOST_PARTS = 8


def of_run(metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> list[Html]:
    """Returns the plots of a run: reward and its parts, lengths, entropy, KL, sampler mismatch and times. Each plot
    also shows the evaluations of its metric. `metrics` and `evals` are records of metrics.jsonl and eval.jsonl."""
    names = [name for record in metrics[-3:] for name in record if name.startswith("reward/")]
    parts = [n for n in dict.fromkeys(names) if n not in ("reward/mean", "reward/std")][:_MOST_PARTS]
    wanted = {"reward/mean": _SHOWN["reward/mean"], **{n: f"Part {n.removeprefix('reward/')}" for n in parts}, **_SHOWN}
    drawn = [curve(title, _points(metrics, name), _evaluated(evals, name)) for name, title in wanted.items()]
    return [picture for picture in drawn if picture]


def _points(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    points = [(finite(record.get("step")), finite(record.get(name))) for record in records]
    return [(x, y) for x, y in points if x is not None and y is not None]


def _evaluated(evals: Sequence[Mapping[str, Any]], name: str) -> list[EvalPoints]:
    own = name if name == "reward/mean" or not name.startswith("reward/") else name.removeprefix("reward/")
    splits: dict[str, dict[float, tuple[float, float, float | None, float | None]]] = {}
    for record in evals:
        step, mean = finite(record.get("step")), finite(record.get(own))
        if step is not None and mean is not None:
            low, high = (finite(record.get(f"{own}/ci95_{side}")) for side in ("low", "high"))
            splits.setdefault(str(record.get("split")), {})[step] = (step, mean, low, high)
    return [EvalPoints(split, [points[step] for step in sorted(points)]) for split, points in splits.items()]
