"""`vlrl data distill`: answers of a teacher behind a server, kept where the task says that they are right."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load
from vlrl.cli.terminal import printable, progress_bars
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.tools.synthesis.distill import DistillFiles, DistillSettings

EXAMPLES = examples(
    "vlrl data distill my.yaml --endpoint http://127.0.0.1:8000/v1 -o answers.jsonl      one answer to each row",
    "vlrl sft my.yaml data.solutions=answers.jsonl                                       learns what was kept",
    "vlrl data distill my.yaml --endpoint https://api.example.org/v1 --model big --key-env MY_KEY --rows 500 --answers "
    "4 --price-in 0.15 --price-out 0.6 -o answers.jsonl")


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(epilog=EXAMPLES)(distill)


def distill(
    config: ConfigPath,
    endpoint: Annotated[str, typer.Option(
        metavar="URL", show_default=False,
        help="The teacher: an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1.")],
    out: Annotated[Path, typer.Option(
        "-o", "--out", metavar="FILE", show_default=False,
        help="The new file of answers, .jsonl, for data.solutions, e.g. answers.jsonl.")],
    settings: Words = None,
    model: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False, help="One of the server's models. Default: its only one.")] = None,
    key_env: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False,
        help="The environment variable that holds the server's key. Default: no key is sent.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, show_default=False, help="First training rows that are asked, e.g. "
                                             "500. Default: all.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers to each row, e.g. 4.")] = 1,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="Sampling temperature, e.g. 0.7.")] = 1.0,
    choose: Annotated[str, typer.Option(help="Which of several right answers are kept: shortest, best, diverse, all.")
                      ] = "shortest",
    least: Annotated[float | None, typer.Option(
        show_default=False, help="An answer is right from this reward on, e.g. 0.8. Default: where the task says so.")
    ] = None,
    price_in: Annotated[float | None, typer.Option(
        min=0, show_default=False, help="Price of a million tokens of prompts, e.g. 0.15.")] = None,
    price_out: Annotated[float | None, typer.Option(
        min=0, show_default=False, help="Price of a million tokens of answers, e.g. 0.6.")] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Requests at a time.")] = 8,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.1,
                                             help="Most seconds that an answer may take.")] = 300.0,
    retries: Annotated[int, typer.Option(metavar="N", min=0, max=100, help="How often a request is tried again.")] = 4,
    force: Annotated[bool, typer.Option("--force", help="Replace the answers that were kept before; replies that are "
                                        "on the disk are used again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have a teacher answer the training rows, text and pictures, and keep the answers that the task scores as right.

    Nothing enters that was not verified: not what was cut off, not what the teacher says of itself. Every reply is on
    the disk as soon as it comes (FILE's name with .drawn before the ending), so the same command goes on after Ctrl-C,
    a kill or a dead server, and asks and pays for no answer twice. Ends with exit code 1 where the teacher left answers
    out; those that are there are kept.
    """
    loaded = load(config, settings)
    from vlrl.config.base import Named
    from vlrl.config.registry import prints_aside
    from vlrl.services.chat import address_of, key_of
    from vlrl.tools.evaluation.grid import Server
    from vlrl.tools.synthesis import distill as tool

    places = tool.DistillFiles(out)
    if os.path.lexists(out) and not (force and out.is_file()) and not tool.goes_on(places):
        raise ConfigError(f"{out} exists already: --force replaces it, or name another file with --out")
    address_of(endpoint)
    server = Server(url=endpoint, model=model, key=key_of(key_env, "--key-env"), concurrency=concurrency,
                    timeout_s=timeout_s, retries=retries)
    order = tool.DistillSettings(answers=answers, rows=rows, temperature=temperature, choose=Named(name=choose),
                                 least=least,
                       price_in=price_in, price_out=price_out)
    tool.check(loaded, order, places)
    with prints_aside(), progress_bars(lines=True) as progress:
        summary = tool.distilled(loaded, server, order, places, progress)
    follow = f"vlrl sft {shlex.quote(config)} data.solutions={shlex.quote(str(out))}"
    if as_json:
        emit({"file": str(out), "drawn": str(places.drawn), "about": str(places.about), **summary, "next": follow})
    else:
        _show(summary, order, places, follow)
    if summary["unanswered"] or not summary["kept"]:
        raise typer.Exit(1)


def _show(summary: Mapping[str, Any], order: DistillSettings, places: DistillFiles, follow: str) -> None:
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
        typer.echo(f"{summary['unanswered']:,} answers were not given: the same command asks for them again")
    if not summary["kept"]:
        typer.echo("nothing was right, so there is nothing to learn from: raise --answers, lower --least, or name "
                   "another teacher")
    else:
        typer.echo(f"next: {printable(follow)}")
