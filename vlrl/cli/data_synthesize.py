"""`vlrl data synthesize`: new training prompts, of the task or of a generator, kept where a model is at times right."""

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
from vlrl.cli.terminal import printable, progress_bars, table
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.tools.synthesis.prompt_writer import WriterSettings
    from vlrl.tools.synthesis.synthesize import Search, Synthesis, SynthesisFiles

_SHOWN = 3  # instructions that are printed
EXAMPLES = examples(
    "vlrl data synthesize configs/web.yaml --checkpoint runs/web-start -o goals.jsonl",
    "vlrl train configs/web.yaml data.train=goals.jsonl data.own_samples=false     trains on what was kept",
    "vlrl data synthesize configs/web.yaml --candidates 500 --answers 16 --least 0.25 --most 0.75 -o goals.jsonl",
    "vlrl data synthesize configs/web.yaml --failed runs/web -o harder.jsonl       varies what runs/web never solved",
    "vlrl data synthesize configs/web.yaml --failed goals.refused.jsonl -o goals-2.jsonl    and what was never right",
    "vlrl data synthesize my.yaml --endpoint http://127.0.0.1:8000/v1 --recipe sws --from runs/a --checkpoint runs/a "
    "-o new.jsonl    a model writes new rows for the weaknesses of runs/a")


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(epilog=EXAMPLES)(synthesize)


