"""Turns validation errors into messages: what is wrong with a setting, and the remedy."""

import reprlib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from vlrl.config.base import Settings
from vlrl.config.other_names import similar_translation, translation, translations_below
from vlrl.config.schema import Config
from vlrl.config.sections import model_of
from vlrl.config.value_hints import value_hint
from vlrl.errors import did_you_mean

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 300  # characters of a value in a message


def explained(error: Any) -> str:
    """Formats a pydantic error as a message `name=value: what is wrong, and the remedy`."""
    loc = [str(part) for part in error["loc"]]
    name, value = ".".join(loc), _SHORT.repr(error.get("input"))
    if error["type"] == "extra_forbidden":
        known = _names_at(loc[:-1])
        near = (translation(name) or did_you_mean(loc[-1], known) + translations_below(name, error.get("input"))
                or similar_translation(name))
        return f"unknown setting '{name}' (value {value}).{near or ' Known here: ' + ', '.join(known) + '.'}"
    message = str(error["msg"]).removeprefix("Value error, ").replace("a valid tuple", "a list, e.g. [a, b]")
    if error["type"] == "model_type" and loc:
        message = ("write the settings of this section below it, as 'key: value', or remove the section. Known: "
                   f"{', '.join(_names_at(loc))}.")
    if error["type"] == "string_type" and isinstance(error.get("input"), bool):
        message = "a string is needed, but YAML reads no, off, yes and on as false and true: put the value in quotes"
    if error["type"] == "invalid_key":
        return f"unknown setting '{name}': the name of a setting must be a string"
    message = value_hint(name, error.get("input")) or message
    return f"{name}={value}: {message}" if loc else message


def _names_at(loc: Sequence[str]) -> list[str]:
    model: Any = Config
    for part in loc:
        if part.isdecimal():  # an index of a list
            continue
        info = next((info for name, info in model.model_fields.items() if part == (info.alias or name)), None)
        model = (model_of(info) or info.annotation) if info else Settings
        if not isinstance(model, type):
            model = next((a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)), Settings)
    return [info.alias or name for name, info in model.model_fields.items()]
