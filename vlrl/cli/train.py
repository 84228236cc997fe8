"""`vlrl train` and `vlrl sft`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.config.schema import Config


ShowSettings = Annotated[bool, typer.Option("--settings", help="List the settings with defaults and meaning, the "
                                            "important ones first; --settings WORD: those whose name or description "
                                            "contains the word.")]
IsDryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything except the training itself, and show one "
                                                          "sample with its prompt, perfect answer and reward. No "
                                                          "weights are read and nothing is written.")]
IsProfile = Annotated[bool, typer.Option("--profile", help="Measure the time per phase of a few steps, in a separate "
                                                           "folder (run.dir with -profile appended); nothing is "
                                                           "evaluated or saved.")]
ProfileSteps = Annotated[int, typer.Option("--profile-steps", metavar="N", min=1,
                                           help="Number of steps that --profile measures, after one warm-up step.")]


@examples(
    "vlrl train configs/quickstart.yaml",
    "vlrl train configs/quickstart.yaml --dry-run",
    "vlrl train configs/quickstart.yaml --profile",
    "vlrl train configs/quickstart.yaml steps=200 train.lr=1e-4 run.dir=runs/more",
    "torchrun --nproc_per_node 2 train.py configs/quickstart.yaml",
    "The first takes five minutes on a laptop CPU. A run resumes from its newest checkpoint: start the same command "
    "again after Ctrl-C or a crash. resume=never starts over (the old run folder is renamed), resume=must fails "
    "without a checkpoint.",
    "Settings to change first: train.lr, rollout.group_size, steps (or epochs). vlrl train --settings lists all, "
    "--settings WORD explains those with the word.")
def train(config: ConfigPath = "", settings: Words = None, dry_run: IsDryRun = False, profile: IsProfile = False,
          profile_steps: ProfileSteps = 3, as_json: AsJson = False, show: ShowSettings = False) -> None:
    """Train by reinforcement learning with verifiable rewards.

    If the config has `stages`, they are run one after the other: supervised training, RL, rounds of rejection sampling,
    merges (docs/stages.md)."""
    if show:
        from vlrl.cli.settings_list import print_settings
        print_settings([word for word in (config, *(settings or ())) if word and not word.endswith(".yaml")])
        return
    if not config:
        raise typer.BadParameter("Missing argument 'CONFIG': name a config, e.g. quickstart.yaml")
    loaded = load(config, settings)
    if dry_run and profile:
        raise typer.BadParameter("measures a run, which --dry-run does not start; give one of the two",
                                 param_hint="--profile")
    if dry_run:
        from vlrl.cli import dryrun
        (dryrun.run_stages if loaded.stages else dryrun.run)(loaded, as_json)
        return
    if profile and loaded.stages:
        raise ConfigError("--profile measures one run, and this config has stages: remove them with stages=[]")
    if profile:
        _profile(loaded, profile_steps, as_json)
        return
    if as_json:
        raise typer.BadParameter("needs --dry-run or --profile; a run writes JSON to metrics.jsonl and eval.jsonl "
                                 "of its folder", param_hint="--json")
    _run(loaded)


def _profile(config: Config, steps: int, as_json: bool) -> None:
    """Measures `steps` training steps and prints the time per phase, on rank 0."""
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


@examples(
    "vlrl sft configs/quickstart.yaml train.lr=1e-3 steps=100 run.dir=runs/sft",
    "RL from there:",
    "vlrl train configs/quickstart.yaml model.name=runs/sft")
def sft(
    config: ConfigPath,
    settings: Words = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything without training: settings, data, one "
                                                            "rendered prompt with its answer, and memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Supervised fine-tuning on a task's own data: each row's `solution`, or the task's perfect answer.

    Takes the config of an RL run; its sampling settings are ignored."""
    loaded = load(config, settings)
    if loaded.stages:
        raise ConfigError("this config has stages, and only vlrl train runs stages. Use vlrl train, or remove the "
                          "stages with stages=[]")
    if dry_run:
        from vlrl.cli import dryrun
        from vlrl.training.sft import supervised_config
        dryrun.run(supervised_config(loaded), as_json)
        return
    if as_json:
        raise typer.BadParameter("needs --dry-run; a run writes JSON to metrics.jsonl and eval.jsonl of its folder",
                                 param_hint="--json")
    _run(loaded, supervised=True)


def _run(config: Config, supervised: bool = False) -> None:
    from vlrl.tools.train import run_to_end
    try:
        run_to_end(config, supervised)
    except KeyboardInterrupt as stop:
        if not stop.args:  # else the run has said how it was stopped
            notes = getattr(stop, "__notes__", ["The same command resumes from the last checkpoint."])
            print("stopped.", *notes, file=sys.stderr)
        raise typer.Exit(130) from None
