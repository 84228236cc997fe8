"""Measured results of prompts: columns for the rows of a data file, a summary, and a plot. Does not import torch.

    pass_at_k         share of correct answers among the answers that could be scored, in [0, 1]
    difficulty        1 - pass_at_k; the previous value of the row is kept in difficulty_given
    reward_mean       mean reward of the answers
    answers_scored    number of answers that could be scored"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.curriculum.filters import BINS, bins
from vlrl.data import SPLITS, json_line, several
from vlrl.data.sources.folders import rows_of_split
from vlrl.data.sources.reading import rows_in
from vlrl.errors import DataError
from vlrl.store.files import replacing
from vlrl.tools.datasets.convert import UsableRow, holds_media, relocated
from vlrl.tools.evaluation.votes import pass_at, reported_ks
from vlrl.training.build_task import make_task

COLUMNS = {"pass_at_k": "share of the k answers that are right, in [0, 1]", "difficulty": "1 - pass_at_k",
           "reward_mean": "mean reward of an answer", "answers_scored": "answers that could be scored, at most k",
           "difficulty_given": "the row's difficulty before"}
"""Column -> its description."""
_COLOR = "#1f5fa8"


@dataclass(frozen=True, kw_only=True)
class MeasuredPrompt:
    """The result of measuring one prompt, or the reason why the prompt could not be answered."""

    number: int
    id: str
    category: str | None = None
    task: str = ""
    passed: tuple[bool | None, ...] = ()
    """One entry per answer: whether the answer is correct, None if it could not be scored."""
    rewards: tuple[float | None, ...] = ()
    left_out: str | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Returns (number of correct answers, number of answers that could be scored)."""
        known = [p for p in self.passed if p is not None]
        return sum(known), len(known)

    @property
    def reason(self) -> str | None:
        """Why this prompt has no measured columns in the file of rows; None if it has them."""
        return self.left_out or (None if self.counts[1] else "none of its answers could be scored")

    def columns(self) -> dict[str, Any]:
        """The measured columns (see COLUMNS) without difficulty_given; {} for a prompt without scored answers."""
        right, scored = self.counts
        if not scored:
            return {}
        rewards = [r for r in self.rewards if r is not None]
        return {"pass_at_k": right / scored, "difficulty": 1 - right / scored, "reward_mean": float(np.mean(rewards)),
                "answers_scored": scored}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of a measurement: numbers of prompts and answers, pass rates, and the prompts that were left out."""

    prompts: int
    measured: int
    answers_drawn: int
    pass_at: Mapping[str, float]
    """k -> mean over prompts of the unbiased pass@k, for k = 1, 2, 4, ... and the number of answers per prompt."""
    histogram: Mapping[str, int]  # number of prompts by pass rate in percent, see curriculum/filters.py
    categories: Mapping[str, Mapping[str, int]]  # category -> histogram of its prompts; {} for a single category
    left_out: Sequence[Mapping[str, str]]  # (id, reason) of each prompt without measured columns


def summary(measured: Sequence[MeasuredPrompt], answers: int) -> Summary:
    """Summarises the results of prompts that got `answers` answers each."""
    known = [m for m in measured if m.reason is None]
    estimates = {k: [pass_at(n, c, k) for c, n in (m.counts for m in known) if n >= k] for k in reported_ks(answers)}
    by_category: dict[str, list[MeasuredPrompt]] = {}
    for m in known:
        by_category.setdefault(m.category or m.task or "none", []).append(m)
    return Summary(prompts=len(measured), measured=len(known), answers_drawn=sum(len(m.passed) for m in measured),
                   pass_at={str(k): float(np.mean(v)) for k, v in estimates.items() if v}, histogram=_histogram(known),
                   categories={name: _histogram(by_category[name]) for name in sorted(by_category)}
                   if len(by_category) > 1 else {},
                   left_out=[{"id": m.id, "reason": m.reason} for m in measured if m.reason is not None])


def _histogram(known: Sequence[MeasuredPrompt]) -> dict[str, int]:
    places = Counter(bins(np.array([c / n for c, n in (m.counts for m in known)])).tolist()) if known else Counter()
    return {name: places[i] for i, name in enumerate(BINS)}


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasurementFiles:
    """Paths of the files of a measurement. All names are derived from `out`, the path of the file of rows."""

    out: Path

    @property
    def part(self) -> Path:
        """The temporary file with the results so far, which exists until the measurement is complete."""
        return self.out.with_name(f"{self.out.stem}.part.jsonl")

    @property
    def about(self) -> Path:
        """The file with the facts of the measurement and the summary."""
        return self.out.with_name(f"{self.out.stem}.about.json")

    @property
    def picture(self) -> Path:
        return self.out.with_suffix(".png")


def data_file(config: Config, split: str) -> Path | None:
    """The file given by `data.<split>`. None if the task generates its samples, or if the setting stands for several
    files (a pattern, a split of a folder, a Hub data set)."""
    name = getattr(config.data, split) if split in SPLITS else ""
    return Path(name) if name and (os.path.exists(name) or not several(name)) else None


def default_out(config: Config, split: str) -> Path:
    """The default output file: <data file>.difficulty.jsonl next to the data file. If there is no data file, it is <run
    folder>.difficulty.jsonl next to the run folder."""
    file = data_file(config, split)
    place = Path(config.run.dir) if file is None else file if file.is_dir() else file.with_suffix("")
    return place.with_name(f"{place.name}.difficulty.jsonl")


def rows_for(config: Config, split: str, out: Path) -> list[dict[str, Any]]:
    """The canonical rows of `data.<split>`, with their media paths changed to be valid in the new file `out`. Rows that
    cannot be read are left out.

    Returns [] if there is no single data file, or if a row has embedded media. Raises DataError if a media path would
    lie outside the new file's folder."""
    file = data_file(config, split)
    if file is None or not file.exists():
        return []
    root = Path(config.data.root) if config.data.root else file.parent
    target = root if config.data.root else out.parent
    data = make_task(config).data
    found = rows_in(file, data.format, root, data.columns, answer_type=data.answer_type)
    read = [(where, row) for where, row in rows_of_split(found, split)
            if not isinstance(row, DataError) and "id" in row]
    if any(holds_media(row) for _, row in read):  # JSON cannot hold media: columns by id instead
        return []
    rows = [relocated(UsableRow(where, str(row["id"]), row, ()), root, target) for where, row in read]
    for row in rows:
        json_line(row)
    return rows


