"""`vlrl data synthesize`: new training prompts that the task proposes, kept where the model is right at times."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load
from vlrl.cli.terminal import bars, printable, table
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.tools.synthesize import Places, Search

_SHOWN = 3  # instructions that are printed
EXAMPLES = examples(
    "vlrl data synthesize configs/web.yaml --checkpoint runs/web-start -o goals.jsonl",
    "vlrl train configs/web.yaml data.train=goals.jsonl data.own_samples=false     trains on what was kept",
    "vlrl data synthesize configs/web.yaml --candidates 500 --answers 16 --least 0.25 --most 0.75 -o goals.jsonl",
    "vlrl data synthesize configs/web.yaml --failed runs/web -o harder.jsonl       varies what runs/web never solved",
    "vlrl data synthesize configs/web.yaml --failed goals.refused.jsonl -o goals-2.jsonl    and what was never right")


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(epilog=EXAMPLES)(synthesize)


def synthesize(
    config: ConfigPath, settings: Words = None,
    out: Annotated[Path | None, typer.Option(
        "-o", "--out", metavar="FILE", show_default=False,
        help="The new file of rows, .jsonl or .json, e.g. goals.jsonl. Default: runs/name.goals.jsonl.")] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Candidates that are looked for, e.g. 500.")] = 64,
    answers: Annotated[int, typer.Option(min=2, help="Answers (episodes) to each candidate, k, e.g. 16.")] = 8,
    failed: Annotated[Path | None, typer.Option(
        metavar="FILE|RUN", show_default=False,
        help="Vary the prompts with a pass rate of 0 in this file (column pass_at_k, as `vlrl data difficulty` and "
        "this command write it) or in this run folder, e.g. runs/web. Default: the task explores.")] = None,
    least: Annotated[float, typer.Option(min=0, max=1, help="Keep a candidate from this pass rate on, e.g. 0.25; one "
                                         "that is never right is never kept.")] = 0.0,
    most: Annotated[float, typer.Option(min=0, max=1, help="Keep a candidate up to this pass rate, e.g. 0.75; one that "
                                        "is always right is never kept.")] = 1.0,
    checkpoint: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="Weights of a checkpoint, or of a run folder's newest, instead of model.name, e.g. runs/a.")] = None,
    temperature: Annotated[float | None, typer.Option(
        metavar="T", show_default=False, help="Sampling temperature, e.g. 0.7. Default: rollout.temperature.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of an earlier synthesis.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make new training prompts: the task proposes them, and those are kept that the model solves at times.

    The task web walks over its pages, clicking and typing at random, and what a walk brings about becomes an
    instruction that a rule checks on the page (MobileGUI-RL). With --failed it varies prompts at which a model fails
    instead (WebRL): another content of the page, another element, a sub-goal more or fewer. A candidate is solved by
    its own recorded actions, and says nothing that another candidate or a held-out row says.

    Then each is tried k times by the model, as in training, and kept where it is right at least once and not always.
    The rows say how they were made (generator, parent, verifier) and how often they were solved (pass_at_k). Those not
    kept go to FILE's name with .refused before the ending. The same command goes on where it was stopped.
    """
    words = [] if temperature is None else [f"rollout.temperature={json.dumps(temperature)}"]
    loaded = load(config, [*(settings or ()), *words])
    if least > most:
        raise ConfigError(f"--least {least:g} is more than --most {most:g}: nothing lies between them")
    from vlrl.store.checkpoint import find
    from vlrl.tools.synthesize import Places

    run = Path(loaded.run.dir)
    places = Places(out=out or run.with_name(f"{run.name}.goals.jsonl"))
    _check_out(places, force)
    if checkpoint is not None:
        find(checkpoint)  # before what takes time
    from vlrl.config.registry import prints_aside
    from vlrl.curriculum import check
    from vlrl.distributed import comm
    from vlrl.task.mixture import one_task
    from vlrl.tools import synthesize as tool
    from vlrl.tools.measure import choose
    from vlrl.training.build_task import make_task

    task = one_task(make_task(loaded), "vlrl data synthesize")
    check(loaded.curriculum, task)
    search = tool.Search(candidates=candidates, least=least, most=most,
                         parents=tool.failed(failed, task) if failed else ())
    chosen = choose(loaded, None if checkpoint else loaded.model.name, checkpoint)
    for warning in chosen.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with prints_aside(), bars(lines=True, show=comm.is_main()) as tell:
        counts, kept = tool.synthesized(loaded, chosen, search, answers, places, tell)
    if not comm.is_main():
        return
    follow = f"vlrl train {shlex.quote(config)} data.train={shlex.quote(str(places.out))} data.own_samples=false"
    if as_json:
        emit({"file": str(places.out), "refused": str(places.refused), "about": str(places.about), "candidates": counts,
              "kept": len(kept), "next": follow})
    else:
        _show(counts, kept, search, places, follow)


def _check_out(places: Places, force: bool) -> None:
    """Raises before anything is done when the files could not be written."""
    from vlrl.data import check_suffix

    check_suffix(places.out)
    going = places.candidates.exists()  # its own files, of a command that was stopped
    for path in (places.out, *([] if going else [places.refused, places.about])):
        if os.path.lexists(path) and not (force and path.is_file()):
            raise ConfigError(f"{path} exists already: --force replaces it, or name another file with --out")


def _show(counts: Mapping[str, int], kept: list[dict[str, Any]], search: Search, places: Places, follow: str) -> None:
    from rich.console import Console

    shown = table("became of them", "candidates", title=f"{search.candidates:,} candidates")
    for name, count in counts.items():
        shown.add_row(name, f"{count:,}")
    Console(highlight=False).print(shown)
    for row in kept[:_SHOWN]:
        typer.echo(f"{row['pass_at_k']:>5.0%}  {printable(row.get('instruction') or row['id'], 160)}")
    typer.echo(f"{places.out}: {len(kept):,} rows; those that are not kept in {places.refused}")
    typer.echo(f"next: {printable(follow)}")
