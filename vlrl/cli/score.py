"""`vlrl score`: scores rows from a pipe or file, or the stored rollouts of a run."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, ConfigPath, examples, load
from vlrl.cli.terminal import delayed_bar, formatted, printable, show, show_table, standard_input
from vlrl.errors import DataError, RunError

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.services.service_set import ServiceSet
    from vlrl.task import Task
    from vlrl.tools.tasks.rescore import RewardComparison

_SETTING = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)

ScoreWords = Annotated[list[str] | None, typer.Argument(metavar="INPUT|key=value", show_default=False, help=(
    "A file of rows (without one, or with -, rows are read from standard input), and settings that override the "
    "config, e.g. task.rewards.format=0.5."))]


@examples(
    "vlrl score configs/quickstart.yaml < rows.jsonl > scored.jsonl",
    "vlrl score configs/quickstart.yaml rows.jsonl -o scored.jsonl task.rewards.format=0.5",
    'A row:    {"sample": {"id": "7", ...}, "completions": ["first answer", {"text": "second", "n_tokens": 3, '
    '"truncated": false}], "step": 0, "variants": {"shuffled": ["third"]}}',
    'A result: {"rewards": [{"parts": {...}, "reward": 1.0, "parsed": ..., "error": null}], "weights": {...}, '
    '"skipped": []}',
    "vlrl score configs/quickstart.yaml --run runs/quickstart              after an edit of the reward",
    "vlrl score configs/quickstart.yaml --run runs/quickstart --steps 10:20 --show 5 task.rewards.format=0.5",
    "vlrl score configs/quickstart.yaml --run runs/quickstart --split heldout --json")
def score(
    config: ConfigPath, words: ScoreWords = None,
    output: Annotated[str, typer.Option("--output", "-o", help="File for the results, e.g. scored.jsonl, which must "
                                                               "not exist yet; - is standard output.")] = "-",
    keep_going: Annotated[bool, typer.Option("--keep-going", help=(
        "For a row that cannot be scored, write {\"error\": ...} and continue; the exit code is then 1."))] = False,
    run: Annotated[str | None, typer.Option(
        show_default=False, help="Score the stored rollouts of this run folder again and compare with the stored "
                                 "rewards, e.g. runs/quickstart.")] = None,
    step: Annotated[int | None, typer.Option(help="With --run: only this step, e.g. 12.")] = None,
    steps: Annotated[str | None, typer.Option(
        show_default=False, help="With --run: a range of steps, e.g. 10:20 (20 is excluded), 10: or :20.")] = None,
    split: Annotated[str | None, typer.Option(show_default=False, help=(
        "With --run: the evaluations of this split instead of the training rollouts, e.g. heldout."))] = None,
    show: Annotated[int, typer.Option(min=0, help="With --run: number of groups to show, those whose ranking of "
                                                  "answers changed most, e.g. 5.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Score answers with the task's reward, without a model or images.

    Reads one JSON object per line and writes each result immediately, one per line, so it can also serve another
    program through a pipe. With --run it scores the rollouts of a run again and reports what an edited reward would
    change."""
    given = words or []
    inputs = [word for word in given if not _SETTING.fullmatch(word)]
    settings = [word for word in given if _SETTING.fullmatch(word)]
    if len(inputs) > 1:
        raise typer.BadParameter(f"give at most one input file, not {' and '.join(map(repr, inputs))}; settings are "
                                 "written key=value")
    if run is not None and (inputs or output != "-" or keep_going):
        raise typer.BadParameter("--run reads the rollouts of a run: remove the input file, -o and --keep-going")
    if run is None and (step is not None or steps is not None or split is not None or as_json):
        raise typer.BadParameter("--step, --steps, --split and --json need --run")
    wanted = step_range(step, steps)
    loaded = load(config, settings)
    if run is not None:
        _rescore(loaded, run, wanted, split, show, as_json)
    else:
        _stream(loaded, inputs[0] if inputs else "-", output, keep_going)


def _stream(config: Config, source: str, output: str, keep_going: bool) -> None:
    from vlrl.tools.tasks.score_rows import score_lines
    from vlrl.training.build_task import make_task
    task = make_task(config)
    root = Path(config.data.root or os.path.dirname(os.path.realpath(source)))  # stdin: the working directory
    failed, first, done = 0, "", 0
    with (_services(config, task) as provided, _reader(source) as lines, _writer(output) as out,
          delayed_bar("rows scored") as update):
        for done, (text, error) in enumerate(score_lines(task, lines, root, provided), 1):
            if error:
                where = "" if source == "-" else f"{source}: "
                if not keep_going:
                    raise type(error)(f"{where}{error}") from error
                failed, first = failed + 1, first or f"{where}{error}"
            out.write(text + "\n")
            out.flush()
            if done % 100 == 0 and not out.isatty():
                update(done, None)
    if failed:
        typer.echo(f"{failed} of {done} rows could not be scored. First: {printable(first)}", err=True)
        raise typer.Exit(1)


