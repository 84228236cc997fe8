"""Converts settings to plain values and to YAML. The YAML of a run (config.yaml) is read back as the same settings."""

import datetime
import numbers
import os
from collections.abc import Mapping, Set
from typing import Any

import yaml
from pydantic import BaseModel

from vlrl.errors import ConfigError


def plain(value: Any, name: str = "") -> Any:
    """Converts nested settings to values that YAML can hold: paths become strings, NumPy numbers become Python numbers.
    For a value of any other type, raises ConfigError naming the setting. `name` is the setting of `value`."""
    if isinstance(value, BaseModel):
        return plain(value.model_dump(), name)
    if isinstance(value, Mapping):
        return {plain(key, name): plain(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{name}.{i}") for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, bytes, Set, datetime.date)):
        return value
    if isinstance(value, (str, os.PathLike)):
        return str(os.fspath(value))
    if isinstance(value, (numbers.Integral, numbers.Real)):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ConfigError(f"{name}={value!r}: a setting must be a string, a number, true, false, null, or a list or "
                      f"dictionary of these, not a {type(value).__name__}")


def dump(config: BaseModel) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(plain(config), sort_keys=False)
