"""Caches files that are derived from a large file, such as an index, until that file changes. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from vlrl.errors import RunError
from vlrl.store.files import replacing

_VERSION = 1
_SPARE = 1 << 30
"""Bytes of disk space that must stay free while a file is unpacked."""


def derived_file(path: Path, cache: Path, name: str, write: Callable[[Path, Path], None]) -> Path:
    """Returns the cached file `name` that is derived from the file `path`. If the cached file is missing, `write(path,
    temporary)` creates it.

    After a change of `path`, the cached file is created again, and its earlier versions are deleted. Raises RunError if
    the cache cannot be written."""
    status = os.stat(path)
    with open(path, "rb") as file:
        ends = file.read(1 << 16)
        file.seek(max(0, status.st_size - (1 << 16)))
        ends += file.read()
    whose = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    state = f"{_VERSION} {status.st_size} {status.st_mtime_ns} ".encode() + ends
    target = cache / "index" / f"{whose}-{hashlib.sha256(state).hexdigest()[:24]}-{name}"
    if not target.is_file():
        with _file_lock(target.parent / f".{whose}.lock"):
            if not target.is_file():
                with replacing(target, sync=False) as temporary:
                    write(path, temporary)
                for old in target.parent.glob(f"{whose}-*-{name}"):
                    if old != target:
                        old.unlink(missing_ok=True)
    return target


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Context manager that holds a file lock, so that only one process creates a cached file at a time. If the file
    system has no locks, the block runs without one."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path, "wb")), fcntl.LOCK_EX)
            stack.callback(path.unlink, missing_ok=True)
        yield


def check_room(source: Path, target: Path) -> None:
    """Raises RunError if less than _SPARE is free on the disk of `target`, the unpacked copy of `source`."""
    if shutil.disk_usage(target.parent).free < _SPARE:
        raise RunError(f"unpacking {source} into {target.parent} would leave less than {_SPARE >> 20} MiB free there; "
                       "set data.cache to a folder on a larger disk, or unpack the file yourself")
