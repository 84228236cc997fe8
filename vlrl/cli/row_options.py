"""Options shared by the commands over files of rows, and the table of answer types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vlrl.data.sources.answer_types import TypeLine

File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False,
                                      help="Rows: .jsonl, .json, .csv, .tsv, .parquet, .arrow, e.g. rows.jsonl; or a "
                                           "folder of images for each class, or of shards.")]
Root = Annotated[Path | None, typer.Option(help="Folder that media paths are relative to, e.g. data/; default: that of "
                                           "the file (like data.root in a config).", show_default=False)]
Format = Annotated[str, typer.Option(help="Format of the rows, e.g. canonical, coco or screenspot; auto knows it by "
                                     "its fields.")]
Columns = Annotated[list[str] | None, typer.Option(
    "--columns", metavar="NAME=COLUMN", show_default=False,
    help="Which column or field stands for a canonical one, e.g. image=photo; once for each.")]
Boxes = Annotated[str | None, typer.Option(
    help="What boxes and points of the file are: pixels, norm1000, norm1, xywh, xywh-norm1000 or xywh-norm1; default: "
    "data.boxes of the config, else corners in pixels, and a warning where the file speaks against it.",
    show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists already.")]


def form_of(name: str | None) -> str:
    """The format of boxes. Raises ConfigError for an unknown one."""
    from vlrl.data.sources.box_forms import FORMS
    from vlrl.errors import ConfigError, did_you_mean

    if name and name not in FORMS:
        raise ConfigError(f"--boxes {name} is not known.{did_you_mean(name, FORMS)} Known: {', '.join(FORMS)}")
    return name or "auto"


def pairs_of(columns: list[str] | None) -> dict[str, str]:
    """["image=photo"] -> {"image": "photo"}."""
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
