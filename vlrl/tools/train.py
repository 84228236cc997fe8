"""Trains a run to its last step: `vlrl.train` in Python, and the implementation of `vlrl train` and `vlrl sft`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlrl.config import Config, config_of
from vlrl.config.algo import SUPERVISED
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.store import RunFolder
from vlrl.tools.experiments.report import print_summary, summary_table

if TYPE_CHECKING:
    from vlrl.tools.run import Run


def train(config: str | Path | Config | Mapping[str, Any], /, **settings: Any) -> Run:
    """Trains as `vlrl train` does, resuming from the newest checkpoint in run.dir, and returns the finished run.

    `config` is the path of a file, a Config or a dictionary; `settings` override it as in load_config. If algo.loss is
    `supervised`, training is that of `vlrl sft`. If the config has `stages`, all of them are run, and the run of the
    last stage that trained is returned. Raises ConfigError if a dictionary or Config has no run.dir, and
    KeyboardInterrupt if training is stopped before its last step."""
    from vlrl.tools.run import load_run

    resolved = config_of(config, **settings)
    if not resolved.run.dir:
        raise ConfigError("run.dir is empty, and there is no config file to name the run after. Set run.dir, e.g. "
                          "run={'dir': 'runs/mine'}")
    return load_run(run_to_end(resolved, resolved.algo.loss.name in SUPERVISED))


def run_to_end(config: Config, supervised: bool = False) -> Path:
    """Trains a config, or all its stages, and prints the summary on rank 0. With `supervised`, trains a config without
    stages as `vlrl sft` does. Returns the folder of the last run.

    Raises KeyboardInterrupt if training is stopped before its last step."""
    if config.stages:
        return _run_stages(config)
    if supervised:
        from vlrl.training import sft

        session = sft.train(config)
    else:
        from vlrl.training import loop

        session = loop.train(config)
    if session.done < session.config.steps:
        raise KeyboardInterrupt(f"stopped after {session.done} of {session.config.steps} steps; the same call resumes "
                                f"from the checkpoint in {session.folder.checkpoints}")
    if comm.is_main():
        print_summary(session.folder, session.done, session.progress.print)
    return session.folder.path


def _run_stages(config: Config) -> Path:
    from vlrl.tools.stages.run import train_stages

    outcome = train_stages(config, lambda words: print(words, flush=True))
    if not outcome.finished:
        raise KeyboardInterrupt(f"stopped in stage {outcome.stage!r}; the same call resumes in this stage")
    if comm.is_main():
        from rich.console import Console

        for stage in config.stages:
            run = RunFolder(outcome.folder / stage.name)
            if run.evals():
                Console().print(f"stage {stage.name}", summary_table(run))
        print(f"model          {outcome.model}")
    return last_run(outcome.folder)


def last_run(folder: Path) -> Path:
    """The run folder of the last stage that has a run; for a stage of rounds, the run folder of its last round. If
    there are no stages, `folder` itself."""
    from vlrl.tools.stages.stage_list import read_stages

    known = read_stages(folder)
    for stage in reversed(known.folders if known else ()):
        inner = last_run(stage)
        if (inner / "metrics.jsonl").exists():
            return inner
    return folder
