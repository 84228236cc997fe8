"""Reads untrusted .jsonl and YAML files, also while they grow."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from vlrl.store.files import MOST_LINE, read_lines, read_small

_NOTES = 20  # per file
_NODES = 5000  # per YAML file
_DEPTH = 20


class BadFile(ValueError):
    """Raised for an invalid file. The message becomes part of a note on the page."""


class JsonLines:
    """Reads the JSON objects with an integer `step` in a .jsonl file. A repeated read parses only the new lines."""

    def __init__(self, name: str):
        self.name = name
        self.notes: list[str] = []
        self._start()

    def _start(self, inode: int | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.notes.clear()
        self._at, self._number, self._inode, self._changed = 0, 0, inode, 0
        self._bad, self._noted, self._open = 0, 0, False

    def read(self, path: Path | None) -> list[dict[str, Any]]:
        """Returns all records so far, or [] if `path` is None. An incomplete last line is left for the next read."""
        try:
            if path is None:
                self._start()
                return self.records
            stat = path.stat()
            replaced = stat.st_ino != self._inode or stat.st_size < self._at
            if replaced or (stat.st_size == self._at and stat.st_mtime_ns != self._changed):  # rewritten in place
                self._start(stat.st_ino)
            self._changed = stat.st_mtime_ns
            if stat.st_size > self._at:
                self._append(path)
        except OSError as error:
            self.notes[:] = [f"{self.name} cannot be read: {error.strerror}"]
        return self.records

    def _append(self, path: Path) -> None:
        for line, length in read_lines(path, self._at):
            whole = line.endswith(b"\n")
            record = None if self._open else _record(line)
            if record is None and not whole and length < MOST_LINE:
                return  # the line is still being written
            self._number += not self._open  # else this is the rest of a line that was read in part
            self._open = not whole
            self._at += length
            if record is not None:
                self.records.append(record)
            elif line.strip() and self._noted < self._number:
                self._skip()

    def _skip(self) -> None:
        self._bad, self._noted = self._bad + 1, self._number
        if self._bad <= _NOTES:
            self.notes.append(f"skipped line {self._number} of {self.name}: it is not a JSON object with an integer "
                              "step")
        elif self._bad == _NOTES + 1:
            self.notes.append(f"skipped more lines of {self.name}")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = value.get("step") if isinstance(value, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        return None
    return {str(key): _scalar(item) for key, item in value.items()
            if not isinstance(item, (dict, list)) or (key == "changed" and all(isinstance(one, str) for one in item))}


def _scalar(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return value if math.isfinite(value) else None
        except OverflowError:
            return None
    return value


def read_yaml(path: Path, most_bytes: int) -> Mapping[str, Any]:
    """The mapping in a YAML file. Raises BadFile if the file is invalid, too large, nested too deeply, or contains
    aliases."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = read_small(path, most_bytes).decode("utf-8")
        _check(yaml.parse(text, Loader=loader))
        value = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise BadFile(f"invalid YAML: {str(error).splitlines()[0]}") from None
    except UnicodeDecodeError:
        raise BadFile("the file is not UTF-8") from None
    except (OSError, ValueError, RecursionError, TypeError) as error:
        said = error.strerror if isinstance(error, OSError) else ""
        raise error if isinstance(error, BadFile) else BadFile(said or type(error).__name__) from None
    if not isinstance(value, Mapping):
        raise BadFile("the file contains no settings")
    return value


def _check(events: Iterator[Any]) -> None:
    """Raises BadFile for YAML with aliases, which can expand without limit, and for too many or too deep settings."""
    depth = 0
    for nodes, event in enumerate(events):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise BadFile("the file contains YAML aliases")
        if depth > _DEPTH or nodes > _NODES:
            raise BadFile("the file has too many or too deeply nested settings")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to {dotted name: value}, e.g. "train.lr"; `prefix` is put before each name. Lists are
    kept, and values that JSON cannot represent become text."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            out |= flat(value, name + ".")
        else:
            out[name] = json.loads(json.dumps(value, default=str))
    return out


def first_line(error: Exception) -> str:
    """The first line of an error's message, for notes; the name of its type if it has no message."""
    words = str(error).splitlines()
    return words[0][:300] if words else type(error).__name__
