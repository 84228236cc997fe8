"""`vlrl train` and `vlrl sft`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, emit, examples, load
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.config.schema import Config

_PANEL = "Without a config file"

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


MaybeConfig = Annotated[str | None, typer.Argument(metavar="[CONFIG]", show_default=False, help=(
    "A YAML file, e.g. configs/quickstart.yaml. Not needed with --data."))]
DataFile = Annotated[str | None, typer.Option("--data", metavar="FILE", show_default=False, rich_help_panel=_PANEL,
                                              help=(
    "Rows to train on: a file, a folder, or a data set of the Hub (org/name@train)."))]
Reward = Annotated[list[str] | None, typer.Option("--reward", metavar="FILE.py:F", show_default=False,
                                                  rich_help_panel=_PANEL, help=(
    "Reward function f(completion, row) -> number; repeat the option for several. NAME=FILE.py:F names the reward "
    "part."))]
ModelName = Annotated[str | None, typer.Option("--model", metavar="NAME", show_default=False, rich_help_panel=_PANEL,
                                               help="Hub name or folder; default: the embedded tiny model.")]
Prompt = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", show_default=False, rich_help_panel=_PANEL,
                                            help="Prompt template with columns in braces, e.g. \"{question} Answer "
                                                 "with one word.\" Default: the column prompt or question.")]
Heldout = Annotated[str | None, typer.Option("--heldout", metavar="FILE", show_default=False, rich_help_panel=_PANEL,
                                             help="Rows to evaluate on, or the share of --data to hold out; default: "
                                                  "0.1.")]
TaskName = Annotated[str | None, typer.Option("--task", metavar="NAME", show_default=False, rich_help_panel=_PANEL,
                                              help="A built-in task, e.g. grounding, or file.py:Class, in place of or "
                                                   "with --reward.")]
SaveConfig = Annotated[Path | None, typer.Option("--save-config", metavar="FILE", show_default=False,
                                                 rich_help_panel=_PANEL, help=(
    "Also write these options and settings as a config file."))]


@examples(
    "vlrl train configs/quickstart.yaml",
    "vlrl train --data rows.jsonl --reward rewards.py:right --prompt \"{question}\"",
    "vlrl train configs/quickstart.yaml --dry-run",
    "vlrl train configs/quickstart.yaml --profile",
    "vlrl train configs/quickstart.yaml steps=200 train.lr=1e-4 run.dir=runs/more",
    "torchrun --nproc_per_node 2 train.py configs/quickstart.yaml",
    "The first takes five minutes on a laptop CPU. A run resumes from its newest checkpoint: start the same command "
    "again after Ctrl-C or a crash. resume=never starts over (the old run folder is renamed), resume=must fails "
    "without a checkpoint.",
    "Settings to change first: train.lr, rollout.group_size, steps (or epochs). vlrl train --settings lists all, "
    "--settings WORD explains those with the word.")
def train(config: MaybeConfig = None, settings: Words = None, data: DataFile = None, reward: Reward = None,
          model: ModelName = None, prompt: Prompt = None, heldout: Heldout = None, task: TaskName = None,
          save_config: SaveConfig = None, dry_run: IsDryRun = False, profile: IsProfile = False,
          profile_steps: ProfileSteps = 3, as_json: AsJson = False, show: ShowSettings = False) -> None:
    """Train by reinforcement learning with verifiable rewards, from a config file or from --data and --reward.

    If the config has `stages`, they are run one after the other: supervised training, RL, rounds of rejection sampling,
    merges (docs/stages.md)."""
    if show:
        from vlrl.cli.settings_list import print_settings
        print_settings([word for word in (config, *(settings or ())) if word and not word.endswith(".yaml")])
        return
    given = {"model": model, "data": data, "reward": reward, "prompt": prompt, "heldout": heldout, "task": task}
    loaded = _loaded(config, settings or [], {name: value for name, value in given.items() if value}, save_config)
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


def _loaded(config: str | None, words: list[str], given: dict[str, Any], save: Path | None) -> Config:
    """The config of a file, or of the options `given` (--data ...) laid on the file, if there is one. Writes it to
    `save`, if that is not None."""
    if not given and save is None:
        if config is None:
            raise typer.BadParameter("Missing argument 'CONFIG': name a config, e.g. quickstart.yaml, or give --data "
                                     "and --reward")
        return load(config, words)
    from vlrl.config.loading import config_of, read_words
    from vlrl.tools.start.settings import settings_of, write_config
    if config is not None and "=" in config and not Path(config).exists():
        config, words = None, [config, *words]
    if config is None and "data" not in given and "task" not in given:
        raise ConfigError("--data is missing: name the file with the rows to train on, or a config")
    heldout, task = given.pop("heldout", None), given.pop("task", None)
    given["reward"] = _rewards(given.get("reward"))
    settings = read_words([*words, *([f"task.name={task}"] if task else [])])
    tree = settings_of(config=config, heldout=_share(heldout), settings=settings, **given)
    loaded = config_of(tree, **settings)
    if save is not None and os.environ.get("RANK", "0") == "0":
        write_config(tree, settings, save)
        typer.echo(f"wrote {save}; vlrl train {save} does the same")
    return loaded


def _rewards(given: list[str] | None) -> Any:
    named = [one.partition("=")[::2] if "=" in one.partition(":")[0] else ("", one) for one in given or ()]
    if any(name for name, _ in named):
        return {name or place.rpartition(":")[2]: place for name, place in named}
    return [place for _, place in named] or None


def _share(text: str | None) -> Any:
    try:
        return float(text) if text and not Path(text).exists() else text
    except ValueError:
        return text


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
