"""Prints the report of `vlrl train --dry-run`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import typer

from vlrl.cli.common import emit
from vlrl.cli.terminal import printable, show

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.tools.machine.dryrun import DryRun
    from vlrl.tools.play.preview import SamplePreview, ScoredOracle

_MOST = 4000  # characters of one text that are printed


def run(config: Config, as_json: bool) -> None:
    """Performs the dry run of the config and prints the report. Exits with 1 if there is a problem."""
    from rich.console import Console

    from vlrl.tools.machine import dryrun
    with Console(stderr=True).status("reading") as status:
        report = dryrun.check(config, tell=status.update)
    if as_json:
        emit(_plain(report))
    else:
        _print(report)
    if report.problems:
        raise typer.Exit(1)


def run_stages(config: Config, as_json: bool) -> None:
    """Checks every stage of the config and prints a report for each. Exits with 1 if there is a problem."""
    from rich.console import Console

    from vlrl.tools.machine.needs import of_stages
    from vlrl.tools.stages import run as stages
    needed = [str(one) for one in of_stages(config)]
    with Console(stderr=True).status("reading") as status:
        stage_reports = stages.dry_run(config, status.update)
    bad = [problem for *_, problems in stage_reports for problem in problems]
    if as_json:
        emit({"stages": [{"name": stage.name, "kind": stage.kind, "problems": problems,
                          **(_plain(report) if report else {})} for stage, report, problems in stage_reports],
              "needs": needed, "ok": not bad})
    else:
        for line in needed:
            show(line, "yellow", _MOST)
        for stage, report, problems in stage_reports:
            show(f"stage {stage.name} ({stage.kind})", "bold")
            if report:
                _print(report)
            for problem in [] if report else problems:
                show(f"problem: {problem}", "red", _MOST)
    if bad:
        raise typer.Exit(1)


def _plain(report: DryRun) -> dict[str, Any]:
    out = {f.name: getattr(report, f.name) for f in fields(report)}
    parts = ("sample", "lengths", "step", "memory", "observed", "episode")
    out |= {name: asdict(out[name]) for name in parts if out[name]}
    out["splits"] = [asdict(split) for split in report.splits]
    if report.sample:
        out["sample"]["target"] = json.loads(json.dumps(report.sample.target, default=str))
        out["sample"]["text_tokens"] = report.sample.text_tokens
        if report.sample.oracle:
            out["sample"]["oracle"]["is_best"] = report.sample.oracle.is_best
    if report.memory:
        out["memory"] |= {"total": report.memory.total, "largest": report.memory.largest}
    out["ok"] = not report.problems
    return out


def _print(report: DryRun) -> None:
    _print_rows(_rows(report))
    for line in (*report.needs, *report.inert, *(f"warning: {warning}" for warning in report.warnings)):
        show(line, "yellow", _MOST)
    for problem in report.problems:
        show(f"problem: {problem}", "red", _MOST)
    show("nothing was written, no weights were read" if not report.problems else
         f"{len(report.problems)} problem{'s' * (len(report.problems) > 1)}; nothing was written")


def print_sample(sample: SamplePreview) -> None:
    """Prints a preview of a sample: the sample as the model sees it."""
    _print_rows(_sample(sample))


def _print_rows(rows: Iterator[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(printable(value.rstrip(), _MOST)))
    Console(highlight=False).print(table)


def _rows(report: DryRun) -> Iterator[tuple[str, str]]:
    from vlrl.tools.machine import memory
    yield "run", report.run
    yield "task", report.task
    for split in report.splits:
        yield f"  {split.name}", f"{split.samples:,} samples, the first is {split.first}"
    for line in report.length:
        yield "length", line
    yield "model", report.model
    if report.parameters:
        trained, total = report.parameters
        yield "  learns", f"{trained:,} of {total:,} parameters ({trained / total:.1%}): {report.learns}"
    if report.sample:
        yield from _sample(report.sample)
    if lengths := report.lengths:
        yield "prompts", (f"{lengths.least} to {lengths.most} tokens, mean {lengths.mean:.0f}, over {lengths.samples} "
                          f"samples; limits.prompt_tokens={lengths.limit}")
        if lengths.rejected:
            yield "  rejected", f"{len(lengths.rejected)}, such as: {lengths.rejected[0]}"
    if (one := report.episode) and report.observed:
        yield "episodes", (f"at most {one.tokens:,} tokens in {one.turns} turns, {one.written:,} of them in actions, "
                           f"{one.visual:,} visual; episode.max_tokens, max_turns and max_media hold")
        yield "", report.observed.words()
    if step := report.step:
        yield "step", (f"{step.prompts} prompts, {step.answers} answers, {step.optimizer_steps} optimizer "
                       f"step{'s' * (step.optimizer_steps > 1)}, on one process")
        each = "every answer has rollout.max_new_tokens" if report.episode is None else "every episode is that long"
        several = f"{step.micro_batches} micro-batches" if step.micro_batches > 1 else "1 micro-batch"
        yield "  at most", (f"{several}, {step.tokens:,} packed tokens, {step.largest:,} in the largest, where "
                            f"{each}")
    if report.memory:
        yield "memory", "\n".join(memory.table(report.memory))
        yield "", "on a GPU the memory of CUDA itself and of vLLM comes on top: `vlrl plan` counts both"
    if report.engine:
        yield "engine", report.engine


def _sample(sample: SamplePreview) -> Iterator[tuple[str, str]]:
    yield "sample", sample.id
    yield "  prompt", sample.text
    if sample.tokens is not None:
        visual = " + ".join(str(m.tokens) for m in sample.media if m.tokens is not None)
        apart = f" = {visual} visual + {sample.text_tokens} text" if visual else "" if sample.media else ", all text"
        yield "  tokens", f"{sample.tokens}{apart}"
    elif sample.coordinates:
        yield "  tokens", ("not known without the model, which is not on this machine or cannot be read; sizes are "
                           "those of the files")
    for media in sample.media:
        frames = f", {media.frames} frames" if media.kind == "video" else ""
        resized = f" -> {media.processed[0]} x {media.processed[1]} for the model" if media.processed else ""
        yield f"  {media.kind}", f"{media.original[0]} x {media.original[1]} pixels{frames}{resized}"
    if sample.coordinates:
        yield "  boxes in", sample.coordinates
    yield "  target", str(sample.target)
    if sample.oracle:
        yield from _oracle(sample.oracle)
    elif not sample.coordinates:
        yield "", "the plain fields of the row; --config shows the task's prompt, and the model's sizes and tokens"
    else:
        yield "  oracle", "none: the task names no perfect answer for this sample"


def _oracle(oracle: ScoredOracle) -> Iterator[tuple[str, str]]:
    yield "  oracle", oracle.answer
    if oracle.opened:
        yield "", (f"behind {oracle.opened!r}, which the chat template has written and which is scored with it "
                   "(model.chat_template_kwargs)")
    if oracle.tokens is not None:
        yield "", f"{oracle.tokens} tokens with the end token"
    parts = "  ".join(f"{name} {'none' if value is None else f'{value:.3f}'} x {oracle.weights.get(name, 0.0):g}"
                      for name, value in oracle.parts.items())
    yield "  parts", parts
    reward = "none" if oracle.reward is None else f"{oracle.reward:.3f}"
    yield "  reward", reward + (", the maximum" if oracle.is_best else f" of at most {oracle.best:.3f}")
    if oracle.error:
        yield "  error", oracle.error
