"""`vlrl train`, `sft`, `eval`, `export`, `extrapolate` and `tiny`."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load
from vlrl.cli.terminal import printable, table
from vlrl.errors import ConfigError, did_you_mean
from vlrl.tools.tiny_families import DEFAULT, FAMILIES

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.tools.export import Exported
    from vlrl.tools.measure import Chosen

_TRAIN = ("COMMAND configs/quickstart.yaml",
          "COMMAND configs/quickstart.yaml --dry-run",
          "COMMAND configs/quickstart.yaml --profile",
          "COMMAND configs/quickstart.yaml steps=200 train.lr=1e-4 run.dir=runs/more",
          "torchrun --nproc_per_node 2 train.py configs/quickstart.yaml",
          "The first takes five minutes on a laptop CPU. A run goes on from its newest checkpoint: start the same "
          "command again after Ctrl-C or a crash. resume=never starts over (the old run is moved aside), resume=must "
          "fails without a checkpoint.",
          "Touch first: train.lr, rollout.group_size, steps.")
TRAIN_EXAMPLES = examples(*(line.replace("COMMAND", "train.py") for line in _TRAIN))
SFT_EXAMPLES = examples(
    "vlrl sft configs/quickstart.yaml train.lr=1e-3 steps=100 run.dir=runs/sft",
    "RL from there:",
    "vlrl train configs/quickstart.yaml model.name=runs/sft")
EVAL_EXAMPLES = examples(
    "vlrl eval configs/quickstart.yaml",
    "vlrl eval configs/quickstart.yaml --model embedded/tiny-qwen3-vl",
    "vlrl eval configs/quickstart.yaml --checkpoint runs/other --samples 1000",
    "vlrl eval runs/quickstart/config.yaml --temperature 1 --rollouts /tmp/answers")
EXPORT_EXAMPLES = examples(
    "vlrl export runs/quickstart -o models/quickstart",
    "vlrl export runs/lora/checkpoints/step-000050 -o models/lora --dtype bfloat16",
    "vlrl export runs/lora -o models/lora-adapter --adapter")
EXTRAPOLATE_EXAMPLES = examples(
    "vlrl extrapolate runs/lora/checkpoints/step-000050 runs/lora/checkpoints/step-000100 -o models/beyond",
    "vlrl extrapolate runs/a/checkpoints/step-000100 runs/a -k 0.5 -o models/half",
    "Then evaluate it, and keep it if it is better:",
    "vlrl eval configs/quickstart.yaml --model models/half")
TINY_EXAMPLES = examples(
    "vlrl tiny --out models/tiny",
    "vlrl tiny --family qwen2_5_vl --out /tmp/random --random",
    "vlrl train configs/quickstart.yaml model.name=models/tiny")


_NOT_METRICS = {"step", "n", "rejected", "score_errors"}


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command(epilog=examples(*(line.replace("COMMAND", "vlrl train") for line in _TRAIN)))(train)
    app.command(epilog=SFT_EXAMPLES)(sft)
    app.command("eval", epilog=EVAL_EXAMPLES)(evaluate)
    app.command(epilog=EXPORT_EXAMPLES)(export)
    app.command(epilog=EXTRAPOLATE_EXAMPLES)(extrapolate)
    app.command(epilog=TINY_EXAMPLES)(tiny)


# --- train and sft ----------------------------------------------------------------------------------------------------


def _show_settings(requested: bool) -> None:
    if not requested:
        return
    from vlrl import config
    from vlrl.tools import docs

    section = None
    for name, kind, default, text in config.describe():
        if name.partition(".")[0] != section and "." in name:
            section = name.partition(".")[0]
            typer.secho(f"\n{section}", bold=True)
        typer.echo(f"  {name} = {docs.shown(default)}   ({kind})")
        typer.echo(textwrap.fill(text, 79, initial_indent="      ", subsequent_indent="      "))
    raise typer.Exit


ShowSettings = Annotated[bool, typer.Option("--settings", callback=_show_settings, is_eager=True,
                                            help="List every setting with its default and meaning.")]
IsDryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything short of training and show one sample with "
                                        "its prompt, perfect answer and reward; reads no weights, writes nothing.")]
IsProfile = Annotated[bool, typer.Option("--profile", help="Measure some steps by phase, in a folder of their own "
                                         "(run.dir with -profile); nothing is evaluated or saved.")]
ProfileSteps = Annotated[int, typer.Option("--profile-steps", metavar="N", min=1,
                                           help="Steps that --profile measures, after one to warm up.")]


def train(config: ConfigPath, settings: Words = None, dry_run: IsDryRun = False, profile: IsProfile = False,
          profile_steps: ProfileSteps = 3, as_json: AsJson = False, show: ShowSettings = False) -> None:
    """Train by reinforcement learning with verifiable rewards."""
    loaded = load(config, settings)
    if dry_run and profile:
        raise typer.BadParameter("measures a run, which --dry-run does not start; give one of the two",
                                 param_hint="--profile")
    if dry_run:
        from vlrl.cli import dryrun

        dryrun.run(loaded, as_json)
        return
    if profile:
        _profile(loaded, profile_steps, as_json)
        return
    if as_json:
        raise typer.BadParameter("goes with --dry-run or --profile; a run writes JSON to metrics.jsonl and eval.jsonl "
                                 "of its folder", param_hint="--json")

    def run(loaded: Config) -> Any:
        from vlrl.training.loop import train as run_training

        return run_training(loaded)

    _finish(loaded, run)


def _profile(config: Config, steps: int, as_json: bool) -> None:
    """Prints where the time of a step goes; on rank 0."""
    from rich.console import Console

    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.training.profiler import notes, profile, render

    with prints_aside():
        result = profile(config, steps)
    if result is None:
        raise typer.Exit(130)
    if not comm.is_main():
        return
    if as_json:
        emit(result)
        return
    console = Console(highlight=False)
    console.print(render(result))
    for line in notes(result):
        console.print(line, markup=False, soft_wrap=True)


def sft(
    config: ConfigPath,
    settings: Words = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything without training: settings, data, one "
                                          "rendered prompt with its answer, memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Supervised fine-tuning on a task's own data: each row's `solution`, or the task's perfect answer.

    The config is that of an RL run, whose sampling settings are not used.
    """
    loaded = load(config, settings)
    if dry_run:
        from vlrl.cli import dryrun
        from vlrl.training.sft import supervised

        dryrun.run(supervised(loaded), as_json)
        return
    if as_json:
        raise typer.BadParameter("goes with --dry-run; a run writes JSON to metrics.jsonl and eval.jsonl of its folder",
                                 param_hint="--json")

    def run(loaded: Config) -> Any:
        from vlrl.training.sft import train as run_sft

        return run_sft(loaded)

    _finish(loaded, run)


