"""Sends groups to trackers: images with the boxes of target and answers, a table of completions and rewards,
histograms.

    view = group_view(groups, most=2, step=10)
    send("wandb", run, view, "train", 10)

Off unless log.pictures sets a number of groups, as everyone with access to the tracker sees the data. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vlrl.config.registry import module
from vlrl.types import Group, Rollout

TARGET = "#22c55e"
_COLORS = ("#4c8dff", "#f58518", "#e5484d", "#a46ef5", "#0fa3b8", "#d4a106", "#e052a0", "#a9744f")
_SIDE = 512
"""Longest side in pixels of an image that is sent: larger images are shrunk to it, and an image whose longest side is
less than half of it is enlarged to half of it."""
_MOST = 2000  # characters in a table cell
_MARKS = 200  # marks drawn on one image


@dataclass(frozen=True)
class GroupView:
    """Images, table rows and values that are sent to a tracker for the groups of a step."""

    pictures: Sequence[tuple[Image.Image, str]]
    """(image, caption) of each shown group. The image is the first image of the group's sample, with boxes and other
    marks of the answers drawn on it."""
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # table rows, one per rollout of the shown groups
    values: Mapping[str, np.ndarray]
    """Name of a histogram -> [N] float64 values of all rollouts of the step."""


def group_view(groups: Sequence[Group], most: int, step: int) -> GroupView:
    """Makes the GroupView of a step: images and completions of the first `most` groups, and values of all groups."""
    shown = groups[:most]
    parts = list(dict.fromkeys(name for g in shown for r in g.rollouts for name in r.parts))
    columns = ["step", "sample", "answer", "prompt", "target", "completion", "parsed", "reward", "advantage", *parts]
    rows = [_row(g, r, step, parts) for g in shown for r in g.rollouts]
    drawn = [(picture, caption) for g in shown for picture, caption in [_picture(g)] if picture is not None]
    return GroupView(drawn, columns, rows, _values(groups))


def send(tracker: str, run: Any, view: GroupView, prefix: str, step: int) -> None:
    """Sends a GroupView to a tracker, under names that begin with `prefix`. `run` is the tracker's own run object
    (`GeneralTracker.tracker` of accelerate)."""
    _SENDERS[tracker](run, view, prefix, step)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _row(group: Group, rollout: Rollout, step: int, parts: Sequence[str]) -> list[Any]:
    advantage = None if rollout.advantage is None else float(np.mean(rollout.advantage))
    return [step, _text(group.sample.id), rollout.index, _text(group.prompt.text), _text(group.target),
            _text(rollout.completion.text), _text(rollout.parsed), _number(rollout.reward), _number(advantage),
            *(_number(rollout.parts.get(name)) for name in parts)]


def _values(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    rollouts = [r for g in groups for r in g.rollouts]
    by_name: dict[str, list[float | None]] = {
        "reward": [r.reward for r in rollouts],
        "advantage": [float(a) for r in rollouts if r.advantage is not None for a in np.ravel(r.advantage)],
        "length": [float(len(r.completion.tokens)) for r in rollouts]}
    for name in dict.fromkeys(name for r in rollouts for name in r.parts):
        by_name[f"part/{name}"] = [r.parts.get(name) for r in rollouts]
    finite = {name: np.asarray([v for v in values if _number(v) is not None], np.float64)
              for name, values in by_name.items()}
    return {name: values for name, values in finite.items() if values.size}


def _picture(group: Group) -> tuple[Image.Image | None, str]:
    if not group.prompt.media:
        return None, ""
    picture = with_marks(group.prompt.media[0].frames[0], [(r.index, r.marks) for r in group.rollouts])
    rewards = " ".join("-" if r.reward is None else f"{r.reward:.2f}" for r in group.rollouts)
    return picture, f"{_text(group.sample.id)[:80]}: rewards {rewards}"


def with_marks(source: Image.Image, answers: Sequence[tuple[int, Any]]) -> Image.Image:
    """A resized copy of the image `source` with the marks of several answers drawn on it. Marks of the target are
    green, those of an answer have the colour of its index. answers: (index, marks as returned by Task.overlay) of
    each answer. Marks that cannot be drawn are skipped."""
    source = source.convert("RGB")
    scale = _SIDE / max(source.size)
    scale = min(scale, 1.0) if max(source.size) >= _SIDE // 2 else scale / 2
    size = max(1, round(source.width * scale)), max(1, round(source.height * scale))
    picture = source.resize(size)
    pen, drawn = ImageDraw.Draw(picture), 0
    for index, marks in answers:
        for mark in marks if isinstance(marks, (list, tuple)) else ():
            if drawn < _MARKS and isinstance(mark, Mapping) and mark.get("media", 0) in (0, None):
                target = mark.get("role") == "target"
                color = TARGET if target else _COLORS[index % len(_COLORS)]
                drawn += _draw(pen, mark.get("kind"), mark.get("at"), color, scale, 3 if target else 2)
    return picture


def _draw(pen: ImageDraw.ImageDraw, kind: Any, at: Any, color: str, scale: float, width: int) -> bool:
    if kind == "box" and (box := _places(at, 4, scale)):
        pen.rectangle((*np.minimum(box[:2], box[2:]), *np.maximum(box[:2], box[2:])), outline=color, width=width)
    elif kind == "point" and (point := _places(at, 2, scale)):
        pen.ellipse((point[0] - 4, point[1] - 4, point[0] + 4, point[1] + 4), outline=color, width=width)
    elif kind == "path" and isinstance(at, (list, tuple)) and len(at) > 1:
        points = [_places(p, 2, scale) for p in at[:_MOST]]
        if not all(points):
            return False
        pen.line([tuple(p) for p in points if p], fill=color, width=width)
    else:
        return False
    return True


def _places(values: Any, count: int, scale: float) -> list[float] | None:
    if not isinstance(values, (list, tuple)) or len(values) != count or any(_number(v) is None for v in values):
        return None
    return [min(max(float(v) * scale, -_SIDE), 2.0 * _SIDE) for v in values]


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    text = text.encode("utf-8", "replace").decode()
    return text[:_MOST] + ("..." if len(text) > _MOST else "")


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float, np.floating, np.integer)) and math.isfinite(value)
    return float(value) if known else None


# --- the trackers -----------------------------------------------------------------------------------------------------


def _tensorboard(writer: Any, view: GroupView, prefix: str, step: int) -> None:
    for i, (picture, _) in enumerate(view.pictures):
        writer.add_image(f"{prefix}/picture-{i}", np.asarray(picture), step, dataformats="HWC")
    if view.rows:
        writer.add_text(f"{prefix}/answers", markdown(view.columns, view.rows), step)
    for name, values in view.values.items():
        writer.add_histogram(f"{prefix}/{name}", values, step)
    writer.flush()


def _wandb(run: Any, view: GroupView, prefix: str, step: int) -> None:
    wandb = module("wandb")
    run.log({**_media(wandb, view, prefix),
             f"{prefix}/answers": wandb.Table(columns=list(view.columns), data=[list(row) for row in view.rows]),
             **{f"{prefix}/{name}": wandb.Histogram(values) for name, values in view.values.items()}}, step=step)


def _trackio(run: Any, view: GroupView, prefix: str, step: int) -> None:
    trackio = module("trackio")
    rows = [dict(zip(view.columns, row, strict=True)) for row in view.rows]
    single = {f"{prefix}/picture-{i}": one for i, one in enumerate(_media(trackio, view, prefix).get(
        f"{prefix}/pictures", ()))}
    run.log({**single, f"{prefix}/answers": trackio.Table(data=rows),
             **{f"{prefix}/{name}": trackio.Histogram(values) for name, values in view.values.items()}}, step=step)


def _media(package: Any, view: GroupView, prefix: str) -> dict[str, list[Any]]:
    pictures = [package.Image(picture, caption=caption) for picture, caption in view.pictures]
    return {f"{prefix}/pictures": pictures} if pictures else {}


def _mlflow(run: Any, view: GroupView, prefix: str, step: int) -> None:
    mlflow = module("mlflow")
    for i, (picture, _) in enumerate(view.pictures):
        mlflow.log_image(picture, key=f"{prefix}/picture-{i}", step=step, synchronous=True)
    if view.rows:
        columns = {name: [row[i] for row in view.rows] for i, name in enumerate(view.columns)}
        mlflow.log_table(columns, f"{prefix}/answers.json")
    mlflow.log_figure(_histograms(view), f"{prefix}/histograms/step-{step:06d}.png")


def _histograms(view: GroupView) -> Any:
    from matplotlib.figure import Figure

    count = max(1, len(view.values))
    figure = Figure(figsize=(3 * count, 2.5), dpi=100, layout="constrained")
    for axes, (name, values) in zip(np.ravel(figure.subplots(1, count)), view.values.items(), strict=False):
        axes.hist(values, bins=20, color="#1f5fa8")
        axes.set_title(name, fontsize=9, parse_math=False)
    return figure


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table whose cells are escaped, so that nothing in a completion becomes markup or another cell."""
    def cell(value: Any) -> str:
        if value is None or isinstance(value, (int, float)):
            return "" if value is None else f"{value:.4g}"
        text = "".join(f"&#{ord(c)};" if c in "|<>&`*_[]\\#!~" else c for c in str(value))
        return " ".join(text.split())
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(v if i == 1 else cell(v) for v in line) + " |" for i, line in enumerate(lines))


_SENDERS: Mapping[str, Callable[[Any, GroupView, str, int], None]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
