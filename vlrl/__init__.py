"""vlrl: fine-tune vision-language models by reinforcement learning with verifiable rewards.

    from vlrl import load_run, train

Importing this package loads no torch: a public name is imported when it is first used. The import prepares the process,
and through inherited environment variables its child processes, for three problems of the libraries: OpenMP workers
that spin while they wait, the fork warning of tokenizers, and a torchvision wheel built for CUDA together with a
CPU-only torch."""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from vlrl import _torchvision

__version__ = "0.1.0"
__all__ = ["Callback", "Config", "Environment", "Media", "Observation", "Run", "Sample", "Step", "Task", "Tool",
           "Variant", "VlrlError", "evaluate", "load_config", "load_run", "train"]
# __init__.pyi tells type checkers where these come from
# pyright: reportUnsupportedDunderAll=false

_PUBLIC = {"Callback": "training.callbacks", "Config": "config.schema", "Environment": "task.environment",
           "Media": "types", "Observation": "types", "Run": "tools.run", "Sample": "types", "Step": "types",
           "Task": "task.base", "Tool": "environments.tools", "Variant": "types", "VlrlError": "errors",
           "evaluate": "tools.evaluate", "load_config": "config.loading", "load_run": "tools.run",
           "train": "tools.train"}
"""Public name -> the module that defines it, below vlrl; __init__.pyi declares the same names for type checkers."""

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning workers are 20x slower beside another busy process
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_torchvision.install()

_PACKAGE = Path(__file__).resolve().parent
_IN_CHECKOUT = (_PACKAGE.parent / "tasks").is_dir() and (_PACKAGE.parent / "train.py").is_file()
HOME = _PACKAGE.parent if _IN_CHECKOUT else _PACKAGE
"""The folder that contains tasks/, app/ and configs/: the checkout, or this package if installed from a wheel."""


class _Folders(importlib.abc.MetaPathFinder):
    """Import hook that makes tasks/, app/ and configs/ of a checkout importable as vlrl.tasks, vlrl.app and
    vlrl.configs, as in an installed wheel.

    Other modules of the checkout are not part of the package, and a user's own tasks.py cannot shadow the built-in
    tasks."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != "vlrl" or name not in ("tasks", "app", "configs"):
            return None
        folder = HOME / name
        if (folder / "__init__.py").is_file():
            return importlib.util.spec_from_file_location(fullname, folder / "__init__.py",
                                                          submodule_search_locations=[str(folder)])
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


if _IN_CHECKOUT:
    sys.meta_path.insert(0, _Folders())


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'vlrl' has no attribute {name!r}; its names are {', '.join(_PUBLIC)}")
    value = globals()[name] = getattr(importlib.import_module(f"vlrl.{_PUBLIC[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
