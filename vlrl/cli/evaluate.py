"""`vlrl eval`: evaluates a model, a checkpoint or a server on a config's task."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, choose_model, emit, examples, is_free, load, takes_requests
from vlrl.cli.terminal import formatted, printable, progress_bars, show, show_table
from vlrl.errors import ConfigError
from vlrl.tools.evaluation.request import EvalRequest

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.tools.evaluation.grid import Report
    from vlrl.tools.evaluation.measure import ModelChoice


_WITHOUT = {"rejected": "left out", "unscorable": "unscorable"}
"""Keys of a line of eval.jsonl that count samples without metrics -> label of these samples in the printed table."""


@examples(
    "vlrl eval configs/quickstart.yaml",
    "vlrl eval configs/quickstart.yaml --model embedded/tiny-qwen3-vl",
    "vlrl eval configs/quickstart.yaml --checkpoint runs/other --samples 1000",
    "vlrl eval runs/quickstart/config.yaml --temperature 1 --rollouts /tmp/answers",
    "Several answers, seeds and settings: pass@k, votes, sd over seeds; prints the folder of the results",
    "vlrl eval configs/quickstart.yaml --answers 8 --seeds 3",
    "vlrl eval configs/quickstart.yaml --temperature 0 --temperature 1 -o runs/both",
    "Does the model use the images? The same questions with blank images, and with images of other samples",
    "vlrl eval configs/quickstart.yaml --probe blank_media --probe other_media",
    "An OpenAI-compatible server:",
    "vlrl eval my.yaml --endpoint http://127.0.0.1:8000/v1 --key-env MY_KEY")
@takes_requests
def evaluate(config: ConfigPath, request: EvalRequest, settings: Words = None, as_json: AsJson = False) -> None:
    """Evaluate a model on a config's task, with 95 % confidence intervals over the samples.

    The run folder is neither locked nor changed, so this works while its run is in progress.

    If several answers per sample, seeds, temperatures, prompt wordings or length limits are requested, every
    combination of them is evaluated. In this case, and for a server, answers, metrics and a plot are written to a
    folder; after a kill the same command resumes from that folder (docs/evaluation.md)."""
    _check(request)
    given = {"splits": request.splits or None, "samples": request.samples,
             "temperature": request.temperatures[0] if len(request.temperatures) == 1 else None}
    words = [f"eval.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    loaded = load(config, [*(settings or ()), *words])
    if loaded.eval.samples == 0 or not loaded.eval.splits:
        raise ConfigError("eval.samples is 0 or eval.splits is empty, so there is nothing to measure: set them, "
                          "e.g. --samples 256")
    if request.is_grid:
        _evaluate_grid(loaded, request, as_json)
    else:
        chosen = choose_model(loaded, request.model, request.checkpoint)
        _show(chosen, _measure(loaded, chosen, request.rollouts), request.out, as_json)


def _check(request: EvalRequest) -> None:
    """Raises an error for options that cannot be combined, and for output paths that exist already."""
    for name, owner in request.misplaced().items():
        raise typer.BadParameter(f"needs {owner}", param_hint=name)
    if request.model is not None and request.checkpoint is not None:
        raise typer.BadParameter("name a model or a checkpoint, not both", param_hint="--model")
    if request.endpoint and request.checkpoint:
        raise typer.BadParameter("a server has its own weights; remove --checkpoint", param_hint="--endpoint")
    if any(not 0 < p <= 1 for p in request.top_ps):
        raise typer.BadParameter(f"{[*request.top_ps]} must be above 0 and at most 1", param_hint="--top-p")
    out, rollouts = request.out, request.rollouts
    if request.is_grid and (request.lines or rollouts):
        name, value = ("--out", out) if request.lines else ("--rollouts", rollouts)
        raise ConfigError(f"{name} {value} is only for a local model that gives one answer per sample with one "
                          "value of each option. Name a folder with --out instead: its answers.jsonl has every answer")
    if out is not None and os.path.lexists(out) and (request.lines or not out.is_dir()):
        raise ConfigError(f"{out} exists already, and nothing is overwritten: name another path with --out")
    if rollouts is not None and not is_free(rollouts):
        raise ConfigError(f"{rollouts} is not an empty folder, and nothing is overwritten: name another folder with "
                          "--rollouts")


def _evaluate_grid(config: Config, request: EvalRequest, as_json: bool) -> None:
    """Evaluates every combination of settings, and prints the metrics and the output files on rank 0."""
    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.tools.evaluation import grid as tool
    from vlrl.tools.evaluation.settings import Grid
    grid = Grid.from_request(request, config.seed)
    source = (tool.Server.from_request(request, request.endpoint, request.model, request.key_env) if request.endpoint
              else choose_model(config, request.model, request.checkpoint))
    judge = tool.Judge.from_request(request) if request.judge else None
    with prints_aside(), progress_bars(lines=True, show=comm.is_main()) as progress:
        report = tool.evaluate_grid(config, source, grid, request.out, progress, each_wording=request.each_wording,
                                    judge=judge)
    if not comm.is_main():
        return
    if as_json:
        emit(tool.as_json(report))
    else:
        _show_report(report)
    if report.before:
        print(f"{report.before} answers were in {report.folder} already, with their scores of that time; remove "
              "that folder to measure again", file=sys.stderr)
    if report.judge:
        print("judge {model}: {answers} right answers, {calls} verdicts asked for, {cached} known, {unread} unread "
              "(they count as no), {unanswered} unanswered (no verdict), {tokens} tokens written; "
              "{file}".format(**report.judge), file=sys.stderr)
    unanswered = sum(r.unanswered for r in report.results)
    if unanswered:
        print(f"warning: the server did not answer {unanswered} requests, which no metric counts; the same command "
              f"asks for them again (reasons: `error` in {report.folder / tool.ROWS})", file=sys.stderr)


def _show_report(report: Report) -> None:
    show(f"{report.model} after {report.step} steps" if report.step else report.model, most=200)
    for name in dict.fromkeys(r.setting.name for r in report.results):
        results = [r for r in report.results if r.setting.name == name]
        setting = results[0].setting
        show(f"\n{name}; answers to each sample: {setting.answers}; seeds: {', '.join(map(str, setting.seeds))}")
        show_table(("split", "metric", "n", "mean", "interval", "sd"), (
            (r.split, printable(name, 80), f"{r.n}" + (f" ({r.left_out} left out)" if r.left_out else ""),
             *_cells(metric.mean, metric.low, metric.high), formatted(metric.sd, without=""))
            for r in results for name, metric in r.metrics.items()), left=2)
    show("[low, high] = 95 % interval over the samples; sd = over the seeds", "dim")
    for what, file in (("every answer", "answers.jsonl"), ("numbers", "evaluation.json"), ("plot", "evaluation.png")):
        show(f"{what:<13} {report.folder / file}")


def _cells(mean: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    return formatted(mean, without=""), "" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"


def _measure(config: Config, chosen: ModelChoice, rollouts: Path | None) -> list[dict[str, Any]]:
    from rich.console import Console

    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.rollout.error_limits import check_errors
    from vlrl.store import RunFolder, plain
    from vlrl.tools.evaluation.measure import measure
    records = []
    with Console(stderr=True).status(f"loading {printable(chosen.name)}") as status, prints_aside():
        for record, groups in measure(config, chosen, lambda what, done, n: status.update(f"{what} {done}/{n}")):
            split, stored = record["split"], None
            if rollouts:
                stored = RunFolder(rollouts, config.store.media).write_rollouts(chosen.step, comm.rank(), groups,
                                                                               split=split)
            check_errors(groups, config.limits, f"evaluation of {split}", stored, ("score_errors",))
            records.append(plain(record))
    return records


def _show(chosen: ModelChoice, records: Sequence[Mapping[str, Any]], out: Path | None, as_json: bool) -> None:
    """Prints the metrics of `records`, evaluations of the model `chosen`, on rank 0. Also writes `records` to `out`."""
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
    rows = []
    for record in records:
        without = [f"{record[key]} {words}" for key, words in _WITHOUT.items() if record.get(key)]
        n = f"{record['n']}" + (f" ({', '.join(without)})" if without else "")
        rows += [(record["split"], name, n, *_cells(*metric.values())) for name, metric in metrics_of(record).items()]
    from rich.text import Text
    title = Text(printable(f"{chosen.name} after {chosen.step} steps" if chosen.step else chosen.name))
    show_table(("split", "metric", "n", "mean", "interval"), rows, left=2, title=title, min_width=50,
               caption=Text("[low, high] = 95 % interval over the samples", "dim"))
