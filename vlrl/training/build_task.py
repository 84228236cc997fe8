"""Builds a config's task without its model, for scoring, playing and checking. Needs no torch, network or media file.

Only the box convention depends on the model, and only for a task that converts boxes: it is read from the `config.json`
of the model's folder or of the local hub cache."""

from pathlib import Path

from vlrl import task as tasks
from vlrl.config.paths import folders_of_configs
from vlrl.config.registry import Table, prints_aside
from vlrl.config.schema import Config, DataSettings, EnvironmentSettings, TaskSettings
from vlrl.data import coordinates
from vlrl.data.samples import SPLITS
from vlrl.errors import VlrlError
from vlrl.models.model_config import FamilyConvention
from vlrl.task import Task
from vlrl.task.environment import check_unattached
from vlrl.task.row_files import RowFiles
from vlrl.training import sources

_BESIDE = Table({"environment": "vlrl.environments.external:attach",
                 "parts": "vlrl.services.extra_parts:with_extra_parts",
                 "pinned": "vlrl.data.sources.hub:pinned", "tasks": "vlrl.task.mixture:Mixture"})
"""Functions and classes that make_task needs for some configs: `environment.name`, `task.parts`, Hub data sets,
`tasks`. Imported on first use."""


@prints_aside()
def make_task(config: Config) -> Task:
    """Makes the task of a config, or the mixture of its `tasks`. With task.coordinates=auto, the model family is looked
    up when coordinates are first converted."""
    for folder in (*folders_of_configs(), *([Path(config.run.dir)] if config.run.dir else [])):
        sources.offer(folder)
    if not config.tasks:
        task = _single_task(config, config.task, RowFiles.of(_pinned(config.data, config)))
        _attach(task, config.environment)
        return task
    named_tasks: dict[str, Task] = {}
    for i, entry in enumerate(config.tasks):
        own = entry.data.model_dump(exclude_none=True)
        data = _pinned(config.data.model_copy(update=own), config)
        try:
            named_tasks[entry.label] = _single_task(config, entry, RowFiles.of(data, own))
        except VlrlError as error:
            raise type(error)(f"tasks.{i} ({entry.label}): {error}") from error
    mixture: Task = _BESIDE["tasks"](named_tasks)
    mixture.seed, mixture.data = config.data.seed, config.data
    _attach(mixture, config.environment)
    return mixture


def _attach(task: Task, settings: EnvironmentSettings) -> None:
    if settings.name:
        _BESIDE["environment"](task, settings)
    else:
        check_unattached(task, settings)


def _pinned(data: DataSettings, config: Config) -> DataSettings:
    """Returns the data settings, with each Hub data set pinned to the commit that an existing run folder records."""
    named = {split: name for split in SPLITS if "@" in (name := getattr(data, split))}
    return data.model_copy(update={split: _BESIDE["pinned"](name, config.run.dir) for split, name in named.items()})


def _single_task(config: Config, settings: TaskSettings, data: RowFiles) -> Task:
    own = settings.model_extra or {}
    task = tasks.load(settings.name, {**own, "combine": settings.combine, "rewards": settings.rewards},
                      lambda cls: _BESIDE["parts"](cls, settings.parts) if settings.parts else cls)
    task.seed, task.data = data.seed, data if data.format != "auto" else data.in_format(task.row_format)
    task.override_outcome(config.curriculum.part, config.curriculum.pass_at)
    auto = settings.coordinates == "auto"
    task.coordinates = FamilyConvention(config.model.name) if auto else coordinates.make(settings.coordinates)
    return task


def settle_coordinates(task: Task, config: Config, convention: str) -> None:
    """Sets the coordinate convention of each task that has task.coordinates=auto."""
    for settings, one in zip(config.each_task, task.members, strict=False):
        if settings.coordinates == "auto":
            one.coordinates = coordinates.make(convention)
