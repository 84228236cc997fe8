"""Reads facts from a model's config.json without torch: embedded models, and the box convention of a model's family."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlrl.data import coordinates
from vlrl.errors import ConfigError, TaskError, did_you_mean
from vlrl.store.files import read_json

ASSETS = Path(__file__).parents[1] / "assets"  # folder with the models that are shipped with the package


class FamilyConvention(coordinates.Convention):
    """The box convention of a model's family, found at first use. Not used for rows with a field `coordinates`."""

    def __init__(self, model: str):
        self._model = model

    @property
    def convention(self) -> str:
        """The name of the convention (in coordinates.CONVENTIONS). Raises TaskError if the family's convention is
        unknown. Scoring passes a TaskError on, but turns any other error into reward 0."""
        try:
            return family_convention(self._model)
        except ConfigError as error:
            raise TaskError(f"task.coordinates=auto: {error}. Set a convention, e.g. task.coordinates=norm1000, or "
                            "add a field `coordinates` to the rows.") from None


@cache
def family_convention(model: str) -> str:
    """The box convention of the model's family. Raises ConfigError if the model's config is not on this machine."""
    from vlrl.models.families import family_of

    config = _model_config(model)
    for _ in range(8):  # an adapter names its base model, which may be an adapter
        if config is None:
            break
        if "model_type" in config:
            text = SimpleNamespace(**_fields(config.get("text_config")))
            return family_of(SimpleNamespace(**_fields(config), get_text_config=lambda text=text: text)).coordinates
        config = _model_config(str(config.get("base_model_name_or_path") or ""))
    raise ConfigError(f"model.name={model!r} is neither a model folder nor in the local hub cache, so its box "
                      "convention is not known")


def embedded(name: str) -> Path:
    """Folder of the embedded model `name`, which is shipped with the package. Raises ConfigError if there is none."""
    folder = ASSETS / name.removeprefix("embedded/")
    if not (folder / "config.json").is_file():
        shipped = sorted(f"embedded/{p.parent.name}" for p in ASSETS.glob("*/config.json"))
        raise ConfigError(f"model.name={name!r}: no such embedded model.{did_you_mean(name, shipped)} "
                          f"Shipped: {', '.join(shipped)}")
    return folder


def _model_config(name: str) -> dict[str, Any] | None:
    if name.startswith("embedded/"):
        name = str(embedded(name))
    for file in ("config.json", "adapter_config.json"):
        path = Path(name, file) if os.path.isdir(name) else cached_file(name, file)
        if path and (config := read_json(path)):
            return config
    return None


def cached_file(name: str, file: str) -> Path | None:
    """Path of a file of the Hub model `name` in the local cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(name, file)
    except ValueError:  # no name that the hub could have
        return None
    return Path(path) if isinstance(path, str) else None


def _fields(config: Any) -> dict[str, Any]:
    return {str(k): v for k, v in config.items() if k != "get_text_config"} if isinstance(config, Mapping) else {}
