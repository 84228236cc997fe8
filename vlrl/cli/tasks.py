"""`vlrl tasks list`, `new` and `check`."""

from __future__ import annotations

import json as encoder
import shlex
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vlrl.cli.common import AsJson, Words, emit, examples, group, load
from vlrl.cli.terminal import delayed_lines

if TYPE_CHECKING:
    from vlrl.task import Task
    from vlrl.testing import Report
    from vlrl.testing.labelled import Mistake, Verdict
    from vlrl.tools.tasks.catalogue import TaskInfo


@examples(
    "vlrl tasks list",
    "vlrl tasks list --json | jq -r '.[].name'")
def list_(json: AsJson = False) -> None:
    """List every built-in task: reward parts with weights, settings, and the configs that use it."""
    from vlrl.tools.tasks.catalogue import tasks
    if json:
        return emit([asdict(entry) for entry in tasks()])
    typer.echo("\n\n".join(map(_described, tasks())))


def _described(entry: TaskInfo) -> str:
    from vlrl.config.descriptions import format_value
    lines = [f"{entry.name}: {entry.about}", "  parts     " + ", ".join(f"{k} × {format_value(v)}" for k, v in
                                                                         entry.parts.items())]
    for i, setting in enumerate(entry.settings):
        default = encoder.dumps(setting.default) if isinstance(setting.default, str) else format_value(setting.default)
        lines.append(f"  {'' if i else 'settings':9} task.{setting.name}={default}  ({setting.kind})")
    for i, path in enumerate(entry.configs):
        lines.append(f"  {'' if i else 'configs':9} {path}")
    return "\n".join(lines)


@examples(
    "vlrl tasks new count                      count.py, count.yaml, test_count.py; pictures drawn by code",
    "vlrl tasks new signs --rows --dir signs   the same, and signs_rows/ with 8 rows and their pictures",
    "vlrl tasks new walk --environment         a task with an environment and several turns")
def new(
    name: Annotated[str, typer.Argument(help="Name of the task and of its file, e.g. count.", show_default=False)],
    dir: Annotated[Path, typer.Option(help="Folder to write into, e.g. mine; it is created if needed.")] = Path("."),
    rows: Annotated[bool, typer.Option("--rows", help="Make a task that reads rows and images from files instead of "
                                                      "drawing them.")] = False,
    environment: Annotated[bool, typer.Option("--environment", help="Make a task in which the model acts over several "
                                                                    "turns.")] = False,
) -> None:
    """Create a task of your own: a working task file, a config for a CPU, and a test. No file is overwritten."""
    from vlrl.errors import ConfigError
    from vlrl.tools.tasks.scaffold import create
    if rows and environment:
        raise ConfigError("--rows and --environment cannot be combined: choose one. An environment can read the data "
                          "row of its sample")
    written = create(name, dir, "rows" if rows else "environment" if environment else "task")
    typer.echo("wrote " + ", ".join(map(str, written)) + (f" and {dir / f'{name}_rows' / 'images'}" if rows else ""))
    target = f"{name}.py --config {name}.yaml" if rows else f"{name}.py"
    lines = [f"vlrl tasks check {target}", f"vlrl train {name}.yaml --dry-run", f"vlrl train {name}.yaml",
             *([] if environment else [f"vlrl score {name}.yaml < answers.jsonl"]), f"python -m pytest test_{name}.py"]
    cd = [] if dir.resolve() == Path.cwd() else [f"cd {shlex.quote(str(dir))}"]
    typer.echo("\n".join(["next:", *(f"  {line}" for line in cd + lines)]))


@examples(
    "vlrl tasks check count.py",
    "vlrl tasks check grounding task.drawn=true",
    "vlrl tasks check signs.py --config signs.yaml --samples 50",
    "vlrl tasks check signs.py --config signs.yaml --answers judged.jsonl --max-errors 2")
