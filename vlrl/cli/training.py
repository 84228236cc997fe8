"""`vlrl train`, `sft`, `extrapolate` and `tiny`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, is_free, load
from vlrl.errors import ConfigError, did_you_mean
from vlrl.tools.tiny.families import DEFAULT, FAMILIES

if TYPE_CHECKING:
    from vlrl.config.schema import Config

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
EXTRAPOLATE_EXAMPLES = examples(
    "vlrl extrapolate runs/lora/checkpoints/step-000050 runs/lora/checkpoints/step-000100 -o models/beyond",
    "vlrl extrapolate runs/a/checkpoints/step-000100 runs/a -k 0.5 -o models/half",
    "Then evaluate it, and keep it if it is better:",
    "vlrl eval configs/quickstart.yaml --model models/half")
TINY_EXAMPLES = examples(
    "vlrl tiny --out models/tiny",
    "vlrl tiny --family qwen2_5_vl --out /tmp/random --random",
    "vlrl train configs/quickstart.yaml model.name=models/tiny")


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command(epilog=examples(*(line.replace("COMMAND", "vlrl train") for line in _TRAIN)))(train)
    app.command(epilog=SFT_EXAMPLES)(sft)
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
    """Train by reinforcement learning with verifiable rewards.

    A config with `stages` runs them in turn: supervised, RL, rounds of own answers, merges (docs/stages.md).
    """
    loaded = load(config, settings)
    if dry_run and profile:
        raise typer.BadParameter("measures a run, which --dry-run does not start; give one of the two",
                                 param_hint="--profile")
    if dry_run:
        from vlrl.cli import dryrun

        (dryrun.run_stages if loaded.stages else dryrun.run)(loaded, as_json)
        return
    if profile and loaded.stages:
        raise ConfigError("--profile measures one run, and this config has stages: take them away (stages=[])")
    if profile:
        _profile(loaded, profile_steps, as_json)
        return
    if as_json:
        raise typer.BadParameter("goes with --dry-run or --profile; a run writes JSON to metrics.jsonl and eval.jsonl "
                                 "of its folder", param_hint="--json")

    if loaded.stages:
        _run_stages(loaded)
        return

    def run(loaded: Config) -> Any:
        from vlrl.training.loop import train as run_training

        return run_training(loaded)

    _finish(loaded, run)


def _profile(config: Config, steps: int, as_json: bool) -> None:
    """Prints where the time of a step goes; on rank 0."""
    from rich.console import Console

    from vlrl.config.registry import prints_aside
    from vlrl.distributed import comm
    from vlrl.tools.machine.profiler import notes, profile, render

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
    if loaded.stages:
        raise ConfigError("this config has stages, which vlrl train runs; for supervised fine-tuning alone take them "
                          "away (stages=[])")
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


def _run_stages(config: Config) -> None:
    """Runs all stages and prints the summary of each; leaves with 130 where one was stopped."""
    from vlrl.distributed import comm
    from vlrl.store import RunFolder
    from vlrl.tools.experiments.report import summary_table
    from vlrl.tools.stages import run as stages

    try:
        outcome = stages.train(config, lambda words: print(words, flush=True))
    except KeyboardInterrupt as stop:
        print("stopped.", *getattr(stop, "__notes__", ["The same command goes on from there."]), file=sys.stderr)
        raise typer.Exit(130) from None
    if not outcome.finished:
        raise typer.Exit(130)
    if comm.is_main():
        from rich.console import Console

        for stage in config.stages:
            run = RunFolder(outcome.folder / stage.name)
            if run.evals():
                Console().print(f"stage {stage.name}", summary_table(run))
        print(f"model          {outcome.model}")


def _finish(config: Config, run: Callable[[Config], Any]) -> None:
    """Runs and prints the summary on rank 0; leaves with 130 where the run was stopped before its last step."""
    try:
        session = run(config)
    except KeyboardInterrupt as stop:
        notes = getattr(stop, "__notes__", ["The same command goes on from the last checkpoint."])
        print("stopped.", *notes, file=sys.stderr)
        raise typer.Exit(130) from None
    from vlrl.distributed import comm
    from vlrl.tools.experiments.report import print_summary

    if session.done < session.config.steps:
        raise typer.Exit(130)
    if comm.is_main():
        print_summary(session.folder, session.done, session.progress.print)
    raise typer.Exit


# --- extrapolate and tiny ---------------------------------------------------------------------------------------------


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
    from vlrl.tools.stages.extrapolate import extrapolate as write

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
    episodes: Annotated[bool, typer.Option("--episodes", help="The embedded model, taught to call a tool and to act "
                                           "over several turns (about five minutes).")] = False,
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
    if not is_free(out):
        raise ConfigError(f"{out} is not an empty folder, and nothing is overwritten: name another, or remove it first")
    if episodes and (random or family != DEFAULT):
        raise typer.BadParameter("goes on from the embedded model: neither --random nor --family goes with it",
                                 param_hint="--episodes")
    if max_pixels is not None and not random:
        raise typer.BadParameter("goes with --random; a taught model has its family's own limit",
                                 param_hint="--max-pixels")
    from vlrl.tools.tiny import models

    if random:
        models.build(family, out, seed=seed, max_pixels=max_pixels)
    elif episodes:
        from vlrl.tools.tiny import episode_start

        episode_start.run(out, seed)
    else:
        from vlrl.tools.tiny import cold_start

        cold_start.run(family, out, seed)
    typer.echo(f"{out}: sha256 {models.weights_sha256(out)}")
