"""Loads tasks by name: `load("grounding")`, `load("my_pkg.my_file:MyTask")` and `load("path/file.py:MyTask")`."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlrl.config import registry
from vlrl.config.registry import MissingFile, failure, file_module
from vlrl.errors import ConfigError, VlrlError, did_you_mean
from vlrl.task.base import Task

_OF_A_NOTEBOOK = (" The class is defined in a notebook or script, from which other processes cannot load it: write it "
                  "to a file and set task=path/file.py:{0}, or pass the class to vlrl.train(task={0})")


def notebook_warning(name: str) -> str:
    """A warning if a task is defined in code that runs as `__main__`, such as a notebook; "" for any other task."""
    location, _, attribute = name.partition(":")
    return f"task.name={name}: vlrl eval, score and app cannot load it.{_OF_A_NOTEBOOK.format(attribute)}" \
        if location == "__main__" else ""


def load(name: str, settings: Mapping[str, Any] | None = None,
         change: Callable[[type[Task]], type[Task]] = lambda cls: cls) -> Task:
    """Creates a task from its name (a built-in task, `module:Class` or `path/file.py:Class`) and its settings. If
    given, `change` maps the class that was found to the class that is instantiated. Raises ConfigError for an unknown
    task or setting."""
    cls = change(load_class(name))
    try:
        return cls(**dict(settings or {}))
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:  # __init__ is user code and may raise anything
        raise ConfigError(f"task.name={name!r}: {failure(error)}") from error


def load_class(name: str) -> type[Task]:
    """The Task class for a task name; see `load`."""
    location, _, attribute = name.partition(":")
    if location.endswith(".py"):
        module = _imported(lambda: file_module(Path(location)), name)
    elif attribute or "." in location:
        module = _imported(lambda: registry.module(location), name)
    else:
        module = _builtin(location)
    task_class = getattr(module, attribute, None) if attribute else _only_task(module, name)
    if not (inspect.isclass(task_class) and issubclass(task_class, Task) and task_class is not Task):
        near = did_you_mean(attribute, [n for n, v in vars(module).items()
                                        if inspect.isclass(v) and issubclass(v, Task) and v is not Task])
        own = _OF_A_NOTEBOOK.format(attribute) if location == "__main__" else ""
        raise ConfigError(f"task.name={name!r}: {location} has no Task class '{attribute}'.{near}{own}")
    if not task_class.__dict__.get("name"):
        task_class.name = location.rpartition(".")[2] if not location.endswith(".py") else Path(location).stem
    return task_class


def builtin_names() -> list[str]:
    """The names of the tasks that come with vlrl."""
    folder = registry.module("vlrl.tasks").__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if not m.name.startswith("_"))


def _builtin(name: str):
    if name not in builtin_names():
        near = did_you_mean(name, builtin_names())
        raise ConfigError(f"task.name={name!r}: no built-in task of that name.{near} Choose one of "
                          f"{', '.join(builtin_names())}, or your own: path/file.py:Class or module:Class.")
    return _imported(lambda: registry.module(f"vlrl.tasks.{name}"), name)


def _imported(run: Callable[[], Any], name: str) -> Any:
    try:
        return run()
    except MissingFile as error:
        raise ConfigError(f"task.name={name!r}: {error}") from None
    except (VlrlError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit, and what a test framework raises
        what = failure(error)
        if what.startswith("ModuleNotFoundError"):  # the module itself, not one that it imports
            what += ". A module must be importable; for a file write path/file.py:Class."
        raise ConfigError(f"task.name={name!r}: {what}") from error


def _only_task(module: Any, name: str) -> type[Task] | None:
    own = [v for v in vars(module).values()
           if inspect.isclass(v) and issubclass(v, Task) and v is not Task and v.__module__ == module.__name__]
    if not own:
        raise ConfigError(f"task.name={name!r}: the module defines no Task class. Write one (`class Mine(Task)`), or "
                          "create one with `vlrl tasks new`")
    if len(own) > 1:
        classes = " and ".join(c.__name__ for c in own)
        raise ConfigError(f"task.name={name!r}: the module defines {len(own)} Task classes, {classes}; select one, "
                          f"e.g. {name}:{own[0].__name__}")
    return own[0]
