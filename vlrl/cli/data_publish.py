"""`vlrl data export` and `vlrl data push`: write a run's rollouts as a data set and upload it to the Hub."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.cli.score import step_range
from vlrl.cli.terminal import printable, progress_bars

if TYPE_CHECKING:
    from vlrl.tools.hub.push import Files, HubTarget
    from vlrl.tools.hub.redaction import PrivateWords
    from vlrl.tools.hub.rollout_dataset import ExportedRollouts, Notes

Run = Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="A run folder, e.g. runs/quickstart.")]
Steps = Annotated[str | None, typer.Option(show_default=False, help="A range of steps, e.g. 10:20 (20 is excluded).")]
Split = Annotated[str | None, typer.Option(show_default=False, help=(
    "Use the rollouts of the evaluations of this split, e.g. heldout, instead of the training rollouts."))]

Public = Annotated[bool, typer.Option("--public", help="Make the repository public instead of private.")]
WithMedia = Annotated[bool, typer.Option("--with-media", help="Upload the images of the rollouts too.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the files that would be uploaded, with their sizes, and "
                                                        "upload nothing.")]


@examples(
    "vlrl data export runs/a -o a-rollouts",
    "vlrl data export runs/a -o late --steps 80:100",
    "python -c \"import datasets; print(datasets.load_dataset('a-rollouts'))\"")
def export(run: Run, out: Annotated[Path, typer.Option("-o", "--out", help="The new folder, e.g. a-rollouts.")],
           steps: Steps = None, split: Split = None, json: AsJson = False) -> None:
    """Write a run's rollouts as a data set: parquet files with the images, the annotations made in the inspector, and a
    data set card."""
    exported = _exported(run, out, steps, split)
    if json:
        emit(asdict(exported))
    else:
        _show_exported(exported)


@examples(
    "vlrl data push runs/a org/a-rollouts --dry-run",
    "vlrl data push runs/a org/a-rollouts --with-media",
    "vlrl data push runs/a org/a-heldout --split heldout --public")
def push(run: Run, repo: Annotated[str, typer.Argument(metavar="ORG/NAME", show_default=False,
                                                       help="The data set of the Hugging Face Hub.")],
         steps: Steps = None, split: Split = None, with_media: WithMedia = False, public: Public = False,
         dry_run: DryRun = False) -> None:
    """Upload a run's rollouts to the Hugging Face Hub as the data set that `vlrl data export` writes; private unless
    --public.

    Images are sent only with --with-media. Paths and names of this machine, and secrets in environment variables, are
    removed from the texts. The token is read from HF_TOKEN; HF_ENDPOINT selects another Hub. If the data set exists
    already, a new commit is added to it."""
    from vlrl.tools.hub import push as hub_push
    from vlrl.tools.hub import rollout_dataset
    from vlrl.tools.hub.redaction import PrivateWords
    target = hub_push.HubTarget(repo, "dataset", public)
    ready(target, dry_run)
    with tempfile.TemporaryDirectory() as folder:
        exported = _exported(run, Path(folder) / "set", steps, split, with_media, PrivateWords.here(run))
        files = rollout_dataset.files_of(exported.folder)
        show_files(target, files, dry_run)
        url = "not sent" if dry_run else hub_push.push(target, files, "Rollouts of vlrl")
        _show_exported(exported, url)


def ready(target: HubTarget, dry_run: bool) -> None:
    """Raises ConfigError if the repository name in `target` is malformed, or if no token is set although this is not a
    dry run. Called before any slow work."""
    from vlrl.tools.hub import push as hub_push
    hub_push.check_name(target)
    if not dry_run:
        hub_push.token(target.repo)


def show_files(target: HubTarget, files: Files, dry_run: bool) -> None:
    """Prints every file of an upload with its size; for a dry run, says that nothing is sent."""
    from vlrl.tools.hub.push import sizes
    listed = sizes(files)
    readers = "anyone may read it" if target.public else "private"
    typer.echo(f"{'dry run, nothing is sent: ' if dry_run else ''}{target.noun} {target.repo}, {readers}")
    for name, size in listed:
        typer.echo(f"  {size:>15,} bytes  {printable(name)}")
    typer.echo(f"  {sum(size for _, size in listed):>15,} bytes  in {len(listed)} files")


def _exported(run: Path, out: Path, steps: str | None, split: str | None, media: bool = True,
              private: PrivateWords | None = None) -> ExportedRollouts:
    from vlrl.store import RunFolder
    from vlrl.tools.hub.rollout_dataset import export as write
    with progress_bars() as progress:
        return write(RunFolder(run), out, steps=step_range(None, steps), split=split, notes=_notes(run),
                     progress=progress, media=media, private=private)


def _notes(run: Path) -> Notes:
    from vlrl.app.notes import FILE, Notes  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
    notes = {}
    for root, name in ((run.resolve().parent, run.resolve().name), (run.resolve(), ".")):
        if (root / FILE).is_file():
            notes |= {tuple(note.key[1:]): (note.flag, note.comment) for note in Notes(root).all(run=name)}
    return notes


def _show_exported(exported: ExportedRollouts, url: str = "") -> None:
    typer.echo(printable(f"{exported.rows} rollouts, {exported.images} pictures, {exported.notes} notes: "
                         f"{url or exported.folder}"))
    for what, count in exported.left_out.items():
        typer.echo(f"left out: {count} {what}")
