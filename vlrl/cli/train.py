"""`vlrl train` and `sft`."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load
from vlrl.errors import ConfigError

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


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    app.command(epilog=examples(*(line.replace("COMMAND", "vlrl train") for line in _TRAIN)))(train)
    app.command(epilog=SFT_EXAMPLES)(sft)


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
        from vlrl.training.sft import supervised_config

        dryrun.run(supervised_config(loaded), as_json)
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
        outcome = stages.train_stages(config, lambda words: print(words, flush=True))
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
