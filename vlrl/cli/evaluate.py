"""`vlrl eval`: a model, a checkpoint or a server, measured on a config's task."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, is_free, load
from vlrl.cli.terminal import printable, progress_bars, table
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.tools.evaluation.grid import Judge, Report, Server
    from vlrl.tools.evaluation.measure import ModelChoice
    from vlrl.tools.evaluation.settings import Grid
    from vlrl.tools.evaluation.summary import Result

EXAMPLES = examples(
    "vlrl eval configs/quickstart.yaml",
    "vlrl eval configs/quickstart.yaml --model embedded/tiny-qwen3-vl",
    "vlrl eval configs/quickstart.yaml --checkpoint runs/other --samples 1000",
    "vlrl eval runs/quickstart/config.yaml --temperature 1 --rollouts /tmp/answers",
    "Several answers, seeds and settings: pass@k, votes, sd over seeds, in a folder that is named at the end",
    "vlrl eval configs/quickstart.yaml --answers 8 --seeds 3",
    "vlrl eval configs/quickstart.yaml --temperature 0 --temperature 1 -o runs/both",
    "Does it look at the pictures? The same questions without them, and with those of other samples",
    "vlrl eval configs/quickstart.yaml --probe blank_media --probe other_media",
    "An OpenAI-compatible server:",
    "vlrl eval my.yaml --endpoint http://127.0.0.1:8000/v1 --key-env MY_KEY")

_WITHOUT = {"rejected": "left out", "unscorable": "unscorable"}
"""Counts in a line of eval.jsonl of samples that no metric holds."""


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("eval", epilog=EXAMPLES)(evaluate)


def evaluate(
    config: ConfigPath,
    settings: Words = None,
    model: Annotated[str | None, typer.Option(
        metavar="FOLDER|NAME", show_default=False,
        help="A model or adapter instead of a checkpoint, e.g. Qwen/Qwen2.5-VL-3B-Instruct; with --endpoint one of the "
        "server's.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="A checkpoint, or a run folder for its newest, e.g. runs/a/checkpoints/step-000050. Default: the newest "
        "of run.dir, or model.name where that has none.")] = None,
    split: Annotated[list[str] | None, typer.Option(
        metavar="NAME", show_default=False,
        help="A split, e.g. heldout; may be repeated. Default: eval.splits.")] = None,
    samples: Annotated[int | None, typer.Option(
        metavar="N", min=1, show_default=False, help="Samples per split, e.g. 1000. Default: eval.samples.")] = None,
    answers: Annotated[int, typer.Option(
        metavar="N", min=1, max=4096, help="Answers to each sample, for pass@k and votes, e.g. 8.")] = 1,
    seeds: Annotated[str | None, typer.Option(
        metavar="N|A,B", show_default=False, help="How many seeds, or which, e.g. 3 or 5,7,11. Default: seed.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(
        metavar="T", min=0, show_default=False,
        help="0 = greedy, e.g. 0.7; may be repeated. Default: eval.temperature; 1 where several answers are drawn and "
        "that is 0.")] = None,
    top_p: Annotated[list[float] | None, typer.Option(
        metavar="P", show_default=False, help="Draw from the tokens that hold so much probability, e.g. 0.9; may be "
        "repeated.")] = None,
    max_new_tokens: Annotated[list[int] | None, typer.Option(
        metavar="N", min=1, show_default=False,
        help="Most tokens of an answer, e.g. 1024; may be repeated. Default: rollout.max_new_tokens.")] = None,
    each_wording: Annotated[bool, typer.Option(
        "--each-wording", help="Ask every sample with each of task.prompts, instead of one in turn.")] = False,
    probe: Annotated[list[str] | None, typer.Option(
        metavar="NAME", show_default=False,
        help="Ask every sample again without what its answer needs, or in other words: blank_media, other_media, "
        "no_premise, reworded; may be repeated.")] = None,
    endpoint: Annotated[str | None, typer.Option(
        metavar="URL", show_default=False,
        help="Ask an OpenAI-compatible server instead, e.g. http://127.0.0.1:8000/v1.")] = None,
    key_env: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False,
        help="With --endpoint: the environment variable that holds its key. Default: no key is sent.")] = None,
    concurrency: Annotated[int | None, typer.Option(
        metavar="N", min=1, max=1024, show_default=False,
        help="With --endpoint or --judge: requests at a time. Default: 8.")] = None,
    timeout_s: Annotated[float | None, typer.Option(
        "--timeout", metavar="SECONDS", min=0.1, show_default=False,
        help="With --endpoint or --judge: most seconds that an answer may take. Default: 300.")] = None,
    retries: Annotated[int | None, typer.Option(
        metavar="N", min=0, max=100, show_default=False,
        help="With --endpoint or --judge: how often a request is tried again. Default: 4.")] = None,
    judge: Annotated[str | None, typer.Option(
        metavar="URL", show_default=False, help="Have the reasoning of right answers judged by an OpenAI-compatible "
        "server, e.g. http://127.0.0.1:8001/v1: CoT-pass@k.")] = None,
    judge_model: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False, help="With --judge: one of the server's models. Default: its only one.")
    ] = None,
    judge_key_env: Annotated[str | None, typer.Option(
        metavar="NAME", show_default=False,
        help="With --judge: the environment variable that holds its key. Default: no key is sent.")] = None,
    judge_votes: Annotated[int | None, typer.Option(
        metavar="N", min=1, max=99, show_default=False,
        help="With --judge: verdicts on each answer. Default: 3.")] = None,
    judge_text_only: Annotated[bool, typer.Option(
        "--judge-text-only", help="With --judge: send it no pictures.")] = False,
    out: Annotated[Path | None, typer.Option(
        "-o", "--out", metavar="FOLDER|OUT.jsonl", show_default=False,
        help="Folder of answers, numbers and plot, e.g. runs/mine; the same command goes on there. Of a plain "
        "evaluation also a new .jsonl file for one line a split, as in a run's eval.jsonl.")] = None,
    rollouts: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="Of a plain evaluation: keep every answer as parquet, with its media, in a new folder, e.g. /tmp/answers.",
    )] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a config's task, with 95 % intervals over the samples.

    The run folder is neither locked nor changed, so a run may go on meanwhile.

    Several answers, seeds, temperatures, wordings or limits, or a server: every combination is measured, and answers,
    numbers and a plot are kept in a folder, where the same command goes on after a kill (docs/evaluation.md).
    """
    from vlrl.tools.evaluation.settings import Grid, seeds_of

    temperatures = tuple(temperature or ())
    lines = out is not None and out.suffix == ".jsonl"
    further = (answers > 1 or seeds or len(temperatures) > 1 or top_p or max_new_tokens or each_wording or probe
               or endpoint or judge)
    at_length = bool(further) or (out is not None and not lines)
    http = {"--concurrency": concurrency, "--timeout": timeout_s, "--retries": retries}
    server_only = {**({} if endpoint else {"--key-env": key_env}), **({} if endpoint or judge else http)}
    for name, value in {"--judge-model": judge_model, "--judge-key-env": judge_key_env, "--judge-votes": judge_votes,
                        "--judge-text-only": judge_text_only or None}.items():
        if value is not None and not judge:
            raise typer.BadParameter("goes with --judge", param_hint=name)
    _refuse(model, checkpoint, endpoint, server_only, out, rollouts, at_length, top_p)
    given = {"splits": tuple(split) if split else None, "samples": samples,
             "temperature": temperatures[0] if len(temperatures) == 1 else None}
    words = [f"eval.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    loaded = load(config, [*(settings or ()), *words])
    if loaded.eval.samples == 0 or not loaded.eval.splits:
        raise ConfigError("eval.samples or eval.splits is empty, so there is nothing to measure: e.g. --samples 256")
    if not at_length:
        chosen = _chosen(loaded, model, checkpoint)
        _show(chosen, _measure(loaded, chosen, rollouts), out, as_json)
        return
    grid = Grid(answers=answers, seeds=seeds_of(seeds, loaded.seed), temperatures=temperatures,
                top_ps=tuple(top_p or ()), max_new_tokens=tuple(max_new_tokens or ()),
                probes=tuple(probe or ()))
    grid.check()
    source = (_server(endpoint, model, key_env, concurrency, timeout_s, retries) if endpoint
              else _chosen(loaded, model, checkpoint))
    from vlrl.tools.evaluation.grid import Judge

    judges = None if judge is None else Judge(
        server=_server(judge, judge_model, judge_key_env, concurrency, timeout_s, retries, "--judge"),
        votes=judge_votes or 3, text_only=judge_text_only)
    _at_length(loaded, source, grid, out, each_wording, judges, as_json)


def _refuse(model: str | None, checkpoint: Path | None, endpoint: str | None, server_only: Mapping[str, Any],
            out: Path | None, rollouts: Path | None, at_length: bool, top_p: Sequence[float] | None) -> None:
    """Raises for options that do not go together."""
    lines = out if out is not None and out.suffix == ".jsonl" else None
    if model is not None and checkpoint is not None:
        raise typer.BadParameter("name a model or a checkpoint, not both", param_hint="--model")
    if endpoint and checkpoint:
        raise typer.BadParameter("a server has its own weights; leave --checkpoint out", param_hint="--endpoint")
    for name, value in server_only.items():
        if value is not None:
            raise typer.BadParameter("goes with --endpoint", param_hint=name)
    if any(not 0 < p <= 1 for p in top_p or ()):
        raise typer.BadParameter(f"{top_p} must be above 0 and at most 1", param_hint="--top-p")
    if at_length and (lines or rollouts):
        name, value = ("--out", lines) if lines else ("--rollouts", rollouts)
        raise ConfigError(f"{name} {value} is for a plain evaluation, of one answer at one setting: name a folder with "
                          "--out, whose answers.jsonl has every answer")
    if out is not None and os.path.lexists(out) and (lines or not out.is_dir()):
        raise ConfigError(f"{out} exists already, and nothing is overwritten: name another for --out")
    if rollouts is not None and not is_free(rollouts):
        raise ConfigError(f"{rollouts} is not an empty folder, and nothing is overwritten: name another for --rollouts")


def _chosen(config: Config, model: str | None, checkpoint: Path | None) -> ModelChoice:
    """Returns the model to measure, and says what is odd about it."""
    from vlrl.store.checkpoint import find

    if checkpoint is not None:
        find(checkpoint)  # before what takes time to import
    from vlrl.tools.evaluation.measure import choose_model

    chosen = choose_model(config, model, checkpoint)
    for warning in chosen.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return chosen


def _server(url: str, model: str | None, key_env: str | None, concurrency: int | None, timeout_s: float | None,
            retries: int | None, option: str = "--endpoint") -> Server:
    """Returns the server of --endpoint or --judge."""
    from vlrl.services.chat import address_of, key_of
    from vlrl.tools.evaluation.grid import Server

    key = key_of(key_env, "--key-env" if option == "--endpoint" else f"{option}-key-env")
    address_of(url, option)
    given = {"concurrency": concurrency, "timeout_s": timeout_s, "retries": retries}
    return Server(url=url, model=model, key=key, option=option,
                  **{name: value for name, value in given.items() if value is not None})


# --- several answers, seeds and settings ------------------------------------------------------------------------------


def _at_length(config: Config, source: ModelChoice | Server, grid: Grid, out: Path | None, each_wording: bool,
               judge: Judge | None, as_json: bool) -> None:
    """Measures every combination, and says where the answers are; on rank 0."""
    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.tools.evaluation import grid as answers

    with prints_aside(), progress_bars(lines=True, show=comm.is_main()) as progress:
        report = answers.evaluate_grid(config, source, grid, out, progress, each_wording=each_wording,
                                            judge=judge)
    if not comm.is_main():
        return
    if as_json:
        emit(answers.as_json(report))
    else:
        _show_report(report)
    if report.before:
        print(f"{report.before} answers were in {report.folder} already, scored as they were then; remove that folder "
              "to measure anew", file=sys.stderr)
    if report.judge:
        print("judge {model}: {answers} right answers, {calls} verdicts asked for, {cached} known, {unread} unread "
              "(they count as no), {unanswered} unanswered (no verdict), {tokens} tokens written; "
              "{file}".format(**report.judge), file=sys.stderr)
    unanswered = sum(r.unanswered for r in report.results)
    if unanswered:
        print(f"warning: the server gave no answer {unanswered} times, which counts as nothing; the same command asks "
              f"for these again (why: `error` in {report.folder / answers.ROWS})", file=sys.stderr)


def _show_report(report: Report) -> None:
    """Prints every metric, a table for each setting, and what was written."""
    from rich.console import Console

    console = Console(highlight=False)
    title = f"{report.model} after {report.step} steps" if report.step else report.model
    console.print(printable(title, 200), markup=False, soft_wrap=True)
    for name in dict.fromkeys(r.drawing.name for r in report.results):
        results = [r for r in report.results if r.drawing.name == name]
        drawing = results[0].drawing
        console.print(f"\n{name}; answers to each sample: {drawing.answers}; seeds: "
                      f"{', '.join(map(str, drawing.seeds))}", markup=False, soft_wrap=True)
        console.print(_setting_table(results))
    console.print("[low, high] = 95 % interval over the samples; sd = over the seeds", markup=False, style="dim")
    for what, file in (("every answer", "answers.jsonl"), ("numbers", "evaluation.json"), ("plot", "evaluation.png")):
        console.print(f"{what:<13} {report.folder / file}", markup=False, soft_wrap=True)


def _setting_table(results: Sequence[Result]) -> Any:
    """Returns every metric of every split at one setting, one row each."""
    from rich.text import Text

    shown = table("split", "metric", "n", "mean", "interval", "sd", left=2)
    for result in results:
        left_out = f" ({result.left_out} left out)" if result.left_out else ""
        for name, metric in result.metrics.items():
            interval = "" if metric.low is None or metric.high is None else f"[{metric.low:.3f}, {metric.high:.3f}]"
            cells = (result.split, printable(name, 80), f"{result.n}{left_out}", f"{metric.mean:.3f}", interval,
                     "" if metric.sd is None else f"{metric.sd:.3f}")
            shown.add_row(*map(Text, cells))
    return shown


# --- one answer at one setting ----------------------------------------------------------------------------------------


def _measure(config: Config, chosen: ModelChoice, rollouts: Path | None) -> list[dict[str, Any]]:
    """Returns one record per split, and its answers in the folder `rollouts`."""
    from rich.console import Console

    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.rollout.error_limits import check_score_errors
    from vlrl.store import RunFolder, plain
    from vlrl.tools.evaluation.measure import measure

    records = []
    with Console(stderr=True).status(f"loading {printable(chosen.name)}") as status, prints_aside():
        for result in measure(config, chosen, lambda what, done, total: status.update(f"{what} {done}/{total}")):
            split, stored = result.record["split"], None
            if rollouts:
                stored = RunFolder(rollouts, config.store.media).write_rollouts(chosen.step, comm.rank(), result.groups,
                                                                               split=split)
            check_score_errors(result.groups, config.limits.score_errors, f"evaluation of {split}", stored)
            records.append(plain(result.record))
    return records


def _show(chosen: ModelChoice, records: Sequence[Mapping[str, Any]], out: Path | None, as_json: bool) -> None:
    """Prints the records, and writes them to `out`; on rank 0."""
    from vlrl.distributed import comm
    from vlrl.store.files import write_text
    from vlrl.tools.evaluate import metrics_of

    if not comm.is_main():
        return
    if out:
        write_text(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    if as_json:
        splits = {r["split"]: {"n": r["n"], "metrics": metrics_of(r)} for r in records}
        emit({"model": chosen.name, "step": chosen.step, "splits": splits, "evaluations": records})
        return
    from rich.console import Console

    Console(highlight=False).print(_table(chosen, records))


def _table(chosen: ModelChoice, records: Sequence[Mapping[str, Any]]) -> Any:
    """Returns every metric of every split with its interval, one row each."""
    from rich.text import Text

    from vlrl.tools.evaluate import metrics_of

    title = Text(f"{chosen.name} after {chosen.step} steps" if chosen.step else chosen.name)
    shown = table("split", "metric", "n", "mean", "interval", left=2, title=title, min_width=50,
                  caption=Text("[low, high] = 95 % interval over the samples", "dim"))
    for record in records:
        without = [f"{record[key]} {words}" for key, words in _WITHOUT.items() if record.get(key)]
        left_out = f" ({', '.join(without)})" if without else ""
        for name, metric in metrics_of(record).items():
            mean, low, high = metric.values()
            interval = "" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"
            shown_mean = "" if mean is None else f"{mean:.3f}"
            cells = (record["split"], name, f"{record['n']}{left_out}", shown_mean, interval)
            shown.add_row(*(Text(str(cell)) for cell in cells))
    return shown
