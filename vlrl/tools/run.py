"""A run folder as one Python object with its settings, tables, rollouts and checkpoints. The folder is only read, which
is possible while the run is in progress. Does not import torch.

    run = load_run("runs/quickstart")
    print(run, run.metrics.column("reward/mean")[-1], run.best)"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import yaml

from vlrl.config.loading import validate
from vlrl.config.schema import Config, LimitsSettings
from vlrl.data.media import load
from vlrl.errors import RunError
from vlrl.monitoring import notebook
from vlrl.monitoring.progress import describe, terminal
from vlrl.monitoring.tracked_groups import with_marks
from vlrl.store import RunFolder, checkpoint
from vlrl.store.files import read_small
from vlrl.tools.experiments.report import plot_reward, summary_table
from vlrl.types import Media

if TYPE_CHECKING:
    from PIL import Image

_MARKS = ("metrics.jsonl", "heartbeat.json", "run.lock", "env.json")
"""A folder that contains one of these files is a run folder."""
_ENDED = ("finished", "failed", "interrupted")


def load_run(folder: str | Path) -> Run:
    """Opens the folder of a run, finished or not. Raises RunError if it is not a run folder."""
    path = Path(folder)
    if is_run(path):
        return Run(path)
    if not os.path.isdir(path):
        raise RunError(f"{str(path)!r} is not a folder. Give the run.dir of a run, e.g. runs/quickstart")
    below = sorted(p.name for p in path.iterdir() if is_run(p))
    near = f" Runs below it: {', '.join(below[:5])}." if below else " Name the run.dir of a run, e.g. runs/quickstart."
    raise RunError(f"{path} is not a run folder: it contains none of {', '.join(_MARKS)}.{near}")


def is_run(path: Path) -> bool:
    """Whether a folder contains one of the files by which a run folder is recognised."""
    return any(os.path.isfile(path / name) for name in _MARKS)


class Run:
    """A training run, given by its folder. Every property reads the files of the folder again."""

    def __init__(self, path: str | Path):
        self._folder = RunFolder(path)

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def config(self) -> Config:
        """The settings of the run, with all defaults. Raises RunError if config.yaml is missing or cannot be read."""
        path = self.path / "config.yaml"
        try:
            return validate(yaml.safe_load(read_small(path)) or {})
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            raise RunError(f"the settings of the run cannot be read from {path}: {error} Restore that file.") from None

    @property
    def metrics(self) -> pa.Table:
        """metrics.jsonl as a table with one row per step. A cell is null if the line has no value for the column."""
        return _table(self._folder.metrics())

    @property
    def evaluations(self) -> pa.Table:
        """eval.jsonl as a table with one row per evaluation of a split. If an evaluation was repeated, only the newer
        line is included."""
        return _table(list({(line.get("step"), line.get("split")): line for line in self._folder.evals()}.values()))

    def rollouts(self, step: int | None = None, split: str | None = None,
                 columns: Sequence[str] | None = None) -> pa.Table:
        """The training rollouts of one step or of all steps as a table; with `split`, the rollouts of the evaluations
        on this split. The columns are those of vlrl.store.SCHEMA.

        Files that cannot be read are skipped and named in `notes`."""
        return self._folder.rollouts(step, split=split, columns=columns)

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the complete checkpoints, in the order of their steps."""
        return checkpoint.complete_checkpoints(self._folder.checkpoints)

    @property
    def last(self) -> Path | None:
        """The folder of the newest complete checkpoint; None if there is none."""
        return next(reversed(self.checkpoints), None)

    @property
    def best(self) -> Path | None:
        """The folder of the checkpoint with the best evaluation (save.best). None if no checkpoint is marked as best,
        or if this checkpoint was deleted."""
        step = checkpoint.best_record(self._folder.checkpoints).get("step")
        return next((path for path in self.checkpoints if checkpoint.step_of(path) == step), None)

    @property
    def notes(self) -> list[str]:
        """One note for each line or file of the run folder that could not be read and was skipped so far."""
        return list(dict.fromkeys(self._folder.notes))

    def pictures(self, most: int = 4, split: str = "heldout") -> list[Image.Image]:
        """The first image of each of up to `most` samples of the newest evaluation of `split`, with boxes drawn into
        it: the target in green, the answers in other colours.

        Videos, and images that the run did not store, are skipped."""
        columns = ["step", "group_id", "index", "media", "marks"]
        rows = self.rollouts(split=split, columns=columns).to_pylist()
        newest = max((row["step"] for row in rows), default=0)
        groups: dict[str, list[Any]] = {}
        for row in rows:
            if row["step"] == newest:
                groups.setdefault(row["group_id"], []).append(row)
        marked = (_marked(self.path, group) for group in groups.values())
        return list(itertools.islice((picture for picture in marked if picture is not None), most))

    def show(self, *, follow: bool = False, pictures: int = 2, every_s: float = 5.0) -> None:
        """Prints each metric of each split before and after training, and the gain, with 95 % intervals. In a notebook,
        also shows the plot of the reward and up to `pictures` images.

        With `follow`, first shows the progress of the run every `every_s` seconds until the run ends. In a notebook,
        the progress includes a live plot. An interrupt stops the display but not the run."""
        console = terminal()
        if follow:
            self._follow(console, every_s)
        console.print(summary_table(self._folder))
        if console.is_jupyter:
            from IPython.display import Image as Shown
            from IPython.display import display

            with tempfile.TemporaryDirectory() as scratch:
                display(Shown(plot_reward(self._folder, Path(scratch) / "reward.png").read_bytes(), width=720))
            for picture in self.pictures(pictures):
                display(picture)

    def _follow(self, console: Any, every_s: float) -> None:
        cell, last = notebook.Cell() if console.is_jupyter else None, ""
        while True:
            beat = self._folder.last_heartbeat()
            ended = beat.get("state") in _ENDED
            if cell:
                lines = self._folder.metrics()
                points = [(line["step"] + 1, line["reward/mean"]) for line in lines
                          if isinstance(line.get("reward/mean"), (int, float))]
                words = describe(lines[-1]) if lines else "no steps yet"
                cell.show(notebook.page(len(lines), beat.get("steps"), words, points), now=ended)
            elif repr(self) != last:
                last = repr(self)
                console.print(last, soft_wrap=True, markup=False)
            if ended:
                return
            time.sleep(every_s)

    def __repr__(self) -> str:
        last: Mapping[str, Any] = next(reversed(self._folder.metrics()), {})
        done, total = last.get("step", -1) + 1, self._folder.last_heartbeat().get("steps")
        reward = last.get("reward/mean")
        words = [f"{done} steps" if total is None else f"{done} of {total} steps"]
        words += [f"reward {reward:.3f}"] if isinstance(reward, (int, float)) else []
        return f"Run({str(self.path)!r}, {', '.join(words)})"


def _marked(run: Path, rows: Sequence[Mapping[str, Any]]) -> Image.Image | None:
    """The first image of a group of rollouts, with the target and the answers drawn into it. None if the image is
    missing or cannot be read."""
    media = (rows[0]["media"] or [{}])[0]
    path = run / str(media.get("path") or "")
    if media.get("kind") != "image" or not path.resolve().is_relative_to(run.resolve() / "media"):
        return None
    try:
        picture = load(Media(source=path), LimitsSettings()).frames[0]
        return with_marks(picture, [(row["index"] or 0, json.loads(row["marks"] or "null")) for row in rows])
    except ValueError:  # a DataError, or marks that are not JSON
        return None


def _table(lines: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A table with one row per line, and one column for each key that occurs in any line, in order of appearance."""
    names = list(dict.fromkeys(key for line in lines for key in line))
    return pa.table({name: _column([line.get(name) for line in lines]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    """The values [N] as a column of one type: numbers if all values are null, JSON texts if the types are mixed."""
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values])
    return column.cast(pa.float64()) if pa.types.is_null(column.type) else column
