"""Copies of a user's own code in the run folder: the files of task, reward functions and rules that a run has loaded.

    source/rewards.py
    source/index.json       {"rewards.py": "rewards.py"}: name in the settings -> name of the copy

They show what the rewards were, and are loaded if the original does not exist any more."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlrl.config import Config, registry
from vlrl.config.plain import plain
from vlrl.store.files import read_json, write_text

FOLDER = "source"
_INDEX = "index.json"
_LARGEST = 1 << 20
"""Most bytes of a file that is copied."""


def keep(run: Path, config: Config) -> list[str]:
    """Copies the user's code that a config names, and this process has loaded, to the run folder. Returns a warning for
    each file that has changed since its last copy, which is kept as NAME.before-N."""
    folder, warnings = run / FOLDER, list[str]()
    index: dict[str, Any] = read_json(folder / _INDEX) or {}
    named = {str(Path(text.partition(":")[0])) for text in _texts(plain(config))}
    used = {given: path for given, path in registry.USED.items() if given in named}
    for given, path in {**_siblings(used), **used}.items():
        text = _text(path)
        if text is None or path.is_relative_to(folder.resolve()):
            continue
        name = index.get(given) or _free(path.name, set(index.values()))
        before = _text(folder / name)
        if before is not None and before != text:
            number = next(i for i in range(1, 10**6) if not (folder / f"{name}.before-{i}").exists())
            write_text(folder / f"{name}.before-{number}", before)
            warnings.append(f"{given} has changed since the run began; the earlier version is in "
                            f"{folder / f'{name}.before-{number}'}. To start over: resume=never, or another run.dir")
        if before != text:
            write_text(folder / name, text)
        index[given] = name
    if index != (read_json(folder / _INDEX) or {}):
        write_text(folder / _INDEX, json.dumps(index, indent=1))
    return warnings


def offer(run: Path) -> None:
    """Lets `config.registry` load the copies in a run folder in place of files and modules that do not exist."""
    index = read_json(run / FOLDER / _INDEX)
    for given, name in (index if isinstance(index, dict) else {}).items():
        copy = run / FOLDER / str(name)
        if os.path.basename(str(name)) == name and copy.is_file() and not copy.is_symlink():
            registry.COPIES[given] = copy


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in nested settings."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _siblings(used: Mapping[str, Path]) -> dict[str, Path]:
    """{module name: file} of the modules beside the files `used` that this process has imported too."""
    names = [name for name in list(sys.modules) if "." not in name and name != "__main__"]
    folders = dict.fromkeys(path.parent for path in used.values())
    return {name: folder / f"{name}.py" for folder in folders for name in names if (folder / f"{name}.py").is_file()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _LARGEST else None
    except (OSError, UnicodeDecodeError):
        return None


def _free(name: str, taken: set[str]) -> str:
    stem, suffix = os.path.splitext(name)
    names = [name, *(f"{stem}-{i}{suffix}" for i in range(2, 1000))]
    return next(one for one in names if one not in taken and one != _INDEX)
