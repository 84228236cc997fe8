"""`vlrl data overlap`: finds content that held-out rows share with training rows."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.cli.terminal import printable, progress_bars

_WORDS = {"same": "the same file", "look": "an image that looks the same", "crop": "a crop of the same image",
          "text": "the same text", "words": "nearly the same words", "meaning": "a text with a similar embedding"}


@examples(
    "vlrl data overlap train.jsonl heldout.jsonl",
    "vlrl data overlap train.jsonl benchmark.json --root images/ --json | jq '.shared[].heldout'")
def overlap(
    train: Annotated[Path, typer.Argument(metavar="TRAIN", show_default=False, help="The training rows, e.g. "
                                                                                    "train.jsonl.")],
    heldout: Annotated[Path, typer.Argument(metavar="HELDOUT", show_default=False, help="The held-out rows, e.g. "
                                                                                        "heldout.jsonl.")],
    root: Annotated[Path | None, typer.Option(help="Folder that media paths are relative to, e.g. data/. Default: "
                                                   "each file's own folder.", show_default=False)] = None,
    format: Annotated[str, typer.Option(help="Format of the rows, e.g. coco; auto recognises the format by its "
                                             "fields.")] = "auto",
    embedder: Annotated[Path | None, typer.Option(metavar="FOLDER", show_default=False, help=(
        "Folder of a transformers text or CLIP model, e.g. models/text. Texts without another match are also compared "
        "by their embeddings, which finds paraphrases."))] = None,
    alike: Annotated[float, typer.Option(min=-1, max=1, help="With --embedder: minimum cosine similarity of a match, "
                                                             "e.g. 0.85; a good value depends on the model.")] = 0.9,
    most: Annotated[int, typer.Option("--max", min=0, help="Maximum number of rows to list, e.g. 20; 0 = all. --json "
                                                           "contains all.")] = 50,
    json: AsJson = False,
) -> None:
    """Find held-out rows whose images or texts also occur in the training rows, including resized, recompressed or
    cropped images.

    Nothing is changed. Exits with 1 if any overlap is found. `vlrl data split` makes files without overlap."""
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
        typer.echo(f"{report.share:.1%} of {report.heldout:,} held-out rows overlap with the {report.train:,} "
                   "training rows" + "".join(f"; {words} {n:,}" for words, n in kinds.most_common()))
    if report.shared:
        raise typer.Exit(1)
