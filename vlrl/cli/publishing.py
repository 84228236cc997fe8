"""`vlrl data export` and `vlrl data push`: a run's rollouts as a data set."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.cli.scoring import step_range
from vlrl.cli.terminal import bars, printable

if TYPE_CHECKING:
    from vlrl.tools.publish import Exported, Notes

Run = Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="A run folder, e.g. runs/quickstart.")]
Steps = Annotated[str | None, typer.Option(show_default=False, help="A range of steps, e.g. 10:20 (20 is not in it).")]
Split = Annotated[str | None, typer.Option(show_default=False, help="Evaluations of this split, e.g. heldout, in place "
                                           "of training rollouts.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command(epilog=examples("vlrl data export runs/a -o a-rollouts",
                                "vlrl data export runs/a -o late --steps 80:100",
                                "python -c \"import datasets; print(datasets.load_dataset('a-rollouts'))\""))(export)
    app.command(epilog=examples("vlrl data push runs/a org/a-rollouts",
                                "vlrl data push runs/a org/a-heldout --split heldout --public"))(push)


def export(run: Run, out: Annotated[Path, typer.Option("-o", "--out", help="The new folder, e.g. a-rollouts.")],
           steps: Steps = None, split: Split = None, json: AsJson = False) -> None:
    """Write a run's rollouts as a data set: parquet with pictures, the notes of the inspector, and a card."""
    made = _made(run, out, steps, split)
    if json:
        emit(asdict(made))
    else:
        _say(made)


def push(run: Run, repo: Annotated[str, typer.Argument(metavar="ORG/NAME", show_default=False,
                                                       help="The data set of the Hugging Face Hub.")],
         steps: Steps = None, split: Split = None,
         public: Annotated[bool, typer.Option("--public", help="Anyone may read it.")] = False) -> None:
    """Upload a run's rollouts to the Hugging Face Hub, as `vlrl data export` writes them; private unless --public.

    HF_TOKEN is the token, HF_ENDPOINT another Hub. A data set of this name that exists gets another commit.
    """
    from vlrl.tools.publish import push as upload

    with tempfile.TemporaryDirectory() as folder:
        made = _made(run, Path(folder) / "set", steps, split)
        url = upload(made.folder, repo, private=not public)
        _say(made, url)


def _made(run: Path, out: Path, steps: str | None, split: str | None) -> Exported:
    from vlrl.store import RunFolder
    from vlrl.tools.publish import export as write

    with bars() as tell:
        return write(RunFolder(run), out, steps=step_range(None, steps), split=split, notes=_notes(run), tell=tell)


def _notes(run: Path) -> Notes:
    """Returns the notes that the inspector keeps beside the run; those on the folder alone count too."""
    from vlrl.app.notes import FILE, Notes  # pyright: ignore[reportMissingImports]  # on vlrl.__path__

    found = {}
    for root, name in ((run.resolve().parent, run.resolve().name), (run.resolve(), ".")):
        if (root / FILE).is_file():
            found |= {tuple(note.key[1:]): (note.flag, note.comment) for note in Notes(root).all(run=name)}
    return found


def _say(made: Exported, url: str = "") -> None:
    typer.echo(printable(f"{made.rows} rollouts, {made.images} pictures, {made.notes} notes: {url or made.folder}"))
    for what, count in made.left_out.items():
        typer.echo(f"left out: {count} {what}")
