"""`vlrl data distill`: collects a teacher model's answers from a server, and keeps the correct ones."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load, refuse_existing, takes_requests
from vlrl.cli.terminal import printable, progress_bars
from vlrl.tools.synthesis.request import DistillRequest

if TYPE_CHECKING:
    from vlrl.tools.synthesis.distill import DistillFiles


@examples(
    "vlrl data distill my.yaml --endpoint http://127.0.0.1:8000/v1 -o answers.jsonl      one answer to each row",
    "vlrl sft my.yaml data.solutions=answers.jsonl                                       trains on the kept answers",
    "vlrl data distill my.yaml --endpoint https://api.example.org/v1 --model big --key-env MY_KEY --rows 500 --answers "
    "4 --price-in 0.15 --price-out 0.6 -o answers.jsonl")
@takes_requests
def distill(config: ConfigPath, request: DistillRequest, settings: Words = None, as_json: AsJson = False) -> None:
    """Have a teacher model answer the training rows (text and images), and keep the answers that the task scores as
    correct.

    Only verified answers are kept: truncated answers are dropped, and the teacher's own claims about an answer are
    ignored. Every reply is written to disk as soon as it arrives (FILE's name with .drawn before the suffix). So the
    same command resumes after Ctrl-C, a kill or a server failure, and no answer is paid for twice. Exits with 1 if some
    replies are missing; the answers received so far are kept."""
    loaded = load(config, settings)
    from vlrl.config.base import Named
    from vlrl.config.registry import prints_aside
    from vlrl.tools.clients.replies import has_failed_requests
    from vlrl.tools.evaluation.grid import Server
    from vlrl.tools.synthesis import distill as tool
    out, places = request.out, tool.DistillFiles(request.out)
    if not has_failed_requests(places.about):
        refuse_existing(out, request.force)
    server = Server.from_request(request, request.endpoint, request.model, request.key_env)
    job = tool.DistillSettings(answers=request.answers, rows=request.rows, temperature=request.temperature,
                               choose=Named(name=request.choose), least=request.least, price_in=request.price_in,
                               price_out=request.price_out)
    tool.check(loaded, job, places)
    with prints_aside(), progress_bars(lines=True) as progress:
        summary = tool.distill_answers(loaded, server, job, places, progress)
    follow = f"vlrl sft {shlex.quote(config)} data.solutions={shlex.quote(str(out))}"
    if as_json:
        emit({"file": str(out), "drawn": str(places.drawn), "about": str(places.about), **summary, "next": follow})
    else:
        _show(summary, places, follow)
    if summary["unanswered"] or not summary["kept"]:
        raise typer.Exit(1)


def _show(summary: Mapping[str, Any], places: DistillFiles, follow: str) -> None:
    cost = summary["cost"]
    price = f", price {cost['price']:.4f}" if "price" in cost else ""
    typer.echo(f"{summary['right']:,} of {summary['answers']:,} answers are right, to {summary['solved']:,} of "
               f"{summary['prompts']:,} rows; {summary['kept']:,} are kept: {places.out}")
    typer.echo(f"cost of all replies so far: {cost['replies']:,} replies, {cost['tokens_in']:,} tokens in, "
               f"{cost['tokens_out']:,} out{price}")
    if cost.get("replies_without_tokens"):
        typer.echo(f"warning: the server did not say how many tokens {cost['replies_without_tokens']:,} replies took")
    if summary["left_out"]:
        typer.echo(f"{summary['left_out']:,} rows could not be asked; the first reasons are in {places.about}")
    if summary["unanswered"]:
        typer.echo(f"{summary['unanswered']:,} answers are missing: the same command requests them again")
    if not summary["kept"]:
        typer.echo("nothing was right, so there is nothing to learn from: raise --answers, lower --least, or name "
                   "another teacher")
    else:
        typer.echo(f"next: {printable(follow)}")
