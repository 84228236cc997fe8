"""A whole run from Python: what `vlrl train` does, and the run that it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlrl.config import Config, config_of
from vlrl.config.algo import SUPERVISED
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.tools.experiments.report import print_summary
from vlrl.tools.run import Run, load_run
from vlrl.tools.stages import run as stages
from vlrl.tools.stages.stage_list import read_stages
from vlrl.training import loop, sft


def train(config: str | Path | Config | Mapping[str, Any], /, **settings: Any) -> Run:
    """Trains as `vlrl train` does, going on from a checkpoint in run.dir, and returns the finished run.

    `config` is a file's path, a Config or a dictionary, with `settings` laid on it as by load_config. One whose
    algo.loss is `supervised` trains as `vlrl sft` does; of one with `stages` all are run, and the run is that of the
    last that has steps. Raises ConfigError where a dictionary or Config names no
    run.dir, and KeyboardInterrupt where the run is stopped before its last step.
    """
    resolved = config_of(config, **settings)
    if not resolved.run.dir:
        raise ConfigError("run.dir='' and no config file gives it a name: set it, e.g. run={'dir': 'runs/mine'}")
    if resolved.stages:
        return _staged(resolved)
    run = sft.train if resolved.algo.loss.name in SUPERVISED else loop.train
    session = run(resolved)
    if session.done < session.config.steps:
        raise KeyboardInterrupt(f"stopped after {session.done} of {session.config.steps} steps; the same call goes on "
                                f"from the checkpoint in {session.folder.checkpoints}")
    if comm.is_main():
        print_summary(session.folder, session.done, session.progress.print)
    return load_run(session.folder.path)


def _staged(config: Config) -> Run:
    outcome = stages.train_stages(config)
    if not outcome.finished:
        raise KeyboardInterrupt(f"stopped in stage {outcome.stage!r}; the same call goes on there")
    return load_run(last_run(outcome.folder))


def last_run(folder: Path) -> Path:
    """Returns the run folder of the last stage that has one, of a round the round's; `folder` itself without any."""
    known = read_stages(folder)
    for place in reversed(known.folders if known else ()):
        inner = last_run(place)
        if (inner / "metrics.jsonl").exists():
            return inner
    return folder
