"""`vlrl data check`: lists every problem in data files, and summarises their content."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, Boxes, Columns, Root, emit, examples, form_of, load, pairs_of, show_types
from vlrl.cli.terminal import progress_bars

if TYPE_CHECKING:
    from vlrl.checks import Finding
    from vlrl.config.schema import Config
    from vlrl.task import Task
    from vlrl.tools.datasets.check import DataReport
    from vlrl.tools.datasets.pixel_budget import PixelBudget
    from vlrl.tools.play.preview import SamplePreview
    from vlrl.types import Sample

_VALUES = 12  # values of a field that are printed


@examples(
    "vlrl data check rows.jsonl --config my.yaml",
    "vlrl data check rows.jsonl --config my.yaml --root photos/ --no-media      quick: files are not opened",
    "vlrl data check annotations.json --allow-missing                           annotations without their pictures",
    "vlrl data check data/                                                      all data files in a folder",
    "vlrl data check train.jsonl heldout.jsonl --config my.yaml                 also finds content that is in both",
    "vlrl data check org/name@train                                             a data set of the Hugging Face Hub",
    "vlrl data check rows.jsonl --json | jq .problems                           canonical fields alone, for a script")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help=(
        "A data file, e.g. rows.jsonl, or a folder with data files, e.g. data/."))],
    settings: Annotated[list[str] | None, typer.Argument(metavar="FILE | key=value", show_default=False, help=(
        "More files or folders, and settings that override the config, e.g. limits.image_pixels=1000000."))] = None,
    config: Annotated[str | None, typer.Option(
        help="The config whose task parses the rows, e.g. configs/quickstart.yaml. Without it only the canonical "
             "fields are checked.", show_default=False)] = None,
    root: Root = None, format: Annotated[str | None, typer.Option(
        help="Format of the rows, e.g. canonical. Default: data.format of the config.", show_default=False)] = None,
    columns: Columns = None, boxes: Boxes = None,
    media: Annotated[bool, typer.Option(help="Open every image and video, or only check that the files exist.")] = True,
    allow_missing: Annotated[bool, typer.Option(
        "--allow-missing", help="Media files may be missing; the existing files are still checked.")] = False,
    most: Annotated[int, typer.Option("--max", min=0, help="Maximum number of problems to print, e.g. 20; 0 = all. "
                                                           "--json contains all.")] = 100,
    show: Annotated[bool, typer.Option(help="Show the first row without errors as the model will see it; with "
                                            "--config also the task's prompt and the token count.")] = True,
    json: AsJson = False,
) -> None:
    """Check data files: parse every row with the task, open every image and video, validate boxes, score the task's
    perfect answer.

    Lists every problem with its line and id. Then prints a summary of the content, the recognised data format with the
    projects that use it, and one row as the model will see it. Several files, or a folder, are checked together:
    content of a held-out file that also occurs in a training file is reported for the held-out file. Nothing is
    changed. Exits with 1 if a row is bad."""
    from vlrl.checks.rule import default_refusal
    from vlrl.config.schema import LimitsSettings
    from vlrl.tools.datasets.check import check as run

    files = [file, *(Path(word) for word in settings or () if "=" not in word or os.path.exists(word))]
    settings = [word for word in settings or () if Path(word) not in files]
    settled = load(config, settings) if config else None
    if settings and not config:
        raise typer.BadParameter("settings need a config: name the config with --config")
    task = scale = refusal = None
    if settled:
        from vlrl.task.mixture import require_one_task
        from vlrl.tools.datasets.pixel_budget import refusal_of, scale_of
        from vlrl.training.build_task import make_task

        task, scale = require_one_task(make_task(settled), "vlrl data check"), scale_of(settled)
        refusal = refusal_of(settled)
    limits = settled.limits if settled else LimitsSettings()
    own_root = root or (Path(settled.data.root) if settled and settled.data.root else None)
    files, media_root = _expanded(files, settled.data.cache if settled else "")
    own_root = own_root or media_root
    with progress_bars() as progress:
        findings = run(files, task, limits, own_root, format or (task.data.format if task else "auto"),
                       media=media, allow_missing=allow_missing,
                       columns=pairs_of(columns) or (settled.data.columns if settled else None), scale=scale,
                       progress=progress, answer_type=settled.data.answer_type if settled else None,
                       boxes=form_of(boxes or (settled.data.boxes if settled else None)),
                       preview=_previewer(settled, task) if show else None, refusal=refusal or default_refusal)
    if json:
        emit({"file": ", ".join(map(str, files)), **asdict(findings), "problems": _plain(findings.problems),
              "warnings": _plain(findings.warnings)})
    else:
        _show_findings(", ".join(map(str, files)), findings, most, labels=task is not None)
    if findings.bad or not findings.rows:
        raise typer.Exit(1)


def _plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [{"where": f.where, "id": f.id, "kind": f.kind, "rule": f.rule, "level": f.level, "reason": f.message}
            for f in findings]


def _previewer(config: Config | None, task: Task | None) -> Callable[[Sample], SamplePreview]:
    from vlrl.config.schema import LimitsSettings
    if config is None or task is None:
        from vlrl.tools.play.preview import preview_without_task
        return lambda sample: preview_without_task(LimitsSettings(), sample)
    from vlrl.tools.machine.dryrun import preview
    return lambda sample: preview(config, task, sample)


def _expanded(names: list[Path], cache: str) -> tuple[list[Path], Path | None]:
    """Returns (data files, folder of their media). Each name is a file, a glob pattern, folder@split, or a Hub data
    set, which is downloaded to `cache`. The folder is None if each file has its media in its own folder."""
    from vlrl.data import locate_files, several
    paths, root = [], None
    for name in names:
        files, own = locate_files(str(name), cache) if several(str(name)) else ([name], None)
        paths, root = [*paths, *files], root or own
    return paths, root


def _show_findings(file: str, findings: DataReport, most: int, labels: bool) -> None:
    from vlrl.checks import finding_lines
    from vlrl.tools.datasets.check import printable
    listed = finding_lines(findings.problems)
    for line in listed[:most or None]:
        typer.echo(printable(line))
    for line in finding_lines(findings.warnings):
        typer.echo(printable(f"warning: {line}"))
    if 0 < most < len(listed):
        typer.echo(f"... and {len(listed) - most:,} more (--max 0 lists all)")
    for paths in findings.copies[:_VALUES]:
        typer.echo(printable(f"same content: {', '.join(paths)}"))
    if len(findings.copies) > _VALUES:
        typer.echo(f"... and {len(findings.copies) - _VALUES:,} more contents under several names (--json lists all)")
    _show_fields(findings)
    if findings.shapes:
        typer.echo("recognised as: " + printable("; ".join(f"{shape} {n:,}" for shape, n in findings.shapes.items())))
    if findings.boxes:
        typer.echo(findings.boxes)
    if findings.example:
        from vlrl.cli.dryrun import print_sample
        print_sample(findings.example)
    if findings.bad:
        kinds = Counter(kind for _, kind in {(p.where, p.kind) for p in findings.problems})
        typer.echo("bad rows by kind of problem: " + ", ".join(f"{kind} {n:,}" for kind, n in kinds.most_common()))
    show_types(findings.types)
    for name, values in findings.counts.items():
        shown = ", ".join(f"{value} {count:,}" for value, count in list(values.items())[:_VALUES])
        more = f", and {len(values) - _VALUES:,} more values" if len(values) > _VALUES else ""
        typer.echo(f"{name}: {shown}{more}")
    if findings.pixels:
        _show_pixels(findings.pixels)
    if labels and findings.unlabelled:
        typer.echo(f"without a label: {findings.unlabelled:,} rows")
    media = "".join(f", {count:,} {kind}" for kind, count in findings.media.items() if count)
    file = printable(file)
    rows = f"{findings.rows:,} rows{media}; {findings.bad:,} bad rows" if findings.rows else "no rows"
    typer.echo(f"{file}: {rows}")


def _show_fields(findings: DataReport) -> None:
    from vlrl.data import FIELDS
    if findings.fields:
        typer.echo("field                     rows   share")
    for name, count in findings.fields.items():
        note = "" if name in FIELDS else f"   not canonical: kept, sample[{name!r}] in the task"
        typer.echo(f"{name[:24]:<24} {count:>6,} {count / findings.rows:>6.1%}{note}")


def _show_pixels(budget: PixelBudget) -> None:
    typer.echo(f"targets as the model sees them: {budget.targets:,}, shorter side {budget.smallest:.0f} pixels at "
               f"least, {budget.median:.0f} in the middle")
    if budget.few:
        typer.echo(f"warning: {budget.few:,} targets are less than 8 pixels wide or high once the image is resized; to "
                   f"see each of them needs model.max_pixels={budget.needed}, or cropped images")
