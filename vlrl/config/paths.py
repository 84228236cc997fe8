"""Paths in a config file: relative to the file's folder first, else to the working directory.

Paths on the command line, and `run.dir`, which is written, are relative to the working directory alone. A pattern
(`rows-*.jsonl`) counts as found when it fits a file.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_SETTINGS = {("data", "train"), ("data", "heldout"), ("data", "root"), ("data", "difficulty"), ("data", "solutions"),
             ("data", "media_roots"), ("model", "name"), ("engine", "key_file")}
_CODE = re.compile(r"(?s)(.+\.py)(:\w+)?")
_folders: dict[str, Path] = {}
"""Relative path that neither place has -> the folder of the config file that names it; for messages."""


def placed(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings of a config file in `folder`, with each path that lies there joined to it.

    Paths are the settings listed above, in `tasks` too, and every `path/file.py:name`.
    """
    return {key: _placed(value, folder, ("", str(key))) for key, value in tree.items()}


def tried(value: str) -> str:
    """Returns the places a relative path was looked for in, as `" (looked for as /a/rows.jsonl and /b/rows.jsonl)"`; ""
    where there was one place.
    """
    folder = _folders.get(os.path.normpath(value))
    return f" (looked for as {folder / value} and {Path.cwd() / value})" if folder else ""


def _placed(value: Any, folder: Path, at: tuple[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _placed(item, folder, (at[1], str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_placed(item, folder, at) for item in value]
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    code = _CODE.fullmatch(value)
    if code and (code[2] or at[1] in ("name", "task", "tasks")):
        return _located(code[1], folder) + (code[2] or "")
    return _located(value, folder) if at in _SETTINGS else value


def _located(path: str, folder: Path) -> str:
    if os.path.isabs(path) or folder.resolve() == Path.cwd():
        return path
    if _is_there(folder / path):
        return str(folder / path)
    if not _is_there(Path(path)):
        _folders[os.path.normpath(path)] = folder
    return path


def _is_there(path: Path) -> bool:
    return os.path.exists(path) or split_of_folder(str(path)) is not None or next(_fitting(path), None) is not None


def split_of_folder(name: str) -> tuple[str, str] | None:
    """Returns an existing folder and the split of it that a name means, as folder@train; None for other names."""
    match = re.fullmatch(r"(?s)(.+)@(\w[\w-]*)", name)
    return (match[1], match[2]) if match and os.path.isdir(match[1]) else None


def _fitting(path: Path) -> Iterator[str]:
    return glob.iglob(str(path)) if glob.has_magic(str(path)) else iter(())
