"""Selects the rows that a synthesis varies: rows of a file, rows that a recipe selects from a run (parents.py), or the
training split.

    search = search_of(config, task, where, SeedSettings(source=Path("runs/a"), recipe="sws"))

This module imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.config.registry import failure
from vlrl.config.schema import Config
from vlrl.data import read_rows, readable
from vlrl.errors import ConfigError
from vlrl.store import plain
from vlrl.task import Task, task_samples
from vlrl.tools.datasets.convert import UsableRow, relocated
from vlrl.tools.datasets.prompt_table import COLUMNS
from vlrl.tools.synthesis.parents import PER_PARENT, GroupOutcome, Parent, outcomes_of_rows, outcomes_of_run, recipe
from vlrl.tools.synthesis.proposals import Search
from vlrl.tools.synthesis.row_export import MediaLocation, row_of
from vlrl.types import Row

CANDIDATES = 64
_STREAM = 29  # second number in the key of the random stream from which parents are drawn


@dataclass(frozen=True, kw_only=True)
class SeedSettings:
    """Which rows are varied, and which new prompts are kept. None = the recipe or a default decides."""

    candidates: int | None = None
    failed: Path | None = None  # A file or a run; its prompts with a pass rate of 0 are varied
    source: Path | None = None  # A run, or a file of pass rates, from which the recipe selects parents
    recipe: str | None = None
    written: bool = False
    """Whether a generator writes the prompts. If so, and if no parents are given, the training rows are varied."""
    least: float | None = None
    most: float | None = None
    keep: int | None = None


def search_of(config: Config, task: Task, location: MediaLocation, settings: SeedSettings) -> Search:
    """The Search that the settings describe, with the rows that are varied. Raises ConfigError if settings contradict
    each other, or if there is nothing to vary."""
    if (settings.source is None) != (settings.recipe is None):
        raise ConfigError("--from and --recipe can only be given together, e.g. --recipe sws --from runs/a")
    if settings.failed and settings.source:
        raise ConfigError(f"--failed {settings.failed} and --recipe {settings.recipe} both choose the rows to vary. "
                          "Remove one of these options")
    how = recipe(settings.recipe) if settings.recipe else None
    parents, rows, count = list[Parent](), dict[str, Row](), settings.candidates or 0
    if how and settings.source and settings.recipe:
        outcomes = _outcomes(settings.source, how.needs, settings.recipe)
        parents = how.choose(outcomes, count or (0 if how.drawn else CANDIDATES), np.random.default_rng(
            [config.seed, _STREAM]))
        if not parents:
            raise ConfigError(f"--recipe {settings.recipe}: the recipe finds nothing to vary among {len(outcomes):,} "
                              f"groups of {settings.source}. Train longer, or use --failed instead")
        rows = rows_of(task, {p.id for p in parents} | {p.other for p in parents if p.other}, outcomes, location)
        count = count or (PER_PARENT * len(parents) if how.drawn else CANDIDATES)
    elif settings.failed:
        rows = {str(row["id"]): row for row in failed(settings.failed, config, task, location)}
        parents = [Parent(id=id) for id in rows]
    elif settings.written:
        samples = task_samples(task, "train")
        rows = {s.id: row_of(task, s, location) for i in range(len(samples)) if (s := readable(samples, i))}
        parents = [Parent(id=id) for id in rows]
    least = settings.least if settings.least is not None else how.least if how else 0.0
    most = settings.most if settings.most is not None else how.most if how else 1.0
    if least > most:
        raise ConfigError(f"--least {least:g} is more than --most {most:g}, so no pass rate lies between them. Lower "
                          "--least, or raise --most")
    return Search(candidates=count or CANDIDATES, least=least, most=most, parents=tuple(rows[p.id] for p in parents),
                  variations=tuple((p.variation, rows.get(p.other)) for p in parents) if how else (),
                  keep=settings.keep if settings.keep is not None else how.keep if how else None)


def _outcomes(source: Path, needs: str, name: str) -> list[GroupOutcome]:
    if source.is_dir():
        return outcomes_of_run(source)
    if needs:
        raise ConfigError(f"--recipe {name} --from {source}: a file of pass rates is not enough for this recipe. "
                          f"Give {needs}, e.g. runs/a")
    outcomes = outcomes_of_rows(read_rows(source, "canonical"))
    if not outcomes:
        raise ConfigError(f"--from {source}: the file has no column pass_at_k. Give a file that `vlrl data difficulty` "
                          "or `vlrl data synthesize` wrote, or the folder of a run")
    return outcomes


def rows_of(task: Task, ids: set[str], outcomes: Sequence[GroupOutcome], location: MediaLocation) -> dict[str, Row]:
    """Id -> row for the prompts `ids`. They are in the training split, or were generated by a run with knobs
    (difficulty settings). Raises ConfigError for an unknown id."""
    samples = task_samples(task, "train")
    known = (s for i in range(len(samples)) if (s := readable(samples, i)))
    rows = {s.id: row_of(task, s, location) for s in known if s.id in ids}
    for outcome in outcomes:
        row = json.loads(outcome.row or "{}") if outcome.id in ids and outcome.id not in rows else {}
        if row.get("knobs"):  # its image is generated again
            rows[outcome.id] = {**row, "id": outcome.id}
    if lost := sorted(ids - rows.keys()):
        raise ConfigError(f"prompt {lost[0]!r} of the run or file is not a training sample of task '{task.name}': use "
                          "the config that the run or file was made with")
    return rows


def failed(source: Path, config: Config, task: Task, location: MediaLocation) -> tuple[Row, ...]:
    """The rows with a pass rate of 0, from a file of rows or from the training prompts of a run.

    A file must have the column pass_at_k (from `vlrl data difficulty`, or an earlier synthesis). A line with only an id
    and measured columns refers to the training sample with that id. Raises ConfigError if no row has pass rate 0."""
    rows = _of_run(source) if source.is_dir() else read_rows(source, "canonical")
    root = Path(config.data.root) if config.data.root else source.parent
    never = {str(row["id"]): relocated(UsableRow(str(source), str(row["id"]), row, ()), root, location.root)
             for row in rows if "id" in row and row.get("pass_at_k") == 0}
    if not never:
        known = any(row.get("pass_at_k") is not None for row in rows)
        raise ConfigError(f"--failed {source}: none of its {len(rows):,} prompts has a pass rate of 0" if known else
                          f"--failed {source}: the file has no column pass_at_k. Give a file that `vlrl data "
                          "difficulty` or `vlrl data synthesize` wrote, or the folder of a run")
    bare = {name for name, row in never.items() if not {*row} - {"id", *COLUMNS}}
    if bare:
        own = {s.id: row_of(task, s, location) for s in task_samples(task, "train") if s.id in bare}
        if lost := sorted(bare - {*own}):
            raise ConfigError(f"--failed {source}: {lost[0]!r} is not a training sample of task '{task.name}'. Use "
                              "the config with which this file was measured")
        never |= own
    return tuple(plain({k: v for k, v in row.items() if k not in COLUMNS}) for row in never.values())


def _of_run(folder: Path) -> list[Row]:
    """A row with id and pass rate for each prompt that a run has used."""
    path = folder / "prompts.parquet"
    try:
        table = pq.read_table(path, columns=["sample_id", "pass_rate"])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"--failed {folder}: {path.name} cannot be read ({failure(error)}). Give the folder of a run "
                          "that has saved a checkpoint, or a file of rows") from None
    return [{"id": row["sample_id"], "pass_at_k": row["pass_rate"]} for row in table.to_pylist() if row["sample_id"]]
