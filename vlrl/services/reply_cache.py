"""Stores a judge's replies by question, so that a run that was killed and resumed does not ask a question twice.

    services/judge-rank-00000.jsonl             one reply per line, in order of arrival: key, text, origin, cost
    services/judge-failed-rank-00000.jsonl      questions without a reply, for completed steps

Each process writes its own files, and at the start reads the files of all processes. A reply is reused for every later
question with the same key. A failure applies only to its own step, and is written when the step is completed. So an
interrupted step asks its failed questions again when it is repeated, while a completed step that is repeated gets the
same rewards."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vlrl.store.files import append_line, disk_errors, fsync
from vlrl.task.services import ServiceContext


@dataclass(frozen=True, kw_only=True)
class StoredReply:
    """The judge's reply to a question (`text`), or the reason why there is none (`failed`)."""

    key: str
    text: str | None = None
    failed: str | None = None
    split: str = ""
    step: int = 0
    policy_step: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tries: int = 1
    seconds: float = 0.0  # number of seconds from the first attempt to the reply

    def of(self, context: ServiceContext) -> bool:
        """Whether the reply was first requested in the split and step of `context`."""
        return (self.split, self.step) == (context.split, context.step)


_NAMES = {f.name for f in fields(StoredReply)}


class ReplyCache:
    """The judge's replies that a process knows. Thread-safe. folder: where replies are stored. own: the run's folder
    for services. If `folder` is not `own`, other runs share the cache, and its replies may be from steps of other
    runs."""

    def __init__(self, folder: Path, own: Path, name: str, rank: int):
        self.shared = folder.absolute() != own.absolute()
        self._path, self._failed_path = (parent / f"{name}{kind}-rank-{rank:05d}.jsonl"
                                         for parent, kind in ((folder, ""), (own, "-failed")))
        self._lock, self._open, self._dirty = threading.Lock(), False, False
        self._replies = {reply.key: reply for reply in _read(folder, f"{name}-rank-*.jsonl", self._path)}
        self._failures = {(k.key, k.split, k.step): k
                          for k in _read(own, f"{name}-failed-rank-*.jsonl", self._failed_path)}
        self._unsettled: list[StoredReply] = []

    def get(self, key: str, context: ServiceContext) -> StoredReply | None:
        """Returns the stored reply to the question with this key, or the stored failure if the question failed in the
        split and step of `context`. None if the question must be asked."""
        with self._lock:
            return self._failures.get((key, context.split, context.step)) or self._replies.get(key)

    def add(self, reply: StoredReply) -> None:
        """Adds a reply. A reply with text is written to the file at once; a failure is written by `settle`. Raises
        RunError if the disk is full."""
        with self._lock:
            if reply.text is None:
                self._failures[reply.key, reply.split, reply.step] = reply
                self._unsettled.append(reply)
                return
            self._replies[reply.key] = reply
            line = json.dumps({k: v for k, v in asdict(reply).items() if k != "failed"})
            self._append(line)

    def sync(self) -> None:
        """Waits until all replies are on the disk (fsync)."""
        with self._lock:
            if self._dirty:
                fsync(self._path)
            self._dirty = False

    def settle(self, split: str, step: int) -> None:
        """Writes the failures of a split in steps up to `step` to the file. Called after the step is completed."""
        with self._lock:
            done = [k for k in self._unsettled if k.split == split and k.step <= step]
            self._unsettled = [k for k in self._unsettled if k not in done]
            if done:
                append_line(self._failed_path, "\n".join(json.dumps(asdict(k)) for k in done))

    def _append(self, line: str) -> None:
        if not self._open:  # a killed process may have left half a line
            append_line(self._path, line)
            self._open = True
            return
        data = (line + "\n").encode()
        with disk_errors(self._path), open(self._path, "ab", buffering=0) as file:
            size = file.tell()
            if file.write(data) != len(data):
                os.truncate(self._path, size)
                raise OSError("only a part of the reply could be written")
        self._dirty = True


def _read(folder: Path, pattern: str, last: Path) -> Iterator[StoredReply]:
    for path in sorted(folder.glob(pattern), key=lambda path: (path == last, path)):
        for line in path.read_bytes().splitlines():
            reply = _parsed(line)
            if reply:
                yield reply


def _parsed(line: bytes) -> StoredReply | None:
    try:
        value: Any = json.loads(line)
        return StoredReply(**{k: v for k, v in value.items() if k in _NAMES})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None  # half a line
