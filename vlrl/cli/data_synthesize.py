"""`vlrl data synthesize`: makes new training prompts with the task or a generator model, and keeps those that a model
solves sometimes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlrl.cli import common
from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load, takes_requests
from vlrl.cli.terminal import printable, progress_bars, show_table
from vlrl.errors import ConfigError
from vlrl.tools.synthesis.request import SynthesisRequest

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.tools.synthesis.prompt_writer import WriterSettings
    from vlrl.tools.synthesis.synthesize import Search, Synthesis, SynthesisFiles

_SHOWN = 3  # instructions that are printed


@examples(
    "vlrl data synthesize configs/web.yaml --checkpoint runs/web-start -o goals.jsonl",
    "vlrl train configs/web.yaml data.train=goals.jsonl data.own_samples=false     trains on what was kept",
    "vlrl data synthesize configs/web.yaml --candidates 500 --answers 16 --least 0.25 --most 0.75 -o goals.jsonl",
    "vlrl data synthesize configs/web.yaml --failed runs/web -o harder.jsonl       varies what runs/web never solved",
    "vlrl data synthesize configs/web.yaml --failed goals.refused.jsonl -o goals-2.jsonl    and what was never right",
    "vlrl data synthesize my.yaml --endpoint http://127.0.0.1:8000/v1 --recipe sws --from runs/a --checkpoint runs/a "
    "-o new.jsonl    a model writes new rows for the weaknesses of runs/a")
@takes_requests
def synthesize(config: ConfigPath, request: SynthesisRequest, settings: Words = None, as_json: AsJson = False) -> None:
    """Make new training prompts with the task or a generator model, and keep those that the trained model solves
    sometimes.

    The task web walks randomly over its pages by clicking and typing. The state that a walk reaches becomes an
    instruction, which a rule verifies on the page (MobileGUI-RL). With --failed the task varies prompts that the model
    fails on instead (WebRL): other page content, another element, one sub-goal more or fewer. A task that generates
    samples from difficulty values draws these values from their full ranges, or near those of the parent prompts.

    With --endpoint a model behind a server writes a variation of each parent prompt. The parents are the training rows,
    or the rows that --failed or --recipe selects. The correct answer is computed by the task, or is the answer on which
    more than half of a teacher's samples agree; the generator's own claims are ignored. Every reply is written to disk
    as soon as it arrives, so no reply is paid for twice.

    Candidates that repeat another candidate or a held-out row are dropped. The model tries each remaining candidate k
    times, sampled as in training; a candidate is kept if it is solved at least once but not always. The rows record how
    they were made (generator, parent, verifier) and how often they were solved (pass_at_k). Rejected candidates are
    written to FILE's name with .refused before the suffix. Run the same command again to resume after a stop. Exits
    with 1 if some replies of a server are missing."""
    words = [] if request.temperature is None else [f"rollout.temperature={json.dumps(request.temperature)}"]
    loaded = load(config, [*(settings or ()), *words])
    from vlrl.tools.synthesis.synthesize import SynthesisFiles
    run = Path(loaded.run.dir)
    places = SynthesisFiles(out=request.out or run.with_name(f"{run.name}.goals.jsonl"))
    _check_out(places, request.force)
    _run(config, loaded, request, places, as_json)


def _writer(request: SynthesisRequest) -> WriterSettings | None:
    from vlrl.tools.evaluation.grid import Server
    from vlrl.tools.synthesis.prompt_writer import WriterSettings
    if request.endpoint is None:
        if request.teacher is not None:
            raise ConfigError(f"--teacher {request.teacher}: a teacher answers the prompts that a generator writes. "
                              "Name the generator with --endpoint")
        return None
    teacher = request.teacher and Server.from_request(request, request.teacher, request.teacher_model,
                                                      request.teacher_key_env, "--teacher")
    return WriterSettings(generator=Server.from_request(request, request.endpoint, request.model, request.key_env),
                          teacher=teacher or None, votes=request.votes, temperature=request.written_at,
                          price_in=request.price_in, price_out=request.price_out)


def _run(config: str, loaded: Config, request: SynthesisRequest, places: SynthesisFiles, as_json: bool) -> None:
    from vlrl.config.registry import prints_aside
    from vlrl.curriculum import check
    from vlrl.distributed import comm
    from vlrl.task.mixture import require_one_task
    from vlrl.tools.synthesis import prompt_writer
    from vlrl.tools.synthesis import synthesize as tool
    from vlrl.tools.synthesis.row_export import MediaLocation
    from vlrl.tools.synthesis.seed_rows import SeedSettings, search_of
    from vlrl.training.build_task import make_task
    writer, checkpoint = _writer(request), request.checkpoint
    wanted = SeedSettings(candidates=request.candidates, failed=request.failed, source=request.source,
                          recipe=request.recipe, written=writer is not None, least=request.least, most=request.most,
                          keep=request.keep)
    task = require_one_task(make_task(loaded), "vlrl data synthesize")
    check(loaded.curriculum, task)
    search = search_of(loaded, task, MediaLocation.for_file(loaded, places.out), wanted)
    if writer:
        prompt_writer.check(task, search.parents)
    chosen = common.choose_model(loaded, None if checkpoint else loaded.model.name, checkpoint)
    with prints_aside(), progress_bars(lines=True, show=comm.is_main()) as progress:
        outcome = tool.synthesize_prompts(loaded, chosen, search, request.answers, places, progress, writer)
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
    """Raises ConfigError if one of the output files `places` cannot be written. Called before the slow work."""
    from vlrl.data import check_suffix
    from vlrl.tools.clients.replies import has_failed_requests
    check_suffix(places.out)
    if has_failed_requests(places.about):
        return
    going = places.candidates.exists() or (places.replies.written.exists() and not places.out.exists())  # resumes
    for path in (places.out, *([] if going else [places.refused, places.about])):
        common.refuse_existing(path, force)


def _show(outcome: Synthesis, search: Search, places: SynthesisFiles, follow: str) -> None:
    from vlrl.tools.synthesis.synthesize import gates
    show_table(("became of them", "candidates"), ((name, f"{count:,}") for name, count in outcome.counts.items()),
               title=f"{search.candidates:,} candidates")
    typer.echo("passed each gate: " + ", ".join(f"{name} {count:,}" for name, count in gates(outcome.counts).items()))
    for name, cost in outcome.costs.items():
        price = f", price {cost['price']:.4f}" if "price" in cost else ""
        typer.echo(f"cost of the {name} so far: {cost['replies']:,} replies, {cost['tokens_in']:,} tokens in, "
                   f"{cost['tokens_out']:,} out{price}")
    for row in outcome.rows[:_SHOWN]:
        question = row.get("instruction") or row.get("question") or row["id"]
        typer.echo(f"{row['pass_at_k']:>5.0%}  {printable(question, 160)}")
    typer.echo(f"{places.out}: {len(outcome.rows):,} rows; rejected ones in {places.refused}")
    if outcome.unanswered:
        typer.echo(f"{outcome.unanswered:,} replies are missing: the same command requests them again")
    typer.echo(f"next: {printable(follow)}")
