"""`vlrl data overlap`: content that held-out rows share with training rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.cli.terminal import printable, progress_bars

_WORDS = {"same": "the same file", "look": "a picture that looks the same", "crop": "a part of a picture",
          "text": "the same text", "words": "nearly the same words", "meaning": "a text that is near in the embedder"}


@examples(
    "vlrl data overlap train.jsonl heldout.jsonl",
    "vlrl data overlap train.jsonl benchmark.json --root images/ --json | jq '.shared[].heldout'")
def overlap(
    train: Annotated[Path, typer.Argument(metavar="TRAIN", show_default=False, help="Rows to train on, e.g. "
                                          "train.jsonl.")],
    heldout: Annotated[Path, typer.Argument(metavar="HELDOUT", show_default=False, help="Rows to measure with, e.g. "
                                            "heldout.jsonl.")],
    root: Annotated[Path | None, typer.Option(help="Folder that media paths are relative to, e.g. data/; default: that "
                                              "of each file.", show_default=False)] = None,
    format: Annotated[str, typer.Option(help="Format of the rows, e.g. coco; auto knows it by its fields.")] = "auto",
    embedder: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False, help="Folder of a text or CLIP model of transformers, e.g. models/text; "
        "texts that are left are compared by its vectors, which finds paraphrases.")] = None,
    alike: Annotated[float, typer.Option(min=-1, max=1, help="Least cosine with --embedder, e.g. 0.85; it depends on "
                                         "the model.")] = 0.9,
    most: Annotated[int, typer.Option("--max", min=0, help="Most rows that are listed, e.g. 20; 0 = all. --json has "
                                      "all.")] = 50,
    json: AsJson = False,
) -> None:
    """Find held-out rows whose content is in the training rows: images, also resized, recompressed or cropped, and
    texts.

    Changes nothing. Exits with 1 where something is found; `vlrl data split` makes files that share nothing.
    """
    from vlrl.tools.datasets.overlap import overlap as run

    with progress_bars() as progress:
        report = run(train, heldout, root=root, format=format, progress=progress, embedder=embedder, alike=alike)
    if json:
        emit({"train": report.train, "heldout": report.heldout, "share": report.share,
              "shared": [one._asdict() for one in report.shared]})
    else:
        for one in report.shared[:most or None]:
            typer.echo(printable(f"{one.heldout}: {_WORDS[one.kind]} as {one.train} of train, {one.likeness:.2f}"))
        if 0 < most < len(report.shared):
            typer.echo(f"... and {len(report.shared) - most:,} more (--max 0 lists all)")
        kinds = Counter(_WORDS[one.kind] for one in report.shared)
        typer.echo(f"{report.share:.1%} of {report.heldout:,} held-out rows share something with {report.train:,} of "
                   "train" + "".join(f"; {words} {n:,}" for words, n in kinds.most_common()))
    if report.shared:
        raise typer.Exit(1)
