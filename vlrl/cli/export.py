"""`vlrl export`: writes a checkpoint as a model folder, and uploads it to the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.cli.data_publish import DryRun, Public, WithMedia, ready, show_files
from vlrl.cli.terminal import printable
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.tools.hub.export import ExportedModel


@examples(
    "vlrl export runs/quickstart -o models/quickstart",
    "vlrl export runs/lora/checkpoints/step-000050 -o models/lora --dtype bfloat16",
    "vlrl export runs/lora -o models/lora-adapter --adapter",
    "To the Hub, with a model card generated from the run; first list what would be uploaded:",
    "vlrl export runs/quickstart --push org/name --rollouts --dry-run",
    "HF_TOKEN=... vlrl export runs/quickstart -o models/quickstart --push org/name --rollouts")
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", show_default=False,
                                           help="A run folder (its newest checkpoint) or a checkpoint folder.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FOLDER", show_default=False,
                                             help="A new or empty folder, e.g. models/mine.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="bfloat16|float16|float32", show_default=False, help=(
        "Dtype of the weights. Default: for an adapter, the dtype of its base model; for a full model, the widest "
        "dtype of its weights."))] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Keep an adapter as it is instead of merging it.")] = False,
    push: Annotated[str | None, typer.Option("--push", metavar="ORG/NAME", show_default=False, help=(
        "Upload the model to the Hugging Face Hub, with a model card generated from the run; private "
        "unless --public."))] = None,
    public: Public = False,
    rollouts: Annotated[bool, typer.Option("--rollouts", help="Upload the training rollouts too, as the data set "
                                           "ORG/NAME-rollouts.")] = False,
    with_media: WithMedia = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a model folder for from_pretrained, vLLM or the Hub. An adapter is merged into its base
    model.

    To verify the export, the written model is loaded again, and its log-probabilities on a prompt with an image are
    compared with those of the checkpoint.

    With --push nothing that identifies this machine is uploaded: no path, host or user name, and no secret from the
    environment. Images are uploaded only with --with-media. The token is read from HF_TOKEN; HF_ENDPOINT selects
    another Hub. If the model exists already on the Hub, a new commit is added to it."""
    from vlrl.store.checkpoint import find

    _check(out, push, {"--public": public, "--rollouts": rollouts, "--dry-run": dry_run}, with_media and not rollouts)
    find(source)  # before the slow imports
    if push is None:
        assert out
        done = _exported(source, out, dtype, adapter)
        if as_json:
            emit({**asdict(done), "source": str(done.source), "folder": str(done.folder),
                  "difference": done.difference})
        else:
            _show_exported(done)
        return
    _push(source, out, {"dtype": dtype, "adapter": adapter}, push, public, rollouts, with_media, dry_run, as_json)


def _check(out: Path | None, push: str | None, needs_push: dict[str, bool], stray_media: bool) -> None:
    if out is None and push is None:
        raise typer.BadParameter("name the folder to write to with -o, or a model of the Hub with --push",
                                 param_hint="-o")
    for name, given in needs_push.items():
        if given and push is None:
            raise typer.BadParameter("needs --push", param_hint=name)
    if stray_media:
        raise typer.BadParameter("needs --rollouts, because it uploads the images of the "
                                 "rollouts", param_hint="--with-media")


def _exported(source: Path, out: Path, dtype: str | None, adapter: bool) -> ExportedModel:
    from rich.console import Console

    from vlrl.tools.hub.export import export as write
    with Console(stderr=True).status(f"exporting {source}"):
        done = write(source, out, dtype, adapter)
    if done.carried:
        print(f"{len(done.carried)} tensors that training does not load ({done.carried[0]} ...) were copied from the "
              "base model", file=sys.stderr)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return done


def _show_exported(done: ExportedModel) -> None:
    what = "adapter" if done.adapter else "model"
    typer.echo(f"{done.source} -> {done.folder}: {what} of {done.parameters:,} {done.dtype} parameters, "
               f"{done.bytes / 1e6:,.1f} MB in {len(done.files)} files")
    if done.tokens:
        typer.echo(f"{'token':<16}{'checkpoint':>12}{'exported':>12}   log-probabilities")
        for token, before, after in zip(done.tokens, done.before, done.after, strict=True):
            typer.echo(f"{printable(token):<16}{before:>12.5f}{after:>12.5f}")
        typer.echo(f"largest difference {done.difference:.1e}; weights and prompt tokens read back are those saved")
    from vlrl import _torchvision
    if _torchvision.needed():
        typer.echo("note: torch is a CPU build here and torchvision is not, so plain transformers fails to load the "
                   "processor (operator torchvision::nms does not exist): import vlrl first, or install both from "
                   "https://download.pytorch.org/whl/cpu")


def _push(source: Path, out: Path | None, form: dict[str, Any], repo: str, public: bool, rollouts: bool,
          with_media: bool, dry_run: bool, as_json: bool) -> None:
    from vlrl.tools.hub import model_release as publishing
    from vlrl.tools.hub import push as hub_push
    from vlrl.tools.hub.redaction import PrivateWords
    model = hub_push.HubTarget(repo, "model", public)
    data = hub_push.HubTarget(f"{repo}-rollouts", "dataset", public)
    ready(model, dry_run)
    _, run, _ = publishing.source_run(source)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlrl-")))
        private = PrivateWords.here(source, scratch, *([out] if out else []), *([run.path] if run else []))
        done = _existing_or_exported(source, out or scratch / "model", form)
        ask = (lambda name: None) if dry_run else hub_push.licence_of
        release = publishing.prepare(source, repo, done, private, ask)
        sent = [(model, release.files, "Model of a run of vlrl")]
        if rollouts:
            files = publishing.rollouts(source, scratch / "rollouts", private, with_media)
            sent.append((data, files, "Rollouts of a run of vlrl"))
        if not as_json:
            for target, files, _ in sent:
                show_files(target, files, dry_run)
            if dry_run:
                typer.echo(printable(release.card, 100_000))
        urls = [] if dry_run else [hub_push.push(*one) for one in sent]
        if as_json:
            emit({"sent": not dry_run, "urls": urls,
                  "repositories": {f"{t.noun} {t.repo}": dict(hub_push.sizes(files)) for t, files, _ in sent}})
        for url in () if as_json else urls:
            typer.echo(url)


def _existing_or_exported(source: Path, folder: Path, form: dict[str, Any]) -> ExportedModel:
    from vlrl.tools.hub import model_release as publishing
    known = publishing.recorded(source, folder, form)
    if known is not None:
        typer.echo(f"{folder} holds this export already", err=True)
        return known
    if folder.is_dir() and (folder / publishing.RECORD).exists():
        raise ConfigError(f"{folder} holds an export of another checkpoint, or one made with other options: name "
                          f"another folder, or delete {folder} first")
    done = _exported(source, folder, form["dtype"], form["adapter"])
    publishing.record(source, done, form)
    return done
