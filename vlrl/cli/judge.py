"""`vlrl judge check`: compares a judge model with human labels."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, Words, emit, examples, group, load

if TYPE_CHECKING:
    from vlrl.tools.tasks.judge_check import Audit


@examples(
    "vlrl judge check judged.jsonl --config my.yaml",
    "vlrl judge check judged.jsonl --config my.yaml services.judge.url=http://127.0.0.1:8001/v1 "
    "services.judge.model=my-judge --json")
def check(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", show_default=False, help=(
        "Labelled answers, one JSON object per line with sample (a data row) or id, and either answer and correct "
        "(true or false), or responses (two texts) and better (1 or 2)."))],
    settings: Words = None,
    config: Annotated[str | None, typer.Option(show_default=False, help=(
        "Config with the task, its data files and services.judge, e.g. my.yaml."))] = None,
    json: AsJson = False,
) -> None:
    """Compare a judge model and the task's own rule with answers that people have labelled.

    Reports the agreement with the labels, the false positives and negatives, the verdicts that change when the question
    is reworded, the wrong answers that are accepted once an instruction to the judge is inserted into them, the
    position bias in pairs, and the cost. Without services.judge.url only the rule is checked."""
    from vlrl.services.judge import Judge
    from vlrl.tools.tasks.judge_check import audit
    loaded = load(config, settings)
    with TemporaryDirectory(prefix="vlrl-judge-") as folder:
        judge = Judge(loaded.services.judge, Path(folder), loaded.limits) if loaded.services.judge.url else None
        try:
            report = audit(loaded, rows, judge)
        finally:
            if judge:
                judge.close()
    if json:
        return emit(report.plain())
    _print(report)


def _print(report: Audit) -> None:
    typer.echo(f"{'':6} {'answers':>8} {'no verdict':>11} {'agreement':>10} {'false positives':>16} "
               f"{'false negatives':>16}")
    for name, one in (("judge", report.judge), ("rule", report.rule)):
        if one:
            wrong = f"{one.false_positives} ({_percent(one.false_positive_rate)})"
            missed = f"{one.false_negatives} ({_percent(one.false_negative_rate)})"
            typer.echo(f"{name:6} {one.answers:>8} {one.unanswered:>11} {_percent(one.agreement):>10} {wrong:>16} "
                       f"{missed:>16}")
    if report.judge is None:
        return
    typer.echo(f"verdicts changed by another wording  {_percent(report.reworded)}\nwrong answers accepted with text "
               f"addressed to the judge  {_percent(report.injected_accepted)}")
    if report.pairs:
        p = report.pairs
        typer.echo(f"pairs  {p['pairs']}, {p['unanswered']} without a verdict; agreement {_percent(p['agreement'])}, "
                   f"the order decides {_percent(p['order_decides'])}, first place {_percent(p['position_bias'], '+')}")
    typer.echo("cost  " + ", ".join(f"{name} {value:g}" for name, value in report.cost.items()))


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1%}"


app = group("judge", "Measure how reliable a judge model, or a task's rule, is.", check)
