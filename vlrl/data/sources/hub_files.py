"""The files of a split in a data set repository: by its card (`configs:`, `data_files:`), else by file names.

File names and cards are untrusted: no path outside a folder, and nothing but rows and media, is selected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from vlrl.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES

_ROWS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".jsonl.gz", ".csv", ".tsv", ".json", ".tar")
"""Suffixes of row files; of several kinds the first is read."""
_OWN_MEDIA = (".parquet", ".arrow", ".tar")
"""Kinds that contain their media."""
_MEDIA = IMAGE_SUFFIXES + VIDEO_SUFFIXES
_BESIDE = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_NO_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "package.json", "config.json")
_ALIASES = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test", "valid": "validation",
            "val": "validation", "dev": "validation"}
_SPLITS = ("train", "test", "validation", *_ALIASES)
_UNNAMED = "default configuration, so one must be named (org/name/config@split), not"
_SHARD = re.compile(r"(?:^|/)(\w[\w.]*?)-\d{5}-of-\d{5}[^/]*$")


class NoSuchSplit(Exception):
    """There is no split, or configuration, of this name."""

    def __init__(self, kind: str, given: str, known: Sequence[str]):
        super().__init__(given)
        self.kind, self.given, self.known = kind, given, known


@dataclass(frozen=True)
class Selection:
    """The files of a split, relative to the repository."""

    read: tuple[str, ...]
    """Row files, or one folder of images."""
    fetch: tuple[str, ...]
    """All files needed to read them."""


def is_data(file: str) -> bool:
    """Whether a file may be downloaded: rows or media, with a plain path."""
    parts = file.split("/")
    plain = file.isprintable() and "\\" not in file and not any(p in ("", ".", "..") or p[0] == "." for p in parts)
    return plain and len(file) < 1000 and file.lower().endswith((*_ROWS, *_MEDIA)) and parts[-1] not in _NO_ROWS


def selected(files: Sequence[str], configs: Sequence[Any], config: str, split: str) -> Selection:
    """The files of a split. Raises NoSuchSplit listing the existing ones."""
    files = [file for file in files if is_data(file)]
    entries = {str(one["config_name"]): one for one in configs if isinstance(one, Mapping) and one.get("config_name")}
    folders = {file.split("/")[0] for file in files if "/" in file}
    if config and config not in entries and config not in folders:
        raise NoSuchSplit("configuration", config, sorted(entries or folders))
    entry = entries.get(config) if config or not entries else _default(entries)
    inside = str((entry or {}).get("data_dir") or ("" if entry else config)).strip("/")
    files = [file for file in files if not inside or file.startswith(f"{inside}/")]
    by_card = _by_card((entry or {}).get("data_files"), files, inside)
    if not entry and not config:
        _one_configuration(files)
    splits = by_card or _by_name(files)
    name = split if split in splits else _ALIASES.get(split, split)
    if not splits.get(name):
        raise NoSuchSplit("split", split, sorted(splits))
    return _selection(splits[name], files)


def _default(entries: Mapping[str, Any]) -> Any:
    """The configuration to use if none is named."""
    marked = [one for name, one in entries.items() if one.get("default") is True or name == "default"]
    if not marked and len(entries) > 1:
        raise NoSuchSplit(_UNNAMED, "", [*entries])
    return (marked or list(entries.values()))[0]


def _one_configuration(files: Sequence[str]) -> None:
    """Refuses to mix the configurations of refs/convert/parquet: <configuration>/<split>/0000.parquet."""
    folders = sorted({file.split("/")[0] for file in files if re.fullmatch(r"[^/]+/[^/]+/\d{4}\.parquet", file)})
    if len(folders) > 1:
        raise NoSuchSplit(_UNNAMED, "", folders)


def _by_card(data_files: Any, files: Sequence[str], inside: str) -> dict[str, list[str]]:
    """Split -> files by the patterns of a card; {} without patterns."""
    if isinstance(data_files, (str, list)) and (isinstance(data_files, str) or all(
            isinstance(one, str) for one in data_files)):
        data_files = {"train": data_files} if data_files else {}
    if isinstance(data_files, list):
        data_files = {one.get("split", "train"): one.get("path") for one in data_files if isinstance(one, Mapping)}
    splits: dict[str, list[str]] = {}
    for split, patterns in data_files.items() if isinstance(data_files, Mapping) else ():
        several = [patterns] if isinstance(patterns, str) else patterns if isinstance(patterns, list) else []
        fit = [_globs(f"{inside}/{one}" if inside else one) for one in several if isinstance(one, str)]
        splits[str(split)] = [file for file in files if any(_fits(file.split("/"), one) for one in fit)]
    return splits


def _fits(parts: Sequence[str], globs: Sequence[str]) -> bool:
    """Whether a path matches a pattern of a card: `data/train-*`, `**/x.parquet`, or a folder."""
    if not globs:
        return True
    if globs[0] == "**":
        return any(_fits(parts[i:], globs[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _fits(parts[1:], globs[1:])


def _globs(pattern: str) -> list[str]:
    """The parts of a pattern. A long pattern, or one with many "**", could take forever, and becomes one that matches
    nothing."""
    parts = pattern.removeprefix("./").rstrip("/").split("/")
    return parts if len(pattern) < 500 and parts.count("**") <= 3 else [""]


def _by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """Split -> files by names: `test-00000-of-00002.parquet`, `data/val.jsonl`, `train/...`; all are train if no name
    says."""
    splits: dict[str, list[str]] = {}
    for file in files:
        if name := _named(file):
            splits.setdefault(name, []).append(file)
    return splits or ({"train": list(files)} if files else {})


def _named(file: str) -> str:
    """The split in a path; "" without one."""
    if (shard := _SHARD.search(file)) and shard[1] not in ("data", "part", "shard"):
        return _ALIASES.get(shard[1], shard[1])
    words = (word for part in file.split("/") for word in re.split(r"[-_. ]", part.lower()))
    return next((_ALIASES.get(word, word) for word in words if word in _SPLITS), "")


def _selection(chosen: Sequence[str], files: Sequence[str]) -> Selection:
    rows = [file for file in chosen if not file.lower().endswith(_MEDIA) and os.path.basename(file) not in _BESIDE]
    kind = next((kind for kind in _ROWS if any(file.lower().endswith(kind) for file in rows)), None)
    if kind is None:  # images beside metadata, or in a folder for each class
        return Selection((_top(chosen),), tuple(sorted(chosen)))
    read = tuple(sorted(file for file in rows if file.lower().endswith(kind)))
    media = [] if kind in _OWN_MEDIA else [file for file in files if file.lower().endswith(_MEDIA)]
    return Selection(read, (*read, *sorted(media)))


def _top(chosen: Sequence[str]) -> str:
    """The folder of images: the one named after their split, or "." for the whole repository."""
    folders = {"/".join(parts[:i + 1]) for file in chosen for parts in [file.split("/")[:-1]]
               for i, part in enumerate(parts) if _named(f"{part}/x") and _named(f"{part}/x") == _named(file)}
    return folders.pop() if len(folders) == 1 else "."
