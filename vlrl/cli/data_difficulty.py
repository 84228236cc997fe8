"""`vlrl data difficulty`: measures how often a model answers each prompt correctly."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, choose_model, emit, examples, load, refuse_existing
from vlrl.cli.terminal import printable, progress_bars, show_table
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.tools.datasets.prompt_table import Summary

_SHOWN = 20  # categories, and prompts left out, that are printed


@examples(
    "vlrl data difficulty my.yaml                                   8 answers to each row of data.train",
    "vlrl data difficulty my.yaml --answers 16 --limit 500 --out measured.jsonl",
    "vlrl data difficulty my.yaml --checkpoint runs/a               with the newest checkpoint of a run",
    "torchrun --nproc-per-node 2 -m vlrl data difficulty my.yaml    each process answers its share",
    "vlrl train my.yaml data.train=rows.difficulty.jsonl curriculum.name=rlcs")
def difficulty(
    config: ConfigPath, settings: Words = None,
    answers: Annotated[int, typer.Option(min=1, help="Number of answers to each prompt, k, e.g. 16.")] = 8,
    split: Annotated[str, typer.Option(help="The split whose prompts are measured, e.g. heldout.")] = "train",
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False,
                                              help="Only the first N prompts, e.g. 500.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", show_default=False, help=(
        "The new file, .jsonl or .json, e.g. measured.jsonl. Default: rows.difficulty.jsonl next to the data file "
        "rows.jsonl, or runs/name.difficulty.jsonl if the task generates its samples."))] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="FOLDER", show_default=False, help=(
        "Use the weights of this checkpoint, or of the newest checkpoint of this run folder, instead of model.name, "
        "e.g. runs/a."))] = None,
    temperature: Annotated[float | None, typer.Option(
        metavar="T", show_default=False, help="Sampling temperature, e.g. 0.7. Default: rollout.temperature.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of an earlier measurement.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how hard each training prompt is for a model, and write the result as columns of a new data file.

    Each prompt is answered k times, sampled as in training. Column pass_at_k is the share of correct answers (those
    with curriculum.part of at least curriculum.pass_at); column difficulty is 1 - pass_at_k. Run the same command again
    to resume after a stop."""
    words = [] if temperature is None else [f"rollout.temperature={json.dumps(temperature)}"]
    loaded = load(config, [*(settings or ()), *words])
    from vlrl.curriculum import check
    from vlrl.tools.datasets.prompt_table import MeasurementFiles, default_out, rows_for
    from vlrl.training.build_task import make_task

    out = out or default_out(loaded, split)
    _check_out(out, loaded, force)
    check(loaded.curriculum, make_task(loaded))
    rows = rows_for(loaded, split, out)
    chosen = choose_model(loaded, None if checkpoint else loaded.model.name, checkpoint)
    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.tools.datasets import difficulty as tool
    from vlrl.tools.evaluation.measure import open_runtime

    scope, places = tool.MeasurementScope(answers=answers, split=split, limit=limit), MeasurementFiles(out=out)
    known = tool.facts(loaded, chosen, scope)
    if places.part.exists():
        tool.open_part(places.part, known)  # reports a part file of another measurement before the model is loaded
    with (prints_aside(), open_runtime(chosen.config, chosen) as prepared,
          progress_bars(lines=True, show=comm.is_main()) as progress):
        measurements = tool.measure(prepared, scope, places.part, known, progress)
    numbers, whole = comm.on_main(lambda: tool.write(places, rows, measurements, known))
    if not comm.is_main():
        return
    follow = _follow(config, out, split, whole)
    if as_json:
        emit({"file": str(out), "about": str(places.about), "plot": str(places.picture), "next": follow,
              **vars(numbers)})
    else:
        _show(numbers, answers, out, places.picture, follow)


def _check_out(out: Path, config: Config, force: bool) -> None:
    """Raises ConfigError if an output file cannot be written. Called before the measurement, which takes long."""
    from vlrl.data import check_suffix
    check_suffix(out)
    data = [Path(name) for name in (config.data.train, config.data.heldout, config.data.difficulty) if name]
    if any(os.path.realpath(out) == os.path.realpath(path) for path in data):
        raise ConfigError(f"--out {out} is a data file that the config reads, and it is never overwritten: name "
                          "another file")
    from vlrl.tools.datasets.prompt_table import MeasurementFiles
    places = MeasurementFiles(out=out)
    beside = [] if places.part.exists() else [places.about, places.picture]  # else of a killed command
    for path in (out, *beside):
        refuse_existing(path, force)


def _follow(config: str, out: Path, split: str, whole: bool) -> str:
    from vlrl.data import read_rows
    from vlrl.data.sources.reading import recognised_format
    if split != "train":
        return ""
    config, file = shlex.quote(config), shlex.quote(str(out))
    if not whole:
        return f"vlrl train {config} data.difficulty={file} curriculum.name=rlcs"
    foreign = any(recognised_format(row) not in (None, "canonical") for row in read_rows(out, "canonical"))
    return f"vlrl train {config} data.train={file} curriculum.name=rlcs{' data.format=canonical' if foreign else ''}"


def _show(summary: Summary, answers: int, out: Path, picture: Path, follow: str) -> None:
    lines: dict[str, Any] = {"all": summary.histogram}
    lines |= dict(sorted(summary.categories.items(), key=lambda item: -sum(item[1].values()))[:_SHOWN])
    more = len(summary.categories) - _SHOWN
    show_table(("category" if len(lines) > 1 else "", *summary.histogram),
               ((printable(name, 40), *(f"{count:,}" for count in counts.values())) for name, counts in lines.items()),
               title="Prompts by right answers, percent",
               caption=f"and {more:,} more categories (--json has all)" if more > 0 else None)
    shares = "  ".join(f"pass@{k} {value:.3f}" for k, value in summary.pass_at.items())
    typer.echo(f"{summary.answers_drawn:,} answers drawn, {answers} to a prompt: {shares}")
    same = summary.histogram["0"] + summary.histogram["100"]
    typer.echo(f"all answers right or all wrong: {same:,} of {summary.measured:,} prompts: nothing to learn there")
    for entry in summary.left_out[:_SHOWN]:
        typer.echo(f"left out {printable(entry['id'], 100) or '(no id)'}: {printable(entry['reason'], 300)}")
    if len(summary.left_out) > _SHOWN:
        typer.echo(f"... and {len(summary.left_out) - _SHOWN:,} more prompts left out (--json lists all)")
    typer.echo(f"{out}: {summary.measured:,} prompts with columns; histogram in {picture}")
    if follow:
        typer.echo(f"next: {printable(follow)}   (or easy_to_hard, gaussian, staged, which read difficulty)")
