"""Resolves paths in a config file: relative to the file's folder, or else to the working directory.

Paths on the command line, and `run.dir`, are relative to the working directory only. A pattern (`rows-*.jsonl`) exists
if it matches a file."""

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlrl.errors import did_you_mean

_SETTINGS = {("data", "train"), ("data", "heldout"), ("data", "root"), ("data", "difficulty"), ("data", "solutions"),
             ("data", "media_roots"), ("model", "name"), ("engine", "key_file")}
_CODE = re.compile(r"(?s)(.+\.py)(:\w+)?")
_folders: dict[str, Path] = {}
"""Relative path that was not found -> folder of the config file that names the path. Used in messages."""


def resolve_paths(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings `tree` of a config file in `folder`, with `folder` put before each relative path that exists
    in it. Paths are the values of the settings in _SETTINGS, also inside `tasks`, and every `path/file.py:name`."""
    return {key: _resolved(value, folder, ("", str(key))) for key, value in tree.items()}


def folders_of_configs() -> list[Path]:
    """Folders of the config files that name a relative path which was not found."""
    return list(dict.fromkeys(_folders.values()))


def searched_in(value: str) -> str:
    """Text to append to a message about a relative path that was not found: the two folders that were searched. Returns
    "" if only one folder was searched."""
    folder = _folders.get(os.path.normpath(value))
    return f" (looked for as {folder / value} and {Path.cwd() / value})" if folder else ""


def similar_file(path: Path) -> str:
    """A suggestion for a misspelt file name, from the names in the file's folder; "" if none is similar."""
    try:
        names = [one.name for one in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    return did_you_mean(path.name, names)


def _resolved(value: Any, folder: Path, at: tuple[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolved(item, folder, (at[1], str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolved(item, folder, at) for item in value]
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    code = _CODE.fullmatch(value)
    if code and (code[2] or at[1] in ("name", "task", "tasks")):
        return _located(code[1], folder) + (code[2] or "")
    return _located(value, folder) if at in _SETTINGS else value


def _located(path: str, folder: Path) -> str:
    if os.path.isabs(path) or folder.resolve() == Path.cwd():
        return path
    if _exists(folder / path):
        return str(folder / path)
    if not _exists(Path(path)):
        _folders[os.path.normpath(path)] = folder
    return path


def _exists(path: Path) -> bool:
    return os.path.exists(path) or split_of_folder(str(path)) is not None or (
        glob.has_magic(str(path)) and next(glob.iglob(str(path)), None) is not None)


def split_of_folder(name: str) -> tuple[str, str] | None:
    """Splits a name such as folder@train into (folder, split); None for other names, or if there is no such folder."""
    match = re.fullmatch(r"(?s)(.+)@(\w[\w-]*)", name)
    return (match[1], match[2]) if match and os.path.isdir(match[1]) else None