def joined(rows: Sequence[Mapping[str, Any]], measured: Sequence[MeasuredPrompt]) -> tuple[list[dict[str, Any]], bool]:
    """Adds the measured columns to the rows of the data file; returns (the rows, True). If the rows do not match the
    prompts, returns (one row per prompt with only its id and the measured columns, False)."""
    columns = {m.id: m.columns() for m in measured if m.reason is None}
    if not rows or not columns.keys() <= {str(row["id"]) for row in rows}:
        return [{"id": m.id, **m.columns()} for m in measured if m.reason is None], False
    return [_with(row, columns.get(str(row["id"]), {})) for row in rows], True


def _with(row: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the measured columns, which replace those of an earlier measurement. The difficulty that the row had
    before any measurement is kept in difficulty_given."""
    given = row.get("difficulty_given" if "pass_at_k" in row else "difficulty")
    clean = {name: value for name, value in row.items() if name not in COLUMNS}
    if not columns:
        return dict(row) if "pass_at_k" not in row else clean | ({} if given is None else {"difficulty": given})
    return {**clean, **columns, **({} if given is None else {"difficulty_given": given})}


# --- picture ----------------------------------------------------------------------------------------------------------


def plot(numbers: Summary, path: Path, title: str) -> None:
    """Writes a histogram of the pass rates in the Summary `numbers` as a PNG. Its bars are stacked by category."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    parts = dict(numbers.categories) if 1 < len(numbers.categories) <= 10 else {"": numbers.histogram}
    below = np.zeros(len(BINS))
    for i, (name, counts) in enumerate(parts.items()):
        heights = np.array([counts[b] for b in BINS], float)
        axes.bar(BINS, heights, bottom=below, color=colormaps["tab10"](i) if name else _COLOR,
                 label=name[:40].replace("$", r"\$"))
        below += heights
    for place, total in enumerate(below):
        axes.annotate(f"{int(total):,}", (place, total), ha="center", va="bottom", fontsize=9)
    axes.set(xlabel="right answers to a prompt, percent", ylabel="prompts")
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.locator_params(axis="y", integer=True)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(parts) > 1:
        axes.legend(frameon=False, fontsize=9)
    with replacing(path, sync=False) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box is drawn instead
        figure.savefig(temporary, format="png")
