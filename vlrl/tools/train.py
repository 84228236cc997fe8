"""Trains a run to its last step: `vlrl.train` in Python, and the implementation of `vlrl train` and `vlrl sft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlrl.config import Config, config_of
from vlrl.config.algo import SUPERVISED
from vlrl.errors import ConfigError
from vlrl.monitoring.progress import Progress
from vlrl.store import RunFolder
from vlrl.tools.experiments.report import print_summary, summary_table
from vlrl.training.start import Start, check_start

if TYPE_CHECKING:
    from vlrl.tools.run import Run


def train(config: str | Path | Config | Mapping[str, Any] | None = None, /, *, model: Any = None, data: Any = None,
          reward: Any = None, prompt: str | None = None, heldout: Any = None, callbacks: Sequence[Any] = (),
          **settings: Any) -> Run:
    """Trains as `vlrl train` does, resuming from the newest checkpoint in run.dir, and returns the finished run.

        train("configs/quickstart.yaml", steps=20)
        train(model="Qwen/Qwen2.5-VL-3B-Instruct", data=rows, reward=right, prompt="{question}", steps=200)

    `config` is the path of a file, a Config or a dictionary; `settings` override it as in load_config. The other form
    needs no config:

    - model: Hub name or folder; by default the embedded model.
    - data: file, Hub name, list of dictionaries, datasets.Dataset or other iterable of rows. A row's `image`, `images`
    or `video` is a PIL picture, a path or bytes.
    - reward: `f(completion, row) -> float | bool | None | dict`, a list of functions, or {part: function}; functions
    with the parameters of TRL or EasyR1 work too (services/functions.py).
    - prompt: template with columns in braces; by default the row's `prompt` or `question`.
    - heldout: rows to evaluate on, or the share of `data` to hold out (0.1).
    - task: a name, or a class, whose source is kept in the run folder.
    - callbacks: objects with some of the methods of vlrl.Callback, or functions (run, step, metrics).

    If algo.loss is `supervised`, training is that of `vlrl sft`. If the config has `stages`, all of them are run, and
    the run of the last stage that trained is returned. Raises ConfigError if a dictionary or Config has no run.dir, and
    KeyboardInterrupt if training is stopped before its last step."""
    from vlrl.tools.run import load_run
    from vlrl.tools.start.settings import settings_of, with_task_named
    from vlrl.training.callbacks import checked

    settings, config = with_task_named(settings), with_task_named(config) if isinstance(config, Mapping) else config
    sections = {name: value for name, value in (("model", model), ("data", data)) if _is_section(value)}
    model, data = (None if name in sections else value for name, value in (("model", model), ("data", data)))
    if config is None or any(value is not None for value in (model, data, reward, prompt, heldout)):
        settings |= sections
        if config is None and isinstance(settings.get("task"), str):  # `task=NAME` would drop prompt and reward
            settings["task"] = {"name": settings["task"]}
        config = settings_of(config=config, model=model, data=data, reward=reward, prompt=prompt, heldout=heldout,
                             settings=settings)
    else:
        settings |= sections
    resolved = config_of(config, **settings)
    if not resolved.run.dir:
        raise ConfigError("run.dir is empty, and there is no config file to name the run after. Set run.dir, e.g. "
                          "run={'dir': 'runs/mine'}")
    return load_run(run_to_end(resolved, resolved.algo.loss.name in SUPERVISED, checked(callbacks)))


def _is_section(value: Any) -> bool:
    """Whether an argument `model` or `data` is a section of settings, not the name of a model, or rows."""
    return isinstance(value, Mapping) and not any(hasattr(one, "column_names") for one in value.values())


def run_to_end(config: Config, supervised: bool = False, callbacks: Sequence[Any] = ()) -> Path:
    """Trains a config, or all its stages, and prints the summary on rank 0. With `supervised`, trains a config without
    stages as `vlrl sft` does. `callbacks` as in training/callbacks.py. Returns the folder of the last run.

    Raises KeyboardInterrupt if training is stopped before its last step."""
    if config.stages:
        if callbacks:
            raise ConfigError("callbacks belong to one run, and this config has stages: train the stages one by one, "
                              "or remove them with stages=[]")
        return _run_stages(config)
    start = _checked(config, supervised)  # before torch is imported
    given: dict[str, Any] = {"start": start}
    if callbacks:
        from vlrl.training.session import Session

        given["make_session"] = partial(Session, own_callbacks=callbacks)
    if supervised:
        from vlrl.training import sft

        session = sft.train(config, **given)
    else:
        from vlrl.training import loop

        session = loop.train(config, **given)
    if not session.complete:
        raise KeyboardInterrupt(f"stopped after {session.done} of {session.config.steps} steps; the same call resumes "
                                f"from the checkpoint in {session.folder.checkpoints}")
    if _is_main():
        print_summary(session.folder, session.done, session.progress.print)
    return session.folder.path


def _checked(config: Config, supervised: bool) -> Start | None:
    """The result of check_start, whose warnings are printed here and not again when the model is loaded."""
    start = check_start(config, supervised)
    for warning in start.warnings if start else ():
        Progress(config.steps, 0).print(f"warning: {warning}")
    return replace(start, warnings=()) if start else None


def _is_main() -> bool:
    from vlrl.distributed import comm  # imports torch, so not before check_start

    return comm.is_main()


def _run_stages(config: Config) -> Path:
    from vlrl.tools.stages.run import train_stages

    outcome = train_stages(config, lambda words: print(words, flush=True))
    if not outcome.finished:
        raise KeyboardInterrupt(f"stopped in stage {outcome.stage!r}; the same call resumes in this stage")
    if _is_main():
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