@contextlib.contextmanager
def _services(config: Config, task: Task) -> Iterator[ServiceSet | None]:
    """Context manager that yields the services that the config sets (services.*), or None if it sets none. The code of
    services is imported only if needed."""
    services = config.services
    if not services.given:
        yield None
        return
    from vlrl.services.service_set import serving
    with serving(config, task) as provided:
        yield provided


@contextlib.contextmanager
def _reader(source: str) -> Iterator[IO[bytes]]:
    if source == "-":
        given = standard_input()
        if given.isatty():
            typer.echo("reading rows from the terminal, one JSON object a line; Ctrl-D ends", err=True)
        yield given.buffer
        return
    try:
        file = open(source, "rb")  # noqa: SIM115 - closed below
    except (OSError, ValueError) as error:
        raise DataError(f"input {source!r} cannot be read: {getattr(error, 'strerror', None) or error}. Name a file of "
                        "rows, or no file to read standard input; settings are written key=value") from None
    with file:
        yield file


@contextlib.contextmanager
def _writer(output: str) -> Iterator[IO[str]]:
    if output == "-":
        yield sys.stdout
        return
    new = not os.path.exists(output) or os.path.isfile(output)  # a pipe or /dev/null may be there
    try:
        file = open(output, "x" if new else "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except FileExistsError:
        raise DataError(f"-o {output}: this file exists already; delete it, or name another file") from None
    except (OSError, ValueError) as error:
        raise DataError(f"-o {output}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    with file:
        yield file


def step_range(step: int | None, steps: str | None) -> range | None:
    if step is not None:
        if steps is not None:
            raise typer.BadParameter("give --step or --steps, not both")
        return range(step, step + 1)
    if steps is None:
        return None
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", steps, re.ASCII)
    if not match:
        raise typer.BadParameter(f"--steps {steps!r}: write first:end, e.g. 10:20")
    return range(int(match[1] or 0), int(match[2] or 2**62))


def _rescore(config: Config, folder: str, steps: range | None, split: str | None, show: int, as_json: bool) -> None:
    from vlrl.store import RunFolder
    from vlrl.tools.tasks.rescore import compare
    from vlrl.tools.tasks.score_rows import to_json
    from vlrl.training.build_task import make_task
    if "\0" in folder:
        raise RunError(f"{folder!r} is not a run folder")
    run = RunFolder(folder)
    with delayed_bar("steps scored") as update:
        comparison = compare(make_task(config), run, steps=steps, split=split, keep=show, progress=update)
    for note in dict.fromkeys(run.notes):
        typer.echo(f"note: {note}", err=True)
    if as_json:
        typer.echo(to_json(comparison.as_dict()))
    else:
        _print_comparison(comparison)


def _print_comparison(comparison: RewardComparison) -> None:
    rows = []
    for name, (old, new) in comparison.means.items():
        change = "–" if old.value is None or new.value is None else f"{new.value - old.value:+.4f}"
        rows.append((name.removeprefix("part "), _figure(old.value, 4), _figure(new.value, 4), change))
    show_table(("mean of", "old", "new", "change"), rows)
    for line in _summary(comparison):
        show(line)
    for group in comparison.top:
        change, tau = group.order
        show(f"\nsample {printable(group.sample_id, 100)}  step {group.step}  group {printable(group.group_id, 100)}  "
             f"order changed {change:.2f}  tau {_figure(tau)}", "bold")
        answers = zip(group.old, group.new, group.texts, strict=True)
        for old, new, text in sorted(answers, reverse=True, key=lambda a: float("-inf") if a[1] is None else a[1]):
            show(f"  {_figure(old):>7} -> {_figure(new):>7}  {_ends(text)}")


def _summary(result: RewardComparison) -> Iterator[str]:
    yield f"rewards changed   {result.changed:,} of {result.rollouts:,} rollouts"
    yield f"order changed     {result.reordered:,} of {result.groups:,} groups"
    yield (f"rank correlation  {_figure(result.taus.value)} (Kendall's tau-b, mean over the {result.taus.count:,} "
           "groups that differ under both)")
    yield f"groups all equal  {result.flat[0]:,} before, {result.flat[1]:,} now"
    if result.errors:
        yield f"scoring errors    {result.errors:,}; first: {printable(result.first_error, 300)}"
    if result.skipped:
        yield f"left out          {', '.join(sorted(result.skipped))}: reward parts that need a training-time service"
    if result.unknown_templates:
        yield (f"other prompt      {result.unknown_templates:,} prompts contain none of the task's templates and "
               "are scored with the first")


def _ends(text: str, most: int = 80) -> str:
    middle = "" if len(text) <= 2 * most else " ... "
    shown = text[:most] + middle + text[most:][-most:] if text[most:] else text
    return " ".join(printable(shown).split())


def _figure(value: float | None, digits: int = 3) -> str:
    return formatted(value, f".{digits}f", "–")
