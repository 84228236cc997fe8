"""The settings of a run: typed names and defaults (schema), read from YAML files and `key=value` overrides (loading).

Functions and classes are chosen by name; user code is named path/file.py:name or module:name (registry.resolve)."""

from vlrl.config.loading import (
    config_of,
    derived,
    describe,
    differences,
    find_config,
    fixed_settings,
    load,
    load_config,
    refuse_other_kind,
    shipped,
    shipped_configs,
    stages_of,
    validate,
)
from vlrl.config.merging import merge
from vlrl.config.plain import dump
from vlrl.config.schema import Config

__all__ = [
    "Config",
    "config_of",
    "derived",
    "describe",
    "differences",
    "dump",
    "find_config",
    "fixed_settings",
    "load",
    "load_config",
    "merge",
    "refuse_other_kind",
    "shipped",
    "shipped_configs",
    "stages_of",
    "validate",
]
