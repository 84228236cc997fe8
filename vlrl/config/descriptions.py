"""Formats names, types, bounds, defaults and descriptions of settings as text, for `--settings` and
docs/configuration.md."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vlrl.config.base import Named
from vlrl.config.sections import model_of

_PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "any value", NoneType: "null",
          Named: "name, or mapping of name and options"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_HUGE = 2**63
"""Bounds of at least this magnitude, such as the range of 64-bit integers, are not shown."""

FIRST = ("model.name", "task.name", "data.train", "data.heldout", "steps", "epochs", "train.lr",
         "rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_tokens", "model.lora.rank",
         "model.max_pixels", "train.tokens_per_batch", "engine.name", "eval.every")
"""The settings that a new run sets first."""


def summary(description: str) -> str:
    """The first sentence of a description. The dots of "e.g." and "i.e." do not end a sentence."""
    found = re.match(r".*?(?<!e\.g)(?<!i\.e)[.?!](?=\s|$)", description, re.DOTALL)
    return found[0] if found else description


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Yields (name, type as text, default, description) of every setting of the section class `model`, in order. Nested
    settings are included. Each name begins with `prefix`."""
    for name, info in ((info.alias or name, info) for name, info in model.model_fields.items()):
        kind, below = info.annotation, model_of(info) or _below(info.annotation)
        if below is None or get_origin(kind) in (Union, UnionType):
            default = info.get_default(call_default_factory=True)
            yield f"{prefix}{name}", type_text(kind, info.metadata), default, info.description or ""
        if below is not None:
            yield from describe(below, f"{prefix}{name}.")


def _below(kind: Any) -> type[BaseModel] | None:
    args = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((one for one in args if isinstance(one, type) and issubclass(one, BaseModel) and one is not Named),
                None)


def type_text(kind: Any, bounds: Sequence[Any] = ()) -> str:
    """Describes a type annotation as text: int with the bound ge=1 becomes "whole number >= 1". `bounds` are the
    constraints of the setting."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return type_text(args[0], [*own, *bounds])
    if origin is Literal:
        return ("one of " if len(args) > 1 else "only ") + ", ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join(type_text(a, () if a is NoneType else bounds) for a in args)
    if origin in (list, tuple, Sequence):
        each = dict.fromkeys(type_text(a) for a in args if a is not Ellipsis)
        count = "" if origin is not tuple or Ellipsis in args else f"{len(args)}: "
        return f"list of {count}{', '.join(each)}".replace("of one of", "of")
    if origin in (dict, Mapping):
        return f"mapping of {type_text(args[0])} to {type_text(args[1])}".replace("of one of", "of")
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in _PLAIN:
        return "mapping"
    return " ".join([_PLAIN.get(kind, getattr(kind, "__name__", str(kind))), *_bounds(bounds)])


def _bounds(bounds: Sequence[Any]) -> Iterator[str]:
    limits = [(sign, getattr(b, key)) for b in bounds for key, sign in _SIGNS.items() if hasattr(b, key)]
    shown = [f"{sign} {value}" for sign, value in limits if abs(value) < _HUGE]
    return iter([" and ".join(shown)] if shown else [])


def format_value(value: Any) -> str:
    """Formats a default value as text, as it is written in a config file."""
    if value is None:
        return "null"
    if isinstance(value, Named):
        return format_value(value.model_dump())
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {format_value(v)}" for k, v in value.items()) + "}"
    return '""' if value == "" else str(value)