def synthesize(
    config: ConfigPath, settings: Words = None,
    out: Annotated[Path | None, typer.Option(
        "-o", "--out", metavar="FILE", show_default=False,
        help="The new file of rows, .jsonl or .json, e.g. goals.jsonl. Default: runs/name.goals.jsonl.")] = None,
    candidates: Annotated[int | None, typer.Option(
        min=1, show_default=False, help="Candidates that are looked for, e.g. 500. Default: 64; eva: four to each "
        "prompt that it draws.")] = None,
    answers: Annotated[int, typer.Option(min=2, help="Answers (episodes) to each candidate, k, e.g. 16.")] = 8,
    failed: Annotated[Path | None, typer.Option(
        metavar="FILE|RUN", show_default=False,
        help="Vary the prompts with a pass rate of 0 in this file (column pass_at_k, as `vlrl data difficulty` and "
        "this command write it) or in this run folder, e.g. runs/web. Default: the task explores.")] = None,
    recipe: Annotated[str | None, typer.Option(
        show_default=False, help="Vary what a published recipe chooses of --from: sws (weaknesses, combined), eva (the "
        "most informative prompts), synthetic_data_rl (harder and easier ones).")] = None,
    source: Annotated[Path | None, typer.Option(
        "--from", metavar="FILE|RUN", show_default=False, help="The run folder, or for synthetic_data_rl a file with "
        "pass_at_k, that --recipe is about, e.g. runs/a.")] = None,
    least: Annotated[float | None, typer.Option(
        min=0, max=1, show_default=False, help="Keep a candidate from this pass rate on, e.g. 0.25; one that is never "
        "right is never kept. Default: above 0; sws: 0.25.")] = None,
    most: Annotated[float | None, typer.Option(
        min=0, max=1, show_default=False, help="Keep a candidate up to this pass rate, e.g. 0.75; one that is always "
        "right is never kept. Default: below 1; sws: 0.75.")] = None,
    keep: Annotated[int | None, typer.Option(
        min=1, show_default=False, help="Keep so many, those of the lowest pass rates first, e.g. 500. Default: all; "
        "synthetic_data_rl: 500.")] = None,
    endpoint: Annotated[str | None, typer.Option(
        metavar="URL", show_default=False, help="A generator that writes the candidates: an OpenAI-compatible server, "
        "e.g. http://127.0.0.1:8000/v1. Default: the task proposes them.")] = None,
    model: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False, help="One of that server's models. Default: its only one.")] = None,
    key_env: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False,
        help="The environment variable that holds that server's key. Default: no key is sent.")] = None,
    teacher: Annotated[str | None, typer.Option(
        metavar="URL", show_default=False, help="The server whose answers have to agree. Default: the generator's.")
    ] = None,
    teacher_model: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False, help="One of the teacher's models. Default: its only one.")] = None,
    teacher_key_env: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False, help="The environment variable that holds the teacher's key.")] = None,
    votes: Annotated[int, typer.Option(min=1, help="Answers of the teacher to each candidate, more than half of which "
                                       "have to agree, e.g. 16.")] = 8,
    written_at: Annotated[float, typer.Option("--written-at", metavar="T", min=0, help="Sampling temperature of "
                                              "generator and teacher, e.g. 0.7.")] = 1.0,
    price_in: Annotated[float | None, typer.Option(
        min=0, show_default=False, help="Price of a million tokens of prompts of generator and teacher, e.g. 0.15.")
    ] = None,
    price_out: Annotated[float | None, typer.Option(
        min=0, show_default=False, help="Price of a million tokens that they write, e.g. 0.6.")] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Requests to a server at a time.")] = 8,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.1,
                                             help="Most seconds that a reply may take.")] = 300.0,
    retries: Annotated[int, typer.Option(metavar="N", min=0, max=100, help="How often a request is tried again.")] = 4,
    checkpoint: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="Weights of a checkpoint, or of a run folder's newest, instead of model.name, e.g. runs/a.")] = None,
    temperature: Annotated[float | None, typer.Option(
        metavar="T", show_default=False, help="Sampling temperature, e.g. 0.7. Default: rollout.temperature.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of an earlier synthesis.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make new training prompts, by the task or by a generator, and keep those that the model solves at times.

    The task web walks over its pages, clicking and typing at random, and what a walk brings about becomes an
    instruction that a rule checks on the page (MobileGUI-RL). With --failed it varies prompts at which a model fails
    instead (WebRL): another content of the page, another element, a sub-goal more or fewer. A task with knobs makes
    samples with knobs anywhere in their ranges, or near to those of the parents.

    With --endpoint a model behind a server writes a variation of each parent: of the training rows, or of what --failed
    or --recipe chooses. Its right answer is what the task works out, or what more than half of a teacher's answers say;
    nothing that the generator says of it counts. Every reply is on the disk as soon as it comes, and is paid once.

    A candidate says and shows nothing that another one or a held-out row does. Each is tried k times by the model, as
    in training, and kept where it is right at least once and not always. The rows say how they were made (generator,
    parent, verifier) and how often they were solved (pass_at_k). Those not kept go to FILE's name with .refused before
    the ending. The same command goes on where it was stopped; it ends with exit code 1 where a server left something
    out.
    """
    words = [] if temperature is None else [f"rollout.temperature={json.dumps(temperature)}"]
    loaded = load(config, [*(settings or ()), *words])
    from vlrl.store.checkpoint import find
    from vlrl.tools.synthesis.seed_rows import SeedSettings
    from vlrl.tools.synthesis.synthesize import SynthesisFiles

    run = Path(loaded.run.dir)
    places = SynthesisFiles(out=out or run.with_name(f"{run.name}.goals.jsonl"))
    _check_out(places, force)
    if checkpoint is not None:
        find(checkpoint)  # before what takes time
    order = None
    if endpoint is not None:
        from vlrl.tools.synthesis.prompt_writer import WriterSettings

        common = {"concurrency": concurrency, "timeout_s": timeout_s, "retries": retries}
        other = _server("--teacher", teacher, teacher_model, teacher_key_env, common) if teacher else None
        order = WriterSettings(generator=_server("--endpoint", endpoint, model, key_env, common), teacher=other,
                               votes=votes,
                      temperature=written_at, price_in=price_in, price_out=price_out)
    elif teacher is not None:
        raise ConfigError(f"--teacher {teacher} answers what a generator writes: name one with --endpoint")
    wanted = SeedSettings(candidates=candidates, failed=failed, source=source, recipe=recipe, written=order is not None,
                    least=least, most=most, keep=keep)
    _run(config, loaded, wanted, order, checkpoint, answers, places, as_json)


def _server(option: str, url: str, model: str | None, key_env: str | None, common: Mapping[str, Any]) -> Any:
    """Returns a server of the command line. Raises ConfigError for a bad address or a key that is not there."""
    from vlrl.services.chat import address_of, key_of
    from vlrl.tools.evaluation.grid import Server

    address_of(url, option)
    name = "--key-env" if option == "--endpoint" else f"{option}-key-env"
    return Server(url=url, model=model, key=key_of(key_env, name), option=option, **common)


def _run(config: str, loaded: Any, wanted: Any, order: WriterSettings | None, checkpoint: Path | None, answers: int,
         places: SynthesisFiles, as_json: bool) -> None:
    from vlrl.config.registry import prints_aside
    from vlrl.curriculum import check
    from vlrl.distributed import comm
    from vlrl.task.mixture import require_one_task
    from vlrl.tools.evaluation.measure import choose_model
    from vlrl.tools.synthesis import synthesize as tool
    from vlrl.tools.synthesis.row_export import MediaLocation
    from vlrl.tools.synthesis.seed_rows import search_of
    from vlrl.training.build_task import make_task

    task = require_one_task(make_task(loaded), "vlrl data synthesize")
    check(loaded.curriculum, task)
    search = search_of(loaded, task, MediaLocation.of(loaded, places.out), wanted)
    if order:
        from vlrl.tools.synthesis import prompt_writer as written

        written.check(task, search.parents)
    chosen = choose_model(loaded, None if checkpoint else loaded.model.name, checkpoint)
    for warning in chosen.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with prints_aside(), progress_bars(lines=True, show=comm.is_main()) as progress:
        outcome = tool.synthesized(loaded, chosen, search, answers, places, progress, order)
    if comm.is_main():
        follow = f"vlrl train {shlex.quote(config)} data.train={shlex.quote(str(places.out))} data.own_samples=false"
        if as_json:
            emit({"file": str(places.out), "refused": str(places.refused), "about": str(places.about),
                  "candidates": outcome.counts, "gates": tool.gates(outcome.counts), "kept": len(outcome.rows),
                  "unanswered": outcome.unanswered, "cost": outcome.costs, "next": follow})
        else:
            _show(outcome, search, places, follow)
    if outcome.unanswered:
        raise typer.Exit(1)


def _check_out(places: SynthesisFiles, force: bool) -> None:
    """Raises before anything is done when the files could not be written."""
    from vlrl.data import check_suffix
    from vlrl.tools.synthesis.synthesize import goes_on

    check_suffix(places.out)
    if goes_on(places):
        return
    going = places.candidates.exists() or (places.replies.written.exists() and not places.out.exists())  # was stopped
    for path in (places.out, *([] if going else [places.refused, places.about])):
        if os.path.lexists(path) and not (force and path.is_file()):
            raise ConfigError(f"{path} exists already: --force replaces it, or name another file with --out")


def _show(outcome: Synthesis, search: Search, places: SynthesisFiles, follow: str) -> None:
    from rich.console import Console

    from vlrl.tools.synthesis.synthesize import gates

    shown = table("became of them", "candidates", title=f"{search.candidates:,} candidates")
    for name, count in outcome.counts.items():
        shown.add_row(name, f"{count:,}")
    Console(highlight=False).print(shown)
    typer.echo("passed each gate: " + ", ".join(f"{name} {count:,}" for name, count in gates(outcome.counts).items()))
    for name, cost in outcome.costs.items():
        price = f", price {cost['price']:.4f}" if "price" in cost else ""
        typer.echo(f"cost of the {name} so far: {cost['replies']:,} replies, {cost['tokens_in']:,} tokens in, "
                   f"{cost['tokens_out']:,} out{price}")
    for row in outcome.rows[:_SHOWN]:
        question = row.get("instruction") or row.get("question") or row["id"]
        typer.echo(f"{row['pass_at_k']:>5.0%}  {printable(question, 160)}")
    typer.echo(f"{places.out}: {len(outcome.rows):,} rows; those that are not kept in {places.refused}")
    if outcome.unanswered:
        typer.echo(f"{outcome.unanswered:,} replies were not given: the same command asks for them again")
    typer.echo(f"next: {printable(follow)}")
