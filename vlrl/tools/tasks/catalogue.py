"""Lists the built-in tasks: reward parts, settings, and the configs that use them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, get_type_hints

from vlrl import config
from vlrl.config.descriptions import type_text
from vlrl.errors import ConfigError
from vlrl.task import Task, Weight, builtin_names, load_class, setting_names


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a task, `task.<name>`."""

    name: str
    kind: str  # the type of the setting, described in words
    default: Any


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A built-in task: its reward parts, settings and configs."""

    name: str
    about: str  # first line of the task's docstring
    parts: dict[str, Weight]
    settings: tuple[Setting, ...]
    """The task's own settings, without those that every task has (prompt, prompts, system, coordinates, rewards)."""
    configs: tuple[str, ...]


def tasks() -> list[TaskInfo]:
    """A TaskInfo for each built-in task, in alphabetical order."""
    used = _configs()
    return [_entry(name, tuple(used.get(name, ()))) for name in builtin_names()]


def _entry(name: str, configs: tuple[str, ...]) -> TaskInfo:
    cls = load_class(name)
    hints = get_type_hints(cls, include_extras=True)
    everyone = set(setting_names(Task))
    own = tuple(Setting(name=n, kind=type_text(hints.get(n, type(getattr(cls, n)))), default=getattr(cls, n))
                for n in setting_names(cls) if n not in everyone)
    about = (inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or "").partition("\n")[0].removeprefix(
        f"{name.capitalize()}: ")
    return TaskInfo(name=name, about=about, parts=dict(cls.rewards_for({})), settings=own, configs=configs)


def _configs() -> dict[str, list[str]]:
    used: dict[str, list[str]] = {}
    for path in config.shipped_configs():
        try:
            names = [entry.name for entry in config.load(path).each_task]
        except ConfigError:  # a base without a task, such as tiny.yaml
            continue
        folder = next(p for p in path.parents if p.name == "configs")
        for name in names:
            used.setdefault(name, []).append(f"configs/{path.relative_to(folder).as_posix()}")
    return used
