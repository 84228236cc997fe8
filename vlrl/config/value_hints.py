"""Hints for values of a wrong type, e.g. a class in place of its name or a number in place of a name."""

import inspect
from collections.abc import Mapping
from typing import Any

from vlrl.config.presets import preset_file

_PRESETS = {"algo": "algorithms", "curriculum": "curricula"}
"""Section of the config -> folder in configs/ with presets for this section."""


def value_hint(setting: str, value: Any) -> str:
    """Says what to write instead of the invalid value `value` of the setting `setting`; "" if no hint applies."""
    if inspect.isclass(value) or inspect.isfunction(value):
        return (f"give its import name: {setting}={value.__module__}:{value.__qualname__}, or path/file.py:"
                f"{value.__name__}")
    if setting in ("data.train", "data.heldout") and not isinstance(value, (str, list, tuple, Mapping)):
        return ("give the name of a file, or of a data set on the Hub. A datasets.Dataset is an argument of its own: "
                "vlrl.train(data=dataset, ...)")
    if setting == "algo.kl" and isinstance(value, (int, float)):
        return f"this setting names the estimator; set its coefficient with algo.kl_coef={value}"
    if isinstance(value, str) and setting in ("model", "task", "engine", "curriculum"):
        return f"write {setting}.name={value}"
    if isinstance(value, Mapping) and value and all(v is None for v in value.values()):
        text = "{" + ", ".join(map(str, value)) + "}"
        return f"YAML reads {text} as a mapping: put it in quotes, '{setting}=\"{text}\"'"
    return ""


def preset_hint(setting: str, name: str) -> str:
    """Text to append to a message about an unknown function: `" There is a preset of that name:
    extends=algorithms/grpo.yaml."` if a preset for the section of `setting` is called `name`, else ""."""
    folder = _PRESETS.get(setting.partition(".")[0], "")
    file = f"{folder}/{name}.yaml"
    known = folder and name.isidentifier() and preset_file(file)
    return f" There is a preset of that name: extends={file}." if known else ""
