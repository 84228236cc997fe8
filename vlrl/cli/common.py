"""What the subcommands share."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.config.schema import Config

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", show_default=False,
                                           help="A YAML file, e.g. configs/quickstart.yaml.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="key=value", show_default=False,
                                                   help="Settings that override the file, e.g. train.lr=1e-5.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def examples(*lines: str) -> str:
    """Returns the epilog of a command's help: one example a line."""
    return "\n\n".join(["Examples:", *(line.replace("[", "\\[") for line in lines)])


def flowing(function: Any) -> str:
    """Returns a function's docstring with a line per paragraph, so that help fills whatever width the terminal has."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(function.__doc__ or "").split("\n\n"))


def load(path: str | None, words: Sequence[str] | None) -> Config:
    """Returns the config of a command line; ConfigError when no file is named."""
    from vlrl import config

    if not path:
        raise ConfigError("name a config, e.g. quickstart.yaml")
    place = config.located(path)
    if place.name == path and not os.path.exists(path) and os.environ.get("RANK", "0") == "0":
        typer.echo(f"{path} is not in this folder: it is vlrl's own, {place}", err=True)
    return config.load(path, words or ())


def is_free(folder: Path) -> bool:
    """Returns whether a folder can be made or filled there."""
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


def emit(value: Any) -> None:
    """Prints one JSON value on a line of standard output, in ASCII; NaN and infinities are null."""
    from vlrl.store import plain

    typer.echo(json.dumps(plain(value), allow_nan=False))
