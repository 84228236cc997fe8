"""Variants by name: a table entry, or anyone's `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from vlrl.errors import ConfigError, did_you_mean


def resolve(setting: str, name: str, table: Mapping[str, Any]) -> Any:
    """The object that `name` stands for. Raises ConfigError naming `setting` when there is none."""
    if name in table:
        return table[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{setting}={name!r} is not known.{did_you_mean(name, table)} "
                          f"Known: {', '.join(table)}; your own: module:name.")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting}={name!r}: {error}") from None
