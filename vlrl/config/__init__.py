"""Settings of a run: typed names and defaults (schema), read from YAML files and `key=value` words (loading).

Variants are chosen by name, or as anyone's path/file.py:name or module:name (registry.resolve).
"""

from vlrl.config.loading import (
    describe,
    differences,
    dump,
    load,
    merge,
    refuse_other_kind,
    shipped,
    shipped_configs,
    validate,
)
from vlrl.config.schema import Config

__all__ = ["Config", "describe", "differences", "dump", "load", "merge", "refuse_other_kind", "shipped",
           "shipped_configs", "validate"]
