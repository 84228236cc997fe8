"""`vlrl status`, `vlrl report` and `vlrl doctor`."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.cli.terminal import formatted
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.checks.finding import Finding
    from vlrl.tools.experiments.status import Status

_COLORS = {"running": "green", "starting": "green", "finished": "blue", "stale": "yellow", "interrupted": "yellow",
           "failed": "red", "dead": "red"}
_MARKS = {"ok": ("ok", "green"), "info": ("-", ""), "missing": ("no", "yellow"), "warning": ("!", "yellow"),
          "error": ("FAIL", "red")}
_figure = functools.partial(formatted, without="-")


@examples(
    "vlrl status                                  every run under runs/, one line each",
    "vlrl status runs/quickstart --watch          until it ends",
    "vlrl status runs/quickstart --json | jq .state")
def status(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_RUNS_DIR", help=(
        "A run folder, e.g. runs/quickstart, or a folder of runs."))] = Path("runs"),
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating until every run has ended, or until "
                                                        "Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=86400, help="With --watch: seconds between updates, e.g. 10.")
                     ] = 2.0,
    json: AsJson = False,
) -> None:
    """Show the status of runs: step, speed, time left, reward and its trend, last evaluation, and whether the process
    is alive.

    States: starting, running, finished, interrupted, failed; stale (the process is alive but has reported nothing for
    several steps) and dead (the process ended without reporting it: start the run again, and it resumes from its
    checkpoint)."""
    from rich.console import Console
    from rich.live import Live

    from vlrl.tools.experiments.status import ACTIVE, find_runs, is_run, read_status

    one = is_run(path)
    console = Console()
    if not console.is_terminal:  # files and pipes have no width
        console.width = max(console.width, 200)
    live = Live(console=console, auto_refresh=False) if watch and not json and console.is_terminal else None
    if live:
        live.start()
    try:
        while True:
            runs = [read_status(run) for run in find_runs(path)]
            if json:
                emit(asdict(runs[0]) if one else [asdict(s) for s in runs])
            else:
                shown = _detail(runs[0]) if one else _table(runs, path)
                live.update(shown, refresh=True) if live else console.print(shown)
            if not watch or not any(s.state in ACTIVE for s in runs):
                return
            time.sleep(every)
    finally:
        if live:
            live.stop()


def _table(runs: Sequence[Status], path: Path) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("run", "state", "step", "steps/min", "ETA", "reward", "trend", "evaluation"):
        table.add_column(name, justify="left" if name in ("run", "state", "evaluation") else "right", no_wrap=True)
    for run in _with_stages(runs):
        name = str(Path(run.path).relative_to(path)) if run.path.startswith(str(path)) else run.path
        cells = (_steps(run), _figure(run.steps_per_minute, ".1f"), _eta(run), _figure(run.reward, ".3f"),
                 _figure(run.trend, "+.3f"), "; ".join(_evaluations(run, 1, bounds=False)))
        table.add_row(Text(name), Text(run.state, _COLORS.get(run.state, "")), *map(Text, cells))
    return table


def _with_stages(runs: Sequence[Status]) -> Iterator[Status]:
    for run in runs:
        yield run
        yield from _with_stages(run.stages)


def _detail(run: Status) -> Any:
    from rich.text import Text

    from vlrl.monitoring.progress import duration
    age = "" if run.heartbeat_age_s is None else f", last heard of {duration(run.heartbeat_age_s)} ago"
    where = f" (process {run.pid} on {run.host})" if run.pid else ""
    lines = [("run", run.path), ("state", f"{run.state}{where}{age}"), ("step", _steps(run)),
             ("speed", f"{_figure(run.steps_per_minute, '.1f')} steps/min, {_figure(run.tokens_per_s, ',.0f')} tokens/s"
              ), ("ETA", _eta(run)),
             ("reward", f"{_figure(run.reward, '.3f')} (trend {_figure(run.trend, '+.3f')})")]
    lines += [("evaluation", line) for line in _evaluations(run, 4)]
    for stage in _with_stages(run.stages):
        name = str(Path(stage.path).relative_to(run.path))
        lines += [("stage", f"{name}: {stage.state}, step {_steps(stage)}, reward {_figure(stage.reward, '.3f')}")]
    text = Text()
    for i, (name, value) in enumerate(lines):
        text.append(f"{name:<11}", "bold").append(value, _COLORS.get(run.state, "") if name == "state" else "")
        text.append("\n" if i < len(lines) - 1 else "")
    return text


def _steps(run: Status) -> str:
    return f"{'?' if run.step is None else run.step}/{'?' if run.steps is None else run.steps}"


def _eta(run: Status) -> str:
    from vlrl.monitoring.progress import duration
    return "-" if run.eta_s is None else duration(run.eta_s)


def _evaluations(run: Status, most: int, bounds: bool = True) -> list[str]:
    """Returns one text per evaluated split, such as `heldout @ 50: iou 0.412 [0.380, 0.444]`. The text has the first
    `most` metrics, and their confidence intervals if `bounds` is True."""
    lines = []
    for split, record in run.evals.items():
        metrics = [k for k, v in record.items() if f"{k}/ci95_low" in record and isinstance(v, (int, float))
                   and "completion/" not in k]
        words = []
        for name in metrics[:most]:
            low, high = (record.get(f"{name}/ci95_{side}") for side in ("low", "high"))
            known = bounds and isinstance(low, (int, float)) and isinstance(high, (int, float))
            words.append(f"{name} {record[name]:.3f}" + (f" [{low:.3f}, {high:.3f}]" if known else ""))
        lines.append(f"{split} @ {record.get('step')}: {', '.join(words)}")
    return lines


@examples(
    "vlrl report runs/quickstart                  writes runs/quickstart/report.html",
    "vlrl report runs/quickstart -o /tmp/q.html --open",
    "vlrl report runs/quickstart --bundle page    a folder for a web server or a Space, with filters")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False,
                                        help="A run folder, e.g. runs/quickstart; the run may be in progress.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", show_default=False, help=(
        "The file to write. Default: report.html in the run folder."))] = None,
    bundle: Annotated[Path | None, typer.Option("--bundle", metavar="FOLDER", show_default=False, help=(
        "Write this folder instead: the groups of answers with filters, to be opened from disk or hosted on any web "
        "server or static Space."))] = None,
    groups: Annotated[int | None, typer.Option("--groups", min=1, max=100_000, show_default=False, help=(
        "With --bundle: maximum number of groups (default 300): the most notable groups, and an equal number from each "
        "part of the run."))] = None,
    media: Annotated[bool | None, typer.Option("--media/--no-media", show_default=False, help=(
        "With --bundle: whether to include images. Default: include them."))] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one HTML file about a run that opens offline: curves, results before and after, notable answers with their
    images, settings and versions.

    The file is self-contained, makes no network requests and runs no script, so it can be sent by mail or archived.
    With --bundle a folder for publication is written instead, without details of this machine."""
    if bundle is not None:
        written = _bundle(run, bundle, output, groups, media)
    else:
        written = _one_file(run, output, groups, media)
    if show:
        import webbrowser
        if not webbrowser.open(written.resolve().as_uri()):
            typer.echo("no browser could be opened: open the file by hand", err=True)


