"""Reads settings: YAML files with `extends:`, `key=value` overrides, and the errors that help.

A config file holds only what differs from the defaults in settings.py; `extends: other.yaml` (relative to the file, or
else one of those that come with vlrl) is read first. `load("configs/quickstart.yaml", ["steps=20", "train.lr=1e-4"])`
returns a frozen Config; an unknown key is an error with a suggestion. The resolved copy is saved in the run folder.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
import yaml
from pydantic import BaseModel
from yaml.composer import ComposerError

import vlrl
from vlrl.errors import ConfigError, did_you_mean
from vlrl.settings import RESUMABLE, Config, Settings

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 300  # of a value in a message; of a nested one the first items


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file and applies `key=value` overrides in order.

    Raises ConfigError naming the setting, its value and the way out. `run.dir` is resolved to `runs/<stem>` when empty.
    """
    path = _find(Path(path))
    tree = _read(path)
    for word in overrides:
        _override(tree, word)
    tree.setdefault("run", {})
    if isinstance(tree["run"], dict) and not tree["run"].get("dir"):
        tree["run"]["dir"] = str(Path("runs") / path.stem)
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> Config:
    """A Config from nested dictionaries; raises ConfigError for unknown keys, wrong types and values out of range."""
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def differences(old: Config, new: Config) -> list[str]:
    """Lines `name: old -> new` for the settings whose change forbids a resume (contracts: all but RESUMABLE)."""
    a, b = (_flatten(c.model_dump(mode="json", exclude=set(RESUMABLE))) for c in (old, new))
    return [f"{k}: {a.get(k)!r} -> {b.get(k)!r}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]


def dump(config: Config) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def describe() -> list[tuple[str, str, Any, str]]:
    """(name, type in words, default, description) of every setting, in order; for `--settings` and the docs."""
    from vlrl.tools import docs

    return list(docs.describe(Config))


def _find(path: Path) -> Path:
    for candidate in (path, *(Path(folder) / path for folder in vlrl.__path__)):
        if os.path.isfile(candidate):  # Path.is_file raises for a name that is too long
            return candidate
    if os.path.exists(path):
        kind = "a folder" if os.path.isdir(path) else "no regular file"
        raise ConfigError(f"config {str(path)!r} is {kind}: name a YAML file, e.g. configs/quickstart.yaml")
    known = {p.name: str(Path(*p.parts[p.parts.index("configs"):])) for p in shipped_configs()}
    if os.path.isdir(path.parent):
        known |= {p.name: p.name for p in path.parent.glob("*.yaml")}
    close = difflib.get_close_matches(path.name, known, n=1)
    near = f" Did you mean '{known[close[0]]}'?" if close else ""
    raise ConfigError(f"config file {str(path)!r} does not exist.{near}")


def shipped(name: str) -> Path | None:
    """The file of a config that comes with vlrl, named relative to its folder, e.g. "tiny.yaml"; None without one."""
    places = [Path(folder) / "configs" / name for folder in vlrl.__path__]
    return next((place for place in places if os.path.isfile(place)), None)


def shipped_configs() -> list[Path]:
    """Every config that comes with vlrl."""
    return [path for folder in vlrl.__path__ for path in sorted(Path(folder, "configs").rglob("*.yaml"))]


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: 'extends' leads in a circle")
    try:
        tree = _parse(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read config {path}: it is no UTF-8 text. Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read config {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(tree, dict):
        kind = {"list": "a list", "str": "a text"}.get(type(tree).__name__, f"a {type(tree).__name__}")
        raise ConfigError(f"config {path} must hold settings as 'key: value', not {kind}")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    base = path.parent / str(parent)
    if not os.path.isfile(base):
        base = shipped(str(parent))
    if base is None:
        near = did_you_mean(str(parent), [p.name for p in [*path.parent.glob("*.yaml"), *shipped_configs()]])
        raise ConfigError(f"{path}: extends: {parent!r} does not exist (it is relative to the file that names it, or "
                          f"names one of vlrl's).{near}")
    return merge(_read(base, (*seen, path.resolve())), tree)


class _Loader(yaml.SafeLoader):
    """YAML in which a mapping has each key once; YAML's own loader lets the last one win."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ComposerError(None, None, f"line {line}: the key '{name}' stands in line {lines[name]} already; "
                                    "keep one of them", None)
            lines[name] = line
        return node


def _parse(text: str) -> Any:
    """The value of a YAML text. Raises ValueError that says what is wrong with it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{mark}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # its constructors raise ValueError, KeyError, ... on values like 2020-13-45
        raise ValueError(f"{type(error).__name__}: {error}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`; dictionaries are merged, everything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _override(tree: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word!r} is not a setting: write key=value, e.g. train.lr=1e-6")
    try:
        value = _parse(text) if text else ""
    except ValueError as error:
        raise ConfigError(f"{key}: cannot read the value {text!r}: {error}") from None
    *path, last = key.split(".")
    for name in path:
        child = tree.get(name)
        if isinstance(child, str) and name in ("engine", "task"):
            child = {"name": child}
        tree[name] = child = dict(child) if isinstance(child, Mapping) else {}
        tree = child
    tree[last] = merge(tree[last], value) if isinstance(value, dict) and isinstance(tree.get(last), dict) else value


def _explain(error: Any) -> str:
    loc = [str(part) for part in error["loc"]]
    name, value = ".".join(loc), _SHORT.repr(error.get("input"))
    if error["type"] == "extra_forbidden":
        known = _names_at(loc[:-1])
        near = did_you_mean(loc[-1], known)
        return f"unknown setting '{name}' (value {value}).{near or ' Known here: ' + ', '.join(known) + '.'}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "model_type" and loc:
        message = f"write its settings below it, as 'key: value', or leave it out. Known: {', '.join(_names_at(loc))}."
    if error["type"] == "invalid_key":
        return f"unknown setting '{name}': the name of a setting is a text"
    return f"{name}={value}: {message}" if loc else message


def _names_at(loc: Sequence[str]) -> list[str]:
    model: Any = Config
    for part in loc:
        info = model.model_fields.get(part)
        model = info.annotation if info else Settings
        if not isinstance(model, type):
            model = next((a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)), Settings)
    return list(model.model_fields)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + str(key)] = value
    return out
