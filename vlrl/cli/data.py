"""`vlrl data`: the command group, and the subcommands `convert` and `split`. The other subcommands are in data_*.py."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import (
    AsJson,
    Boxes,
    Columns,
    File,
    Force,
    Format,
    emit,
    examples,
    form_of,
    group,
    load,
    pairs_of,
    show_types,
)
from vlrl.cli.data_check import check
from vlrl.cli.data_difficulty import difficulty
from vlrl.cli.data_distill import distill
from vlrl.cli.data_make import make
from vlrl.cli.data_overlap import overlap
from vlrl.cli.data_publish import export, push
from vlrl.cli.data_synthesize import synthesize
from vlrl.cli.terminal import progress_bars

if TYPE_CHECKING:
    from vlrl.tools.datasets.split import Split


@examples(
    "vlrl data convert annotations.json -o rows.jsonl                  COCO, Label Studio, VLM-R1, ScreenSpot ...",
    "vlrl data convert boxes.csv -o rows.jsonl --columns image=photo --columns expression=remark",
    "vlrl data convert rows.jsonl -o clean/rows.jsonl --root . --config my.yaml --keep-going")
def convert(
    file: File,
    out: Annotated[Path, typer.Option("--output", "-o", help="The new file, e.g. rows.jsonl, or .json for a list.",
                                      show_default=False)],
    format: Format = "auto",
    root: Annotated[Path | None, typer.Option(show_default=False, help=(
        "Folder that media paths are relative to, in the old and the new file, e.g. data/. Default: each file's own "
        "folder."))] = None,
    config: Annotated[str | None, typer.Option(
        help="Config whose task must be able to read the rows, e.g. my.yaml.", show_default=False)] = None,
    columns: Columns = None, boxes: Boxes = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help=(
        "Omit bad rows and list them, instead of stopping at the first."))] = False,
    answer_type: Annotated[str | None, typer.Option(
        help="answer_type for all rows that are not multiple choice, e.g. text. Default: data.answer_type of the "
             "config, else derived from the fields, answers and questions of the rows.", show_default=False)] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Convert a data file of any known format to canonical rows in a new file. On an error no file is left behind.

    Media paths are rewritten to be relative to the folder of the new file, or to --root."""
    from vlrl.data import bad_row_lines
    from vlrl.data.sources.answer_types import TypeTable, check_answer_type
    from vlrl.tools.datasets.check import printable
    from vlrl.tools.datasets.convert import convert as run

    task, types = None, TypeTable()
    if config:
        from vlrl.task.mixture import require_one_task
        from vlrl.training.build_task import make_task

        settled = load(config, None)
        task = require_one_task(make_task(settled), "vlrl data convert --config")
        answer_type = settled.data.answer_type if answer_type is None else answer_type
        boxes = boxes or settled.data.boxes
        format = task.data.format if format == "auto" else format
    check_answer_type(answer_type, "--answer-type")
    remarks, notes = list[str](), list[str]()
    count, bad = run(file, out, format, root, task, columns=pairs_of(columns), keep_going=keep_going, force=force,
                     answer_type=answer_type, types=types, boxes=form_of(boxes), remarks=remarks, notes=notes)
    if json:
        emit({"file": str(out), "rows": count, "left_out": [asdict(row) for row in bad], "remarks": remarks,
              "notes": notes,
              "types": [asdict(line) for line in types.lines()]})
        return
    show_types(types.lines())
    for line in bad_row_lines(bad):
        typer.echo(f"left out {printable(line)}")
    for line in remarks:
        typer.echo(printable(f"warning: {line}"))
    for line in notes:
        typer.echo(line)
    typer.echo(f"{out}: {count:,} rows" + (f", {len(bad):,} left out" if bad else ""))


@examples(
    "vlrl data split rows.jsonl -o split/ --root .                     holds out a tenth of the rows",
    "vlrl data split rows.jsonl -o split/ --heldout 200 --by patient --seed 1",
    "vlrl data split rows.jsonl -o split/ --no-near-duplicates         compares media by their bytes only")
def split(
    file: File,
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="Folder for train.jsonl and heldout.jsonl, e.g. split/.")],
    heldout: Annotated[float, typer.Option(help="Share of rows to hold out, e.g. 0.1, or a number of rows, e.g. "
                                                "200.")] = 0.1,
    by: Annotated[str, typer.Option(help="Rows with the same value of this field go to the same file, e.g. scene. "
                                         "Rows without the field are grouped by their media alone.")] = "group_key",
    seed: Annotated[int, typer.Option(help="Seed of the split, e.g. 1.")] = 0,
    near_duplicates: Annotated[bool, typer.Option(help="Put rows whose images look alike into the same file.")] = True,
    distance: Annotated[int, typer.Option(help="Maximum number of bits (of 64) in which the perceptual hashes of two "
                                               "images that count as alike may differ, e.g. 2 for nearly identical "
                                               "images.")] = 4,
    root: Annotated[Path | None, typer.Option(show_default=False, help=(
        "Folder that media paths are relative to, in all files, e.g. data/. Default: each file's own folder."))] = None,
    format: Format = "auto", columns: Columns = None, boxes: Boxes = None, force: Force = False, json: AsJson = False,
) -> None:
    """Split a data file into train.jsonl and heldout.jsonl with no leakage between the two.

    Rows that share a group (--by), an image or a video, or whose images look alike, all go to the same file. Each
    category keeps its proportion in both files as far as the groups allow. The same seed gives the same split, whatever
    the order of the rows."""
    from vlrl.tools.datasets.split import split_file
    with progress_bars() as progress:
        result = split_file(file, out, heldout, by, seed, near_duplicates=near_duplicates, distance=distance, root=root,
                            format=format, columns=pairs_of(columns), boxes=form_of(boxes), force=force,
                            progress=progress)
    if json:
        emit({"train": len(result.train), "heldout": len(result.heldout), "wanted": result.wanted,
              "groups": result.groups, "largest_group": result.largest, "near_duplicates": result.near,
              "media_not_found": result.unread,
              "categories": {k: {"train": a, "heldout": b} for k, (a, b) in result.shares().items()}})
    else:
        _show_split(out, result, near_duplicates)


def _show_split(out: Path, result: Split, near: bool) -> None:
    total = len(result.train) + len(result.heldout)
    typer.echo(f"{total:,} rows in {result.groups:,} groups, the largest with {result.largest:,} rows")
    if near:
        alike = sum(map(len, result.near))
        typer.echo(f"near-duplicates: {len(result.near):,} clusters with {alike:,} pictures, each on one side")
    if result.unread:
        typer.echo(f"{result.unread:,} media files do not exist and were identified by their paths only")
    shares = result.shares()
    if len(shares) > 1:
        typer.echo("category                  train heldout   share")
    for name, (train, heldout) in list(shares.items())[:20] if len(shares) > 1 else ():
        typer.echo(f"{name[:24]:<24} {train:>6,} {heldout:>7,} {heldout / (train + heldout):>7.1%}")
    if len(shares) > 20:
        typer.echo(f"... and {len(shares) - 20:,} more categories")
    typer.echo(f"{out / 'train.jsonl'}: {len(result.train):,} rows")
    wanted = "" if len(result.heldout) == result.wanted else f" ({result.wanted:,} were asked for; groups stay whole)"
    typer.echo(f"{out / 'heldout.jsonl'}: {len(result.heldout):,} rows, {len(result.heldout) / total:.1%}{wanted}")


app = group("data", "Check, convert, split and make data files.", difficulty, export, push, overlap,
            synthesize, distill, check, convert, split)
app.add_typer(make)
