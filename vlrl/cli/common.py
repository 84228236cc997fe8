"""Helpers that several subcommands use: shared arguments, loading the config, choosing the model, printing JSON."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.data.sources.answer_types import TypeLine

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.tools.evaluation.measure import ModelChoice

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", show_default=False,
                                           help="A YAML file, e.g. configs/quickstart.yaml.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="key=value", show_default=False,
                                                   help="Settings that override the file, e.g. train.lr=1e-5.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def takes_requests(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a command function. Each parameter that is a request dataclass (tools/request.py) is replaced by
    one command-line option per field that has a help text. A flag that is off by default has no --no-FLAG
    counterpart. Empty defaults are not shown in the help."""
    shown: list[inspect.Parameter] = []
    requests: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if not is_dataclass(parameter.annotation):
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints, own = get_type_hints(parameter.annotation), [f for f in fields(parameter.annotation) if f.metadata]
        requests[parameter.name] = cast(type, parameter.annotation), [f.name for f in own]
        for one in own:
            more = {"show_default": one.default not in (None, (), MISSING), **one.metadata}
            flags = more.pop("flags") or (["--" + one.name.replace("_", "-")] if one.default is False else [])
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            shown.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                           annotation=Annotated[hints[one.name], typer.Option(*flags, **more)]))

    @functools.wraps(function)
    def command(**given: Any) -> None:
        for name, (request, own) in requests.items():
            given[name] = request(**{field: value for field in own if (value := given.pop(field)) is not None})
        function(**given)

    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in shown}
    return command


def examples(*lines: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that appends a list of examples, one per line, to the help of a command."""
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        text = "\n\n".join(["Examples:", *(line.replace("[", "\\[") for line in lines)])
        function.epilog = text  # type: ignore[attr-defined]
        return function

    return decorate


def add(app: typer.Typer, command: Any, name: str | None = None) -> None:
    """Registers a command, with its examples, in the typer application `app`. The name of the command is the name of
    its function unless `name` is set."""
    app.command(name or command.__name__.rstrip("_"), epilog=command.epilog)(command)


def group(name: str, help: str, *commands: Any) -> typer.Typer:
    """Returns a typer application with the given commands as its subcommands."""
    app = typer.Typer(name=name, no_args_is_help=True, help=help)
    for command in commands:
        add(app, command)
    return app


def flowing(function: Any) -> str:
    """The docstring of a function with each paragraph joined into one line, so that the help uses the full width of the
    terminal."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(function.__doc__ or "").split("\n\n"))


def load(path: str | None, words: Sequence[str] | None) -> Config:
    """Loads the config file `path` and applies the overrides `words` (key=value). Raises ConfigError if `path` is
    empty."""
    from vlrl import config
    if not path:
        raise ConfigError("no config is given: name a config, e.g. quickstart.yaml")
    found = config.find_config(path)
    if found.name == path and not os.path.exists(path) and os.environ.get("RANK", "0") == "0":
        typer.echo(f"{path} is not in this folder; using the config that comes with vlrl: {found}", err=True)
    return config.load(path, words or ())


def choose_model(config: Config, model: str | None, checkpoint: Path | None) -> ModelChoice:
    """Returns the model to evaluate: `model`, `checkpoint` or the model of the config (measure.choose_model in
    tools/evaluation). Prints warnings about the model."""
    from vlrl.store.checkpoint import find
    if checkpoint is not None:
        find(checkpoint)  # a wrong folder is reported before the slow imports
    from vlrl.tools.evaluation import measure
    chosen = measure.choose_model(config, model, checkpoint)
    for warning in chosen.warnings:
        typer.echo(f"warning: {warning}", err=True)
    return chosen


def refuse_existing(path: Path, force: bool) -> None:
    """Raises ConfigError if the path exists. With `force`, an existing file is allowed, because it will be replaced."""
    if os.path.lexists(path) and not (force and path.is_file()):
        raise ConfigError(f"{path} exists already: replace it with --force, or name another file with --out")


def is_free(folder: Path) -> bool:
    """Whether a new folder can be written at this path: the path does not exist, or is an empty folder."""
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


def emit(value: Any) -> None:
    """Prints a value on standard output as one line of ASCII JSON; NaN and infinities become null."""
    from vlrl.store import plain
    typer.echo(json.dumps(plain(value), allow_nan=False))


File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help=(
    "Data file: .jsonl, .json, .csv, .tsv, .parquet or .arrow, e.g. rows.jsonl; or a folder with one folder of images "
    "per class, or with shards."))]
Root = Annotated[Path | None, typer.Option(help="Folder that media paths are relative to, e.g. data/ (like data.root "
                                                "in a config). Default: the folder of the data "
                                                "file.", show_default=False)]
Format = Annotated[str, typer.Option(help="Format of the rows, e.g. canonical, coco or screenspot; auto recognises "
                                          "the format by its fields.")]
Columns = Annotated[list[str] | None, typer.Option("--columns", metavar="NAME=COLUMN", show_default=False, help=(
    "Read a canonical field from another column, e.g. image=photo; repeat the option for each field."))]
Boxes = Annotated[str | None, typer.Option(show_default=False, help=(
    "Form of boxes and points in the file, as in data.boxes: pixels, norm1000, norm1 or resized, alone or after xywh- "
    "or xyxy-. Default: data.boxes of the config, else the form that the format of the rows defines, with an error if "
    "the values contradict it."))]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]


def form_of(name: str | None) -> str:
    """Returns the box form `name` of --boxes ("auto" if none is given). Raises ConfigError for an unknown form."""
    from vlrl.config.box_forms import parse_box_form
    parse_box_form(name or "auto", "--boxes")
    return name or "auto"


def pairs_of(columns: list[str] | None) -> dict[str, str]:
    """Parses NAME=COLUMN arguments: ["image=photo"] -> {"image": "photo"}."""
    wrong = next((pair for pair in columns or () if not all(pair.partition("=")[::2])), None)
    if wrong is not None:
        raise typer.BadParameter(f"{wrong!r}: write NAME=COLUMN, e.g. image=photo", param_hint="--columns")
    return {name: column for name, _, column in (pair.partition("=") for pair in columns or ())}


def show_types(lines: Sequence[TypeLine]) -> None:
    from vlrl.tools.datasets.check import printable
    if lines:
        typer.echo("answer type      rows   why, and examples")
    for line in lines:
        typer.echo(f"{line.type[:14]:<14} {line.rows:>6,}   {line.why}: {printable(', '.join(line.examples))}")
