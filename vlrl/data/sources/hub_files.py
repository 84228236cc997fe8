"""Selects the files of a split in a data set repository, by its card (`configs:`, `data_files:`), else by file names.

File names and cards are untrusted: only rows and media are selected, and no path can lead outside the folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from vlrl.data.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES

_ROWS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".jsonl.gz", ".csv", ".tsv", ".json", ".tar")
"""Suffixes of row files; if a split has several kinds, only the first of this list is read."""
_OWN_MEDIA = (".parquet", ".arrow", ".tar")
"""Suffixes of row files that contain their media."""
_MEDIA = IMAGE_SUFFIXES + VIDEO_SUFFIXES
_BESIDE = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_NO_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "package.json", "config.json")
_ALIASES = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test", "valid": "validation",
            "val": "validation", "dev": "validation"}
_SPLITS = ("train", "test", "validation", *_ALIASES)
_UNNAMED = "default configuration: name one, as in org/name/config@split, in place of"
_SHARD = re.compile(r"(?:^|/)(\w[\w.]*?)-\d{5}-of-\d{5}[^/]*$")


class NoSuchSplit(Exception):
    """Raised when there is no split, or no configuration, of this name."""

    def __init__(self, kind: str, given: str, known: Sequence[str]):
        super().__init__(given)
        self.kind, self.given, self.known = kind, given, known


@dataclass(frozen=True)
class Selection:
    """The files of a split, relative to the repository."""

    read: tuple[str, ...]
    """The row files, or one folder of images."""
    fetch: tuple[str, ...]
    """All files to download: the row files and their media."""


def is_data(file: str) -> bool:
    """Whether a file may be downloaded: it holds rows or media, and its path is harmless."""
    parts = file.split("/")
    plain = file.isprintable() and "\\" not in file and not any(p in ("", ".", "..") or p[0] == "." for p in parts)
    return plain and len(file) < 1000 and file.lower().endswith((*_ROWS, *_MEDIA)) and parts[-1] not in _NO_ROWS


def selected(files: Sequence[str], configs: Sequence[Any], config: str, split: str) -> Selection:
    """Returns the files of a split. Raises NoSuchSplit listing the existing splits or configurations."""
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
    """Returns the configuration to use if the name contains none. Raises NoSuchSplit if there are several and no
    default."""
    marked = [one for name, one in entries.items() if one.get("default") is True or name == "default"]
    if not marked and len(entries) > 1:
        raise NoSuchSplit(_UNNAMED, "", [*entries])
    return (marked or list(entries.values()))[0]


def _one_configuration(files: Sequence[str]) -> None:
    """Raises NoSuchSplit for a repository with several configurations in the layout of refs/convert/parquet.

    That layout is <configuration>/<split>/0000.parquet; the rows of different configurations must not be mixed."""
    folders = sorted({file.split("/")[0] for file in files if re.fullmatch(r"[^/]+/[^/]+/\d{4}\.parquet", file)})
    if len(folders) > 1:
        raise NoSuchSplit(_UNNAMED, "", folders)


def _by_card(data_files: Any, files: Sequence[str], inside: str) -> dict[str, list[str]]:
    """Returns the files of each split, as the patterns of the card select them; {} without patterns."""
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
    if not globs:
        return True
    if globs[0] == "**":
        return any(_fits(parts[i:], globs[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _fits(parts[1:], globs[1:])


def _globs(pattern: str) -> list[str]:
    """Splits a pattern into its parts. A pattern that is long or has many "**" could take forever and matches nothing.
    """
    parts = pattern.removeprefix("./").rstrip("/").split("/")
    return parts if len(pattern) < 500 and parts.count("**") <= 3 else [""]


def _by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """Returns the files of each split by their names: `test-00000-of-00002.parquet`, `data/val.jsonl`, `train/...`.

    If no name contains a split, all files belong to train."""
    splits: dict[str, list[str]] = {}
    for file in files:
        if name := _split_in_path(file):
            splits.setdefault(name, []).append(file)
    return splits or ({"train": list(files)} if files else {})


def _split_in_path(file: str) -> str:
    """The split in a file path; "" if there is none."""
    if (shard := _SHARD.search(file)) and shard[1] not in ("data", "part", "shard"):
        return _ALIASES.get(shard[1], shard[1])
    words = (word for part in file.split("/") for word in re.split(r"[-_. ]", part.lower()))
    return next((_ALIASES.get(word, word) for word in words if word in _SPLITS), "")


def _selection(chosen: Sequence[str], files: Sequence[str]) -> Selection:
    rows = [file for file in chosen if not file.lower().endswith(_MEDIA) and os.path.basename(file) not in _BESIDE]
    kind = next((kind for kind in _ROWS if any(file.lower().endswith(kind) for file in rows)), None)
    if kind is None:  # images beside metadata, or in a folder for each class
        return Selection((_image_folder(chosen),), tuple(sorted(chosen)))
    read = tuple(sorted(file for file in rows if file.lower().endswith(kind)))
    media = [] if kind in _OWN_MEDIA else [file for file in files if file.lower().endswith(_MEDIA)]
    return Selection(read, (*read, *sorted(media)))


def _image_folder(chosen: Sequence[str]) -> str:
    """The folder of images: the only folder named after the split, or "." for the entire repository."""
    folders = {"/".join(parts[:i + 1]) for file in chosen for parts in [file.split("/")[:-1]]
               for i, part in enumerate(parts)
               if (split := _split_in_path(f"{part}/x")) and split == _split_in_path(file)}
    return folders.pop() if len(folders) == 1 else "."