def _finish(config: Config, run: Callable[[Config], Any]) -> None:
    """Runs and prints the summary on rank 0; leaves with 130 where the run was stopped before its last step."""
    try:
        session = run(config)
    except KeyboardInterrupt as stop:
        notes = getattr(stop, "__notes__", ["The same command goes on from the last checkpoint."])
        print("stopped.", *notes, file=sys.stderr)
        raise typer.Exit(130) from None
    from vlrl.distributed import comm
    from vlrl.evaluation.report import print_summary

    if session.done < session.config.steps:
        raise typer.Exit(130)
    if comm.is_main():
        print_summary(session.folder, session.done, session.progress.print)
    raise typer.Exit


def _is_free(folder: Path) -> bool:
    """Returns whether a folder can be made or filled there."""
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


# --- eval -------------------------------------------------------------------------------------------------------------


def evaluate(
    config: ConfigPath,
    settings: Words = None,
    model: Annotated[str | None, typer.Option(
        metavar="FOLDER|NAME", show_default=False,
        help="A model or adapter instead of a checkpoint, e.g. Qwen/Qwen2.5-VL-3B-Instruct.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="A checkpoint, or a run folder for its newest, e.g. runs/a/checkpoints/step-000050. Default: the newest "
        "of run.dir, or model.name where that has none.")] = None,
    split: Annotated[list[str] | None, typer.Option(
        metavar="NAME", show_default=False,
        help="A split, e.g. heldout; may be repeated. Default: eval.splits.")] = None,
    samples: Annotated[int | None, typer.Option(
        metavar="N", min=1, show_default=False, help="Samples per split, e.g. 1000. Default: eval.samples.")] = None,
    temperature: Annotated[float | None, typer.Option(
        metavar="T", min=0, show_default=False, help="0 = greedy, e.g. 0.7. Default: eval.temperature.")] = None,
    out: Annotated[Path | None, typer.Option(
        "-o", "--out", metavar="OUT.jsonl", show_default=False,
        help="Write one line a split, as in a run's eval.jsonl, to a new file, e.g. scores.jsonl.")] = None,
    rollouts: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="Keep every answer as parquet, with its media, in a new folder, e.g. /tmp/answers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a config's task, with 95 % intervals over the samples.

    The run folder is neither locked nor changed, so a run may go on meanwhile.
    """
    from vlrl.store.checkpoint import find

    if model is not None and checkpoint is not None:
        raise typer.BadParameter("name a model or a checkpoint, not both", param_hint="--model")
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"{out} exists already, and nothing is overwritten: name another file for --out")
    if rollouts is not None and not _is_free(rollouts):
        raise ConfigError(f"{rollouts} is not an empty folder, and nothing is overwritten: name another for --rollouts")
    given = {"splits": tuple(split) if split else None, "samples": samples, "temperature": temperature}
    words = [f"eval.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    loaded = load(config, [*(settings or ()), *words])
    if loaded.eval.samples == 0 or not loaded.eval.splits:
        raise ConfigError("eval.samples or eval.splits is empty, so there is nothing to measure: e.g. --samples 256")
    if checkpoint is not None:
        find(checkpoint)  # before what takes time to import
    from vlrl.tools.measure import choose

    chosen = choose(loaded, model, checkpoint)
    for warning in chosen.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    records = _measure(loaded, chosen, rollouts)
    _show(chosen, records, out, as_json)


def _measure(config: Config, chosen: Chosen, rollouts: Path | None) -> list[dict[str, Any]]:
    """Returns one record per split, and its answers in the folder `rollouts`."""
    from rich.console import Console

    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.rollout.group_source import check_score_errors
    from vlrl.store import RunFolder, plain
    from vlrl.tools.measure import measure

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


def _show(chosen: Chosen, records: Sequence[Mapping[str, Any]], out: Path | None, as_json: bool) -> None:
    """Prints the records, and writes them to `out`; on rank 0."""
    from vlrl.distributed import comm
    from vlrl.store.files import write_text

    if not comm.is_main():
        return
    if out:
        write_text(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    if as_json:
        emit({"model": chosen.name, "step": chosen.step, "evaluations": records})
        return
    from rich.console import Console

    Console(highlight=False).print(_table(chosen, records))


def _table(chosen: Chosen, records: Sequence[Mapping[str, Any]]) -> Any:
    """Returns every metric of every split with its interval, one row each."""
    from rich.text import Text

    title = Text(f"{chosen.name} after {chosen.step} steps" if chosen.step else chosen.name)
    shown = table("split", "metric", "n", "mean", "interval", left=2, title=title, min_width=50,
                  caption=Text("[low, high] = 95 % interval over the samples", "dim"))
    for record in records:
        left_out = f" ({record['rejected']} left out)" if record["rejected"] else ""
        for name, value in record.items():
            if name in _NOT_METRICS or "/ci95_" in name or not isinstance(value, (int, float)):
                continue
            low, high = (record.get(f"{name}/ci95_{end}") for end in ("low", "high"))
            interval = "" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"
            cells = (record["split"], name, f"{record['n']}{left_out}", f"{value:.3f}", interval)
            shown.add_row(*(Text(str(cell)) for cell in cells))
    return shown


# --- export and tiny --------------------------------------------------------------------------------------------------


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", show_default=False,
                                           help="A run folder (its newest checkpoint) or a checkpoint folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", show_default=False,
                                      help="A new or empty folder, e.g. models/mine.")],
    dtype: Annotated[str | None, typer.Option(
        metavar="bfloat16|float16|float32", show_default=False,
        help="Type of the weights. Default: that of an adapter's base model, or the widest of a whole model.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Keep an adapter as it is instead of merging it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a model folder for from_pretrained, vLLM or the hub; an adapter is merged into its base.

    What was written is loaded again, and log-probabilities on a prompt with an image are compared.
    """
    from rich.console import Console

    from vlrl.store.checkpoint import find

    find(source)  # before what takes time to import
    from vlrl.tools.export import export as write

    with Console(stderr=True).status(f"exporting {source}"):
        done = write(source, out, dtype, adapter)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        emit({**asdict(done), "source": str(done.source), "folder": str(done.folder), "difference": done.difference})
    else:
        _tell_exported(done)


def _tell_exported(done: Exported) -> None:
    what = "adapter" if done.adapter else "model"
    typer.echo(f"{done.source} -> {done.folder}: {what} of {done.parameters:,} {done.dtype} parameters, "
               f"{done.bytes / 1e6:,.1f} MB in {len(done.files)} files")
    if done.tokens:
        typer.echo(f"{'token':<16}{'checkpoint':>12}{'exported':>12}   log-probabilities")
        for token, before, after in zip(done.tokens, done.before, done.after, strict=True):
            typer.echo(f"{printable(token):<16}{before:>12.5f}{after:>12.5f}")
        typer.echo(f"largest difference {done.difference:.1e}; weights and prompt tokens read back are those saved")
    from vlrl import _torchvision

    if _torchvision.needed():
        typer.echo("note: torch is a CPU build here and torchvision is not, so plain transformers fails to load the "
                   "processor (operator torchvision::nms does not exist): import vlrl first, or install both from "
                   "https://download.pytorch.org/whl/cpu")


def extrapolate(
    earlier: Annotated[Path, typer.Argument(metavar="A", show_default=False,
                                            help="The earlier run folder, checkpoint or model folder.")],
    later: Annotated[Path, typer.Argument(metavar="B", show_default=False, help="The later one, of the same model.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", show_default=False,
                                      help="A new or empty folder, e.g. models/beyond.")],
    k: Annotated[float, typer.Option("-k", metavar="NUMBER", help="How far beyond B, in steps from A to B.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Write the weights B + k (B - A): further along the way that training went from one checkpoint to another.

    Full models and adapters. Config and processor are those of B. k=0 is B itself, -0.5 the average of both.
    """
    from vlrl.tools.extrapolate import extrapolate as write

    done = write(earlier, later, out, k)
    if as_json:
        emit({name: str(v) if isinstance(v, Path) else v for name, v in asdict(done).items()})
    else:
        typer.echo(f"{done.later} + {done.k:g} * (it - {done.earlier}) -> {done.folder}: {done.moved} of "
                   f"{done.tensors} weights differ, the two are {done.distance:.3g} apart")


def tiny(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", show_default=False,
                                      help="A new or empty folder, e.g. models/tiny.")],
    family: Annotated[str, typer.Option(metavar="NAME", help=f"Architecture: {', '.join(FAMILIES)}.")] = DEFAULT,
    random: Annotated[bool, typer.Option("--random", help="Random float32 weights: nothing is learned.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N",
                                      help="Of the weights and of the examples, e.g. 1.")] = 0,
    max_pixels: Annotated[int | None, typer.Option(
        metavar="N", min=1, show_default=False,
        help="With --random: the processor's limit for one image, e.g. 16384. Default: the family's own.")] = None,
) -> None:
    """Build a tiny vision-language model (about 1 M parameters) with a real architecture and processor.

    Without --random it is taught to locate drawn shapes, to read digits, to
    answer questions about drawn clips and to plan simulated drives, carelessly
    on purpose, and saved in bfloat16: a start that RL improves on a CPU in
    minutes. Needs no network, but vlrl[demo,driving].
    """
    if family not in FAMILIES:
        raise ConfigError(f"--family {family!r} is not known.{did_you_mean(family, FAMILIES)} "
                          f"Known: {', '.join(FAMILIES)}.")
    if not _is_free(out):
        raise ConfigError(f"{out} is not an empty folder, and nothing is overwritten: name another, or remove it first")
    if max_pixels is not None and not random:
        raise typer.BadParameter("goes with --random; a taught model has its family's own limit",
                                 param_hint="--max-pixels")
    from vlrl.tools import tiny_models as models

    if random:
        models.build(family, out, seed=seed, max_pixels=max_pixels)
    else:
        from vlrl.tools import cold_start

        cold_start.run(family, out, seed)
    typer.echo(f"{out}: sha256 {models.weights_sha256(out)}")
