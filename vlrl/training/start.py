"""The checks at the very start of a run: the model's name, the task, its rows, and the reward of a few answers.

They need neither torch nor the model, which take most of the time until the first step, so a mistake is reported within
seconds and before the run folder is made."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.data.samples import with_split
from vlrl.errors import ConfigError
from vlrl.models.names import check_model
from vlrl.store import RunFolder, checkpoint
from vlrl.task import Task, task_samples
from vlrl.task.services import LOGPROBS, SERVICES, drop_unserved_parts
from vlrl.training.build_task import make_task
from vlrl.types import Sample

_CHECKS = Table({"start": "vlrl.checks.preflight:check"})


@dataclass(frozen=True, eq=False)
class Start:
    """The task of a run and its training samples, checked."""

    task: Task
    samples: Sequence[Sample]
    warnings: Sequence[str]
    resumes: bool  # whether the rows were checked as those of a resumed run, whose errors are warnings


def check_start(config: Config, supervised: bool = False) -> Start | None:
    """Checks a run before anything slow is imported, and returns its task and samples. With `supervised`, rewards are
    not checked.

    None if the checks must wait until the processes of the run are connected: with several processes only one of them
    checks, and data sets on the Hub are first pinned to a commit in the run folder. Raises VlrlError with the mistakes
    that stop the run."""
    named = with_split([config.data, *(entry.data for entry in config.tasks)])
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") or named:
        return None
    resumes = config.resume != "never" and bool(checkpoint.all_checkpoints(RunFolder(config.run.dir).checkpoints))
    if not resumes:
        check_model(config.model)
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    task = make_task(config)
    samples = training_samples(task, config)
    offered = [*SERVICES] if supervised else (*LOGPROBS, *config.services.given)
    served = drop_unserved_parts(task, offered, samples)
    warnings = _CHECKS["start"](served, samples, config, not supervised, goes_on=resumes)
    return Start(task, samples, warnings, resumes)


def training_samples(task: Task, config: Config) -> Sequence[Sample]:
    """The training samples of the task. Raises ConfigError if there are none."""
    samples = task_samples(task, "train")
    if len(samples) == 0:
        raise ConfigError(f"task '{task.name}' has no training samples. Check that data.train={config.data.train!r} "
                          "names the right file")
    return samples