def check(
    task: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", show_default=False, help=(
        "A built-in name (grounding), path/file.py, path/file.py:Class or module:Class."))],
    settings: Words = None,
    config: Annotated[str | None, typer.Option(show_default=False, help=(
        "Config with the task's settings and data files, e.g. my.yaml."))] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to check in each split, e.g. 50.")] = 20,
    answers: Annotated[Path | None, typer.Option(show_default=False, help=(
        "Labelled answers, one JSON object per line with sample (a data row) or id, answer, correct (true or false) "
        "and optionally part, e.g. judged.jsonl. The answers that the verifier scores wrongly are printed."))] = None,
    max_errors: Annotated[int, typer.Option(min=0, help="Maximum number of verifier errors on --answers, e.g. 2.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="Number of fresh processes that generate the samples again, "
                                                       "each with another PYTHONHASHSEED; 0 is faster.")] = 2,
    json: AsJson = False,
) -> None:
    """Check that a task keeps the Task contract, and that worthless answers are not rewarded.

    Samples must be unique, the same in every process, and disjoint between train and held-out. Scoring: no text may
    make it raise, hang or return an unbounded reward; the perfect answer must earn the most, and a list of cheats
    clearly less. For a task with environments or tools: episodes must be reproducible from the seed, no action may
    break them, the actions of oracle_actions must earn the most, and nothing may be left running. Exits with 1 if a
    check fails, naming the sample and the answer that show it."""
    from rich.console import Console

    from vlrl.task.environment import has_environment
    from vlrl.testing import examine
    from vlrl.testing.labelled import judge

    task_object = _task(task, config, settings)
    acts = has_environment(task_object)  # starts processes, which may inherit a lock that the status thread holds
    with nullcontext() if acts else Console(stderr=True).status(f"checking {escape(task)}"):
        verdict = judge(task_object, answers) if answers else None
        report = examine(task_object, samples, processes, delayed_lines(f"checking {task}"))
    failed = bool(report.findings) or (verdict is not None and len(verdict.mistakes) > max_errors)
    if json:
        emit({"task": task, "ok": not failed, **{k: v for k, v in asdict(report).items() if k != "task"},
              "findings": [{"check": f.kind, "message": f.message, "sample": f.id, "text": f.text, "more": f.more}
                           for f in report.findings],
              "answers": _verdict_json(verdict) if verdict else None})
    else:
        _print_report(report)
        if verdict:
            _print_verdict(verdict, max_errors)
    if failed:
        raise typer.Exit(1)


def _task(name: str, config: str | None, settings: list[str] | None) -> Task:
    from vlrl.config import shipped
    from vlrl.training.build_task import make_task
    words = [f"task.name={encoder.dumps(name)}", *(settings or ())]  # of several tasks selects the one with this name
    return make_task(load(config or str(shipped("tiny.yaml")), words))


def _print_report(report: Report) -> None:
    from vlrl.checks.finding import shorten
    if report.cheats:
        typer.echo(f"{'answer':<26}{'mean':>8}{'most':>8}{'at full':>9}  example")
    template = ""
    for row in report.cheats:
        if row.template != template:
            template = row.template
            typer.echo(f"-- prompt {template!r}")
        typer.echo(f"{row.name:<26}{row.mean:>8.3f}{row.most:>8.3f}{row.at_full:>9.0%}  {shorten(row.text)}")
    for note in report.notes:
        typer.echo(f"note: {note}")
    for finding in report.findings:
        typer.echo(f"FAILED {finding}")
    if report.findings:
        count = len(report.findings)
        typer.echo(f"task '{report.task}' breaks the contract: {count} finding{'s' * (count > 1)}")
    else:
        typer.echo(f"task '{report.task}' keeps the contract ({report.samples} samples checked)")


def _print_verdict(verdict: Verdict, accepted: int) -> None:
    for name, mistakes, total, what in (
            ("false positives", verdict.false_positives, verdict.wrong, "wrong answers pay"),
            ("false negatives", verdict.false_negatives, verdict.correct, "correct answers do not pay")):
        rate = f" ({len(mistakes) / total:.1%})" if total else ""
        typer.echo(f"{name}: {len(mistakes)} of {total}{rate}: {what}")
        for mistake in mistakes:
            typer.echo(f"  row {mistake.line}, sample {mistake.sample!r}: {mistake.part}={mistake.value:g}  answer: "
                       f"{mistake.answer}")
    if len(verdict.mistakes) > accepted:
        typer.echo(f"FAILED answers: {len(verdict.mistakes)} errors, more than --max-errors {accepted}")


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    def side(mistakes: tuple[Mistake, ...], total: int) -> dict[str, Any]:
        return {"count": len(mistakes), "of": total, "rate": len(mistakes) / total if total else None,
                "rows": [asdict(m) for m in mistakes]}

    return {"false_positives": side(verdict.false_positives, verdict.wrong),
            "false_negatives": side(verdict.false_negatives, verdict.correct)}


app = group("tasks", "List, create and check tasks (a task defines prompt, data and rewards).", list_, new, check)
