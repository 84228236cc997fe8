"""The results of a run, read from its folder: the table of metrics before and after training, and the plot of the
reward. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vlrl.evaluation.stats import Interval, paired_gain
from vlrl.monitoring.trackers import direction
from vlrl.rewards.boxes import is_number
from vlrl.store import RunFolder, comparable
from vlrl.store.files import read_json, replacing
from vlrl.tools.experiments.pairs import VALUE_COLUMNS, sample_means

_NOT_METRICS = {"step", "n", "rejected", "unscorable", "score_errors"}
_COLORS = {"raw": "#9db8d9", "smooth": "#1f5fa8"}
_SPLIT_COLORS = ("#d1591b", "#3a7d44", "#7a4ea3", "#8a6d1d")


class Gain(NamedTuple):
    """One metric of one split at the first and the last evaluation of a run."""

    split: str
    metric: str
    n: int  # number of samples in the last evaluation
    steps: tuple[int, int]
    before: Interval
    after: Interval
    gain: Interval
    """Last value minus first value, paired over the samples that both evaluations contain. The bounds are NaN if no
    values per sample are stored."""


def gains(run: RunFolder, until: int | None = None) -> list[Gain]:
    """The gain of every metric and split from the first to the last evaluation in eval.jsonl. Evaluations after more
    than `until` completed steps are ignored (None = no limit).

    If there is only one evaluation, it counts as first and last."""
    changes = []
    for split, (first, last) in _first_and_last(run, until).items():
        metrics = [k for k, v in last.items()
                   if k not in _NOT_METRICS and not k.endswith("/n") and "/ci95_" not in k
                   and not k.startswith("time/") and is_number(v)]
        values = [_per_sample(run, split, record["step"]) for record in (first, last)]
        for metric in metrics:
            before, after = _interval(first, metric), _interval(last, metric)
            gain = _paired(values, metric, after.mean - before.mean)
            label, slash, _ = metric.partition("/")
            n = int(last.get(f"{label}/n" if slash else "n") or last.get("n") or 0)  # in a mixture each task's own
            steps = first["step"], last["step"]
            changes.append(Gain(split, metric, n, steps, before, after, gain))
    return changes


def summary_table(run: RunFolder) -> Table:
    """A table with one row per metric and split: the values before and after training, and the paired gain, each with
    its 95 % interval.

    For a mixture of tasks the table has the reward over all tasks, and every metric of each task."""
    rows = main_gains(gains(run))
    span = f" (steps {rows[0].steps[0]} to {rows[0].steps[1]})" if rows else ": no evaluation yet"
    notes = ["[low, high] = 95 % interval; the gain is paired over the same samples", *_change_notes(run),
             *_best_notes(run)]
    caption = Text("\n".join(notes), "dim")
    table = Table(title=f"Evaluation before and after{span}", caption=caption, box=SIMPLE_HEAD, pad_edge=False,
                  collapse_padding=True, min_width=50)
    for name in ("split", "metric", "n", "before", "after", "gain"):
        left = name in ("split", "metric")
        table.add_column(name, justify="left" if left else "right", overflow="fold" if left else "ellipsis")
    for row in rows:
        style = "green" if row.gain.low > 0 else "red" if row.gain.high < 0 else ""
        gain = Text(signed(row.gain) if row.steps[0] < row.steps[1] else "–", style)
        cells = (row.split, row.metric, str(row.n), str(row.before), str(row.after))
        table.add_row(*(Text(cell) for cell in cells), gain)
    return table


def _change_notes(run: RunFolder) -> Iterator[str]:
    """Yields a note for each split whose samples or settings changed between evaluations."""
    last = {str(line["split"]): line for line in run.evals() if line.get("changed")}
    for split, line in last.items():
        yield f"{split} was changed before step {line['step']} ({', '.join(line['changed'])}): the gain begins there"


def _best_notes(run: RunFolder) -> Iterator[str]:
    """Yields a note on the best evaluation of each split that was evaluated after training steps. The best evaluation
    is the one with the best value of the metric that selects checkpoints/best."""
    marked = read_json(run.checkpoints / "best.json") or {}
    metric = marked.get("metric", "reward/mean")
    splits: dict[str, list[Mapping[str, Any]]] = {}
    for line in comparable(run.evals()):
        if is_number(line.get(metric)):
            splits.setdefault(str(line["split"]), []).append(line)
    for split, lines in splits.items():
        best = max(lines, key=lambda line: direction(metric) * line[metric])
        where = f"at step {best['step']}" if best["step"] else "before the first step"
        saved = " (checkpoints/best)" if (best["step"], split) == (marked.get("step"), marked.get("split")) else ""
        if max(line["step"] for line in lines):
            yield f"best {metric} of {split}: {best[metric]:.3f} {where}{saved}"


def main_gains(rows: list[Gain]) -> list[Gain]:
    """The elements of `rows` (the result of `gains`) that a printed table shows: all metrics except the lengths and
    truncation of answers. For a mixture of tasks, only the reward over all tasks and the metrics of each task."""
    labels = tuple(row.metric.removesuffix("reward/mean") for row in rows if row.metric.endswith("/reward/mean"))
    return [row for row in rows if "completion/" not in row.metric and (
        not labels or row.metric == "reward/mean" or row.metric.startswith(labels))]


def plot_reward(run: RunFolder, path: Path | None = None) -> Path:
    """Plots the training reward per step and the reward of each evaluated split with 95 % intervals. Writes the plot to
    `path`, by default reward.png in the run folder, and returns the path.

    An evaluation is plotted at the number of training steps that were completed before it."""
    from matplotlib.figure import Figure

    path = path or run.path / "reward.png"
    figure = Figure(figsize=(8, 4.5), dpi=150)
    figure.subplots_adjust(left=0.11, right=0.98, bottom=0.11, top=0.93)  # a layout that measures texts takes as long
    axes = figure.add_subplot()
    _plot_training(axes, run)
    _plot_evaluations(axes, run)
    axes.set(xlabel="training steps completed", ylabel="mean reward per answer")
    axes.set_title(run.path.name, loc="left", fontsize=11, parse_math=False)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no steps yet", transform=axes.transAxes, ha="center", color="gray")
    with replacing(path, sync=False) as temporary:
        figure.savefig(temporary, format="png")
    return path


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The centred moving mean of `values` [N] over `window` values, as an array [N]. Near both ends only the existing
    part of the window is averaged."""
    total, at = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    first, end = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    return (total[end] - total[first]) / (end - first)


