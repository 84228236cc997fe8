"""Options shared by the commands that read data files, and the printed table of answer types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vlrl.data.sources.answer_types import TypeLine

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
    "Format of boxes and points in the file: pixels, norm1000, norm1, xywh, xywh-norm1000 or xywh-norm1. Default: "
    "data.boxes of the config, else corners in pixels, with a warning if the values suggest another format."))]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]


def form_of(name: str | None) -> str:
    """Returns the box format given by --boxes ("auto" if none is given). Raises ConfigError for an unknown format."""
    from vlrl.data.sources.box_forms import FORMS
    from vlrl.errors import ConfigError, did_you_mean
    if name and name not in FORMS:
        raise ConfigError(f"--boxes {name} is not known.{did_you_mean(name, FORMS)} Known: {', '.join(FORMS)}")
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
