"""A config's task without its model: for scoring, playing and checking. No torch, no network, no media file.

Only how the model writes boxes is asked of the model, and only by a task that converts one: its family's convention is
read from the `config.json` in its folder or in the local hub cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlrl import coordinates
from vlrl import task as tasks
from vlrl.data import make_sample
from vlrl.errors import ConfigError, DataError, TaskError, VlrlError, did_you_mean
from vlrl.files import read_json
from vlrl.formats import Source, canonical
from vlrl.mixture import Mixture
from vlrl.plugins import prints_aside
from vlrl.rowfiles import RowFiles
from vlrl.settings import Config, DataSettings, TaskSettings
from vlrl.task import Task
from vlrl.types import Sample


@prints_aside()
def make_task(config: Config) -> Task:
    """The configured task, or the mixture of `tasks`. With task.coordinates=auto its coordinates ask the model's family
    when they are used."""
    if not config.tasks:
        return _made(config, config.task, RowFiles.of(config.data))
    made: dict[str, Task] = {}
    for i, entry in enumerate(config.tasks):
        own = entry.data.model_dump(exclude_none=True)
        data = config.data.model_copy(update=own)
        try:
            made[entry.label] = _made(config, entry, RowFiles.of(data, own))
        except VlrlError as error:
            raise type(error)(f"tasks.{i} ({entry.label}): {error}") from error
    mixture = Mixture(made)
    mixture.seed, mixture.data = config.data.seed, config.data
    return mixture


def _made(config: Config, settings: TaskSettings, data: DataSettings) -> Task:
    own = settings.model_extra or {}
    task = tasks.load(settings.name, {**own, "combine": settings.combine, "rewards": settings.rewards})
    task.seed, task.data = data.seed, data
    task.override_outcome(config.curriculum.part, config.curriculum.pass_at)
    auto = settings.coordinates == "auto"
    task.coordinates = FamilyConvention(config.model.name) if auto else coordinates.make(settings.coordinates)
    return task


def settle_coordinates(task: Task, config: Config, convention: str) -> None:
    """Has a config's task, or each of its tasks, write boxes as the model's family does, where it is left at auto."""
    for settings, one in zip(config.each_task, task.members, strict=False):
        if settings.coordinates == "auto":
            one.coordinates = coordinates.make(convention)


class FamilyConvention(coordinates.Convention):
    """The convention of a model's family, looked up at the first use; a row's own `coordinates` needs none."""

    def __init__(self, model: str):
        self._model = model

    @property
    def convention(self) -> str:
        """One of coordinates.CONVENTIONS.

        Raises TaskError (scoring passes it on, and stores any other error as a reward of 0) when it cannot be known.
        """
        try:
            return family_convention(self._model)
        except ConfigError as error:
            raise TaskError(f"task.coordinates=auto: {error}. Set it, e.g. task.coordinates=norm1000, or give the rows "
                            "their own `coordinates`.") from None


@cache
def family_convention(model: str) -> str:
    """How the family of `model.name` writes boxes; ConfigError when its config is not on this machine."""
    from vlrl.families import family_of

    found = _model_config(model)
    for _ in range(8):  # an adapter names its base model, which may be an adapter
        if found is None:
            break
        if "model_type" in found:
            text = SimpleNamespace(**_fields(found.get("text_config")))
            return family_of(SimpleNamespace(**_fields(found), get_text_config=lambda text=text: text)).coordinates
        found = _model_config(str(found.get("base_model_name_or_path") or ""))
    raise ConfigError(f"model.name={model!r} is neither a model folder nor in the local hub cache, so how it writes "
                      "boxes is not known")


def sample_from(task: Task, row: Mapping[str, Any], root: Path) -> Sample:
    """A sample from a row in any format of `data.format`, for scoring: media files need not exist.

    A row whose media paths lead out of `root` gives a sample without media. Raises DataError naming the row.
    """
    rows = canonical(dict(row), task.data.format if task.data else "auto", Source(root=root))
    if len(rows) != 1:
        raise DataError(f"the sample stands for {len(rows)} rows; give one, as `vlrl data convert` writes them")
    try:
        return make_sample(task, rows[0], root)
    except DataError:
        outside = make_sample(task, rows[0], Path("/"))  # raises again unless the paths were what was wrong
        return Sample(id=outside.id, row=outside.row, prompt=outside.prompt)


def _model_config(name: str) -> dict[str, Any] | None:
    """config.json, or else adapter_config.json, of a model's folder or of its copy in the local hub cache."""
    if name.startswith("embedded/"):
        name = str(embedded(name))
    for file in ("config.json", "adapter_config.json"):
        path = Path(name, file) if os.path.isdir(name) else _cached(name, file)
        if path and (found := read_json(path)):
            return found
    return None


def embedded(name: str) -> Path:
    """The folder of a model that comes with the package; ConfigError when there is none of that name."""
    assets = Path(__file__).parent / "assets"
    folder = assets / name.removeprefix("embedded/")
    if not folder.is_dir():
        shipped = sorted(f"embedded/{p.name}" for p in assets.glob("*/"))
        raise ConfigError(f"model.name={name!r}: no such embedded model.{did_you_mean(name, shipped)} "
                          f"Shipped: {', '.join(shipped)}")
    return folder


def _cached(name: str, file: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(name, file)
    except ValueError:  # no name that the hub could have
        return None
    return Path(path) if isinstance(path, str) else None


def _fields(found: Any) -> dict[str, Any]:
    return {str(k): v for k, v in found.items() if k != "get_text_config"} if isinstance(found, Mapping) else {}