def _one_file(run: Path, output: Path | None, groups: int | None, media: bool | None) -> Path:
    from vlrl.app.report import write  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
    if groups is not None or media is not None:
        raise ConfigError("--groups and --no-media only apply to a bundle: name the bundle's folder with --bundle "
                          "FOLDER, or remove the two options")
    written = write(run, output)
    typer.echo(f"{written} ({written.stat().st_size / 1e6:.1f} MB)")
    return written


def _bundle(run: Path, folder: Path, output: Path | None, groups: int | None, media: bool | None) -> Path:
    from vlrl.app import bundle  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
    if output is not None:
        raise ConfigError(f"--output {output} writes a file, but --bundle {folder} writes a folder: remove one of "
                          "the two")
    written = bundle.write(run, folder, groups or bundle.GROUPS, media is not False)
    typer.echo(f"{written.folder} ({written.bytes / 1e6:.1f} MB, {written.groups:,} of {written.total:,} groups)")
    for words in written.left_out:
        typer.echo(f"  left out: {words}")
    return written.folder / "index.html"


@examples(
    "vlrl doctor",
    "vlrl doctor --json | jq '.findings[] | select(.verdict == \"error\")'")
def doctor(
    runs: Annotated[Path, typer.Option(help=(
        "Folder in which you keep run folders, e.g. /data/runs; its free space is checked."))] = Path("runs"),
    json: AsJson = False,
) -> None:
    """Find out what works on this machine by trying it: versions, devices, a training step, video, vLLM.

    For each missing part the command that installs it is printed. Nothing is sent over the network. Exits with 1 only
    if training cannot run at all."""
    import sys

    from rich.console import Console

    from vlrl.tools.machine.doctor import examine
    console = Console(file=sys.stderr)  # fixed now: standard error is redirected while a check runs
    with console.status("looking") as status:
        findings = examine(runs, lambda name, *_: status.update(f"trying {name}"))
    failed = [_names(f)[1] for f in findings if f.level == "error"]
    if json:
        names = "group", "name", "verdict", "detail", "fix"
        emit({"ok": not failed, "findings": [
            dict(zip(names, (*_names(f), f.level, f.message, f.fix), strict=True)) for f in findings]})
    else:
        _show_doctor(findings)
        words = f"training cannot run: fix {', '.join(failed)} first" if failed else "training can run"
        typer.echo(f"\n{words}")
    if failed:
        raise typer.Exit(1)


def _names(finding: Finding) -> tuple[str, str]:
    group, _, name = finding.rule.partition("/")
    return group, name


def _show_doctor(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text
    console = Console(highlight=False)
    for group, own in itertools.groupby(findings, key=lambda finding: _names(finding)[0]):
        console.print(Text(group, "bold"))
        for finding in own:
            mark, color = _MARKS[finding.level]
            console.print(Text.assemble("  ", (f"{mark:<5}", color), f"{_names(finding)[1]:<17} {finding.message}"),
                          soft_wrap=True)
            if finding.fix and finding.level != "ok":
                console.print(Text(f"{'':<25}{finding.fix}", "dim"), soft_wrap=True)
