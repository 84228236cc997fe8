"""Settings of a run: typed names and defaults (schema), read from YAML files and `key=value` words (loading).

Variants are chosen by name, or as anyone's path/file.py:name or module:name (registry.resolve).
"""

from vlrl.config.loading import (
    config_of,
    derived,
    describe,
    differences,
    lasting,
    load,
    load_config,
    located,
    refuse_other_kind,
    shipped,
    shipped_configs,
    stages_of,
    validate,
)
from vlrl.config.merging import merge
from vlrl.config.plain import dump
from vlrl.config.schema import Config

__all__ = ["Config", "config_of", "derived", "describe", "differences", "dump", "lasting", "load", "load_config",
           "located", "merge", "refuse_other_kind", "shipped", "shipped_configs", "stages_of", "validate"]