def _plot_training(axes: Any, run: RunFolder) -> None:
    points = [(r["step"], r["reward/mean"]) for r in run.metrics() if is_number(r.get("reward/mean"))]
    if not points:
        return
    steps, rewards = np.asarray(points, float).T
    window = max(3, len(points) // 10)
    axes.plot(steps, rewards, color=_COLORS["raw"], linewidth=1, alpha=0.8, label="training, each step")
    axes.plot(steps, smooth(rewards, window), color=_COLORS["smooth"], linewidth=2,
              label=f"training, mean of {window // 2 * 2 + 1} steps")


def _plot_evaluations(axes: Any, run: RunFolder) -> None:
    splits: dict[str, dict[int, Interval]] = {}
    for record in run.evals():
        if is_number(record.get("reward/mean")):
            splits.setdefault(str(record["split"]), {})[record["step"]] = _interval(record, "reward/mean")
    for i, (split, points) in enumerate(splits.items()):
        mean, low, high = np.asarray([points[step] for step in sorted(points)]).T
        spread = np.nan_to_num([mean - low, high - mean]).clip(min=0)
        axes.errorbar(sorted(points), mean, yerr=spread, fmt="o-", markersize=5, capsize=3, linewidth=1,
                      color=_SPLIT_COLORS[i % len(_SPLIT_COLORS)], label=f"{split}, 95 % interval".replace("$", r"\$"))


def _first_and_last(run: RunFolder, until: int | None) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Split -> (its first evaluation, its last evaluation). Only evaluations since the last change of the split's data
    count, and only those after at most `until` completed steps (None = no limit). If eval.jsonl has several
    evaluations of one step, the newest counts."""
    splits: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in comparable([line for line in run.evals() if until is None or line["step"] <= until]):
        splits.setdefault(str(record["split"]), {})[record["step"]] = record
    return {split: (steps[min(steps)], steps[max(steps)]) for split, steps in splits.items()}


def _per_sample(run: RunFolder, split: str, step: int) -> dict[str, dict[str, float]]:
    """Metric -> sample id -> mean of the metric over the sample's answers, from the rollouts of one evaluation. Each
    metric is also listed as `<task>/<metric>`."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.rollouts(step, split=split, columns=["sample_id", "task", *VALUE_COLUMNS]).to_pylist():
        for prefix in ("", f"{row['task']}/"):
            groups.setdefault((prefix, row["sample_id"]), []).append(row)
    metrics: dict[str, dict[str, float]] = {}
    for (prefix, sample), rows in groups.items():
        for metric, value in sample_means(rows).items():
            metrics.setdefault(f"{prefix}{metric}", {})[sample] = value
    return metrics


def _paired(values: list[dict[str, dict[str, float]]], metric: str, difference: float) -> Interval:
    """The gain of a metric from the first to the last evaluation, paired by sample. `values` holds a mapping (metric ->
    sample id -> value) for each of the two evaluations. If no sample has the metric in both, returns `difference`
    (the last mean minus the first) without bounds (NaN)."""
    before, after = (v.get(metric, {}) for v in values)
    both = sorted(before.keys() & after.keys())
    if not both:
        return Interval(difference, float("nan"), float("nan"))
    return paired_gain([before[s] for s in both], [after[s] for s in both])


def _interval(record: Mapping[str, Any], metric: str) -> Interval:
    values = (record.get(metric), record.get(f"{metric}/ci95_low"), record.get(f"{metric}/ci95_high"))
    return Interval(*(float("nan") if v is None else float(v) for v in values))


def signed(gain: Interval) -> str:
    """Formats a gain with its sign and, if known, its bounds."""
    bounds = f" [{gain.low:+.3f}, {gain.high:+.3f}]" if np.isfinite(gain.low) else ""
    return f"{gain.mean:+.3f}{bounds}"


def print_summary(run: RunFolder, steps: int, show: Callable[[Any], object]) -> None:
    """Prints the table of metrics before and after training, writes reward.png, and prints where the model and the
    rollout files of a finished run are.

    `steps` is the number of completed steps; `show` prints a line or a rich table."""
    path = run.path
    show(summary_table(run))
    show(f"reward curve   {plot_reward(run)}")
    show(f"model          {run.checkpoints / f'step-{steps:06d}'}")
    show(f"every rollout  {path / 'rollouts'} (parquet), the evaluated answers in {path / 'eval-rollouts'}")
