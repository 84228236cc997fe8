"""Which rows a synthesis varies: those of a file, of a run by a recipe (parents.py), or of the training split. No
torch.

    search = search_of(config, task, where, Wanted(source=Path("runs/a"), recipe="sws"))
"""

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
from vlrl.tools.synthesis.parents import VARIANTS, GroupOutcome, Parent, recipe, visits_in, visits_of
from vlrl.tools.synthesis.proposals import Search
from vlrl.tools.synthesis.row_export import MediaLocation, row_of
from vlrl.types import Row

CANDIDATES = 64
_STREAM = 29
"""Second number of the random streams by which parents are drawn."""


@dataclass(frozen=True, kw_only=True)
class SeedSettings:
    """What is to be made from what; None = as the recipe has it."""

    candidates: int | None = None
    failed: Path | None = None
    """File or run whose prompts with a pass rate of 0 are varied."""
    source: Path | None = None
    """Run, or file of pass rates, that a recipe is about."""
    recipe: str | None = None
    written: bool = False
    """A generator writes: without parents it varies the training rows."""
    least: float | None = None
    most: float | None = None
    keep: int | None = None


def search_of(config: Config, task: Task, where: MediaLocation, wanted: SeedSettings) -> Search:
    """Returns what is looked for. Raises ConfigError for what does not go together, and where there is nothing to
    vary.
    """
    if (wanted.source is None) != (wanted.recipe is None):
        raise ConfigError("--from names what a recipe is about, and --recipe the recipe: give both, e.g. --recipe sws "
                          "--from runs/a, or neither")
    if wanted.failed and wanted.source:
        raise ConfigError(f"--failed {wanted.failed} and --recipe {wanted.recipe} both say what is varied: leave one "
                          "out")
    how = recipe(wanted.recipe) if wanted.recipe else None
    parents, rows, count = list[Parent](), dict[str, Row](), wanted.candidates or 0
    if how and wanted.source and wanted.recipe:
        visits = _visits(wanted.source, how.needs, wanted.recipe)
        parents = how.choose(visits, count or (0 if how.drawn else CANDIDATES), np.random.default_rng(
            [config.seed, _STREAM]))
        if not parents:
            raise ConfigError(f"--recipe {wanted.recipe}: it finds nothing to vary among {len(visits):,} groups of "
                              f"{wanted.source}: let the model train longer, or take --failed")
        rows = rows_of(task, {p.id for p in parents} | {p.other for p in parents if p.other}, visits, where)
        count = count or (VARIANTS * len(parents) if how.drawn else CANDIDATES)
    elif wanted.failed:
        rows = {str(row["id"]): row for row in failed(wanted.failed, config, task, where)}
        parents = [Parent(id=id) for id in rows]
    elif wanted.written:
        rows = _all(task, where)
        parents = [Parent(id=id) for id in rows]
    least = wanted.least if wanted.least is not None else how.least if how else 0.0
    most = wanted.most if wanted.most is not None else how.most if how else 1.0
    if least > most:
        raise ConfigError(f"--least {least:g} is more than --most {most:g}: nothing lies between them")
    return Search(candidates=count or CANDIDATES, least=least, most=most, parents=tuple(rows[p.id] for p in parents),
                  ways=tuple((p.way, rows.get(p.other)) for p in parents) if how else (),
                  keep=wanted.keep if wanted.keep is not None else how.keep if how else None)


def _visits(source: Path, needs: str, name: str) -> list[GroupOutcome]:
    if source.is_dir():
        return visits_of(source)
    if needs:
        raise ConfigError(f"--recipe {name} --from {source}: a file of pass rates does not tell what it needs: name "
                          f"{needs}, e.g. runs/a")
    visits = visits_in(read_rows(source, "canonical"))
    if not visits:
        raise ConfigError(f"--from {source}: it has no column pass_at_k: name what `vlrl data difficulty` or `vlrl "
                          "data synthesize` wrote, or the folder of a run")
    return visits


def rows_of(task: Task, ids: set[str], visits: Sequence[GroupOutcome], where: MediaLocation) -> dict[str, Row]:
    """Returns the rows of prompts by id: those of the training split, and those that a run made with knobs. Raises
    ConfigError for one that there is not.
    """
    samples = task_samples(task, "train")
    known = (s for i in range(len(samples)) if (s := readable(samples, i)))
    rows = {s.id: row_of(task, s, where) for s in known if s.id in ids}
    for visit in visits:
        row = json.loads(visit.row or "{}") if visit.id in ids and visit.id not in rows else {}
        if row.get("knobs"):  # its picture is made again
            rows[visit.id] = {**row, "id": visit.id}
    if lost := sorted(ids - rows.keys()):
        raise ConfigError(f"prompt {lost[0]!r} of the run or file is no training sample of task '{task.name}': name "
                          "the config that it was made with")
    return rows


def _all(task: Task, where: MediaLocation) -> dict[str, Row]:
    samples = task_samples(task, "train")
    return {s.id: row_of(task, s, where) for i in range(len(samples)) if (s := readable(samples, i))}


def failed(source: Path, config: Config, task: Task, where: MediaLocation) -> tuple[Row, ...]:
    """Returns the rows of a file, or the training prompts of a run folder, whose pass rate is 0.

    A file has the column pass_at_k (`vlrl data difficulty`, or an earlier synthesis); a line of id and columns alone
    stands for the sample of that id. Raises ConfigError where there is none.
    """
    rows = _of_run(source) if source.is_dir() else read_rows(source, "canonical")
    root = Path(config.data.root) if config.data.root else source.parent
    never = {str(row["id"]): relocated(UsableRow(str(source), str(row["id"]), row, ()), root, where.root)
             for row in rows if "id" in row and row.get("pass_at_k") == 0}
    if not never:
        known = any(row.get("pass_at_k") is not None for row in rows)
        raise ConfigError(f"--failed {source}: none of its {len(rows):,} prompts has a pass rate of 0" if known else
                          f"--failed {source}: it has no column pass_at_k: name what `vlrl data difficulty` or `vlrl "
                          "data synthesize` wrote, or the folder of a run")
    bare = {name for name, row in never.items() if not {*row} - {"id", *COLUMNS}}
    if bare:
        own = {s.id: row_of(task, s, where) for s in task_samples(task, "train") if s.id in bare}
        if lost := sorted(bare - {*own}):
            raise ConfigError(f"--failed {source}: {lost[0]!r} is no training sample of task '{task.name}': name the "
                              "config that it was measured with")
        never |= own
    return tuple(plain({k: v for k, v in row.items() if k not in COLUMNS}) for row in never.values())


def _of_run(folder: Path) -> list[Row]:
    """Returns id and pass rate of the prompts that a run drew."""
    path = folder / "prompts.parquet"
    try:
        table = pq.read_table(path, columns=["sample_id", "pass_rate"])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"--failed {folder}: {path.name} cannot be read ({failure(error)}): name the folder of a run "
                          "that has saved a checkpoint, or a file of rows") from None
    return [{"id": row["sample_id"], "pass_at_k": row["pass_rate"]} for row in table.to_pylist() if row["sample_id"]]
