"""The lock on a run folder: only one process may write there, even if several hosts share the folder. Imports no torch.

    with lock(folder / "run.lock") as held:
        held.check()                                        # raises if another process has taken over the folder

The lock file names its owner. Creating it is atomic even on NFS (O_EXCL), and so is removing a stale lock file
(rename). Whether an owner on this host is alive can be looked up. An owner on another host shows that it is alive by
touching the file every BEAT_S seconds; only times of the file system's clock are compared. Containers and hosts may
have the same name, so an owner is looked up only if it has the same kernel boot id and process namespace."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from vlrl.errors import RunError
from vlrl.store.files import disk_errors, read_json

BEAT_S = 15.0  # seconds between two signs of life of an owner
SILENT_S = 180.0
"""A lock may be taken over after this number of seconds without a sign of life. It is 12 times BEAT_S."""
_LOOK_S = 1.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_log = logging.getLogger(__name__)


class Lock:
    """A lock on a folder, held by this process. `path` is the lock file, `owner` this process as described in it."""

    def __init__(self, path: Path, owner: Mapping[str, Any]):
        self.path, self.owner = path, owner

    @property
    def owned(self) -> bool:
        """Whether this process still holds the lock."""
        return read_json(self.path) == self.owner

    def check(self) -> None:
        """Raises RunError if the folder has vanished or another process has the lock. Nothing may be written then."""
        if self.owned:
            return
        other, folder = read_json(self.path), self.path.parent
        if other:
            raise RunError(f"run folder {folder} was taken over by {_named(other)}, so this run stops writing. If "
                           "both runs should continue, set another run.dir for one of the two.")
        raise RunError(f"run folder {folder} has vanished, or somebody deleted {self.path.name} in it, so this run "
                       "stops writing. Restore the folder (is the disk mounted?); the same command then continues from "
                       "its last checkpoint.")


class NoLock(Lock):
    """Replaces the lock of a folder that need not be locked. Always counts as held."""

    owned = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(Path(), {})


@contextmanager
def lock(path: Path, steal: bool = False) -> Iterator[Lock]:
    """Context manager: in the block, this process holds the lock file `path`. Creates the folder if it is missing.

    Raises RunError, which names the owner, if another process holds the lock. If the owner was a process of this host
    that has ended, its lock is taken over. If the owner cannot be looked up (before a reboot, in another container, on
    another host), its lock is taken over after SILENT_S seconds without a sign of life. For an owner with the name of
    another host, this also requires `steal`."""
    acquired = Lock(path, this_process())
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _guarded(path.parent):
            _claim(path, acquired.owner, steal)
    try:
        with repeating(BEAT_S, lambda: _beat(acquired)):
            yield acquired
    finally:
        _release(acquired)


@contextmanager
def repeating(every_s: float, call: Callable[[], None]) -> Iterator[None]:
    """Context manager: during the block, another thread calls `call` every `every_s` seconds."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(every_s):
            call()

    thread = threading.Thread(target=tick, name="ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _release(acquired: Lock) -> None:
    """Deletes the lock file. If that is impossible, as on a disk that became read-only, logs a warning and raises no
    error, so that the error that ended this run stays visible. The next run on this host takes over the lock."""
    try:
        if acquired.owned:
            acquired.path.unlink()
    except OSError as error:
        _log.warning("the run folder stays locked, because %s cannot be removed: %s", acquired.path,
                     error.strerror or error)


def _beat(acquired: Lock) -> None:
    if acquired.owned:
        with suppress(OSError):  # the next one may get through
            os.utime(acquired.path)


@contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without flock: only the lock file's O_EXCL protects
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _claim(path: Path, owner: Mapping[str, Any], steal: bool) -> None:
    if path.exists():
        other = read_json(path)  # None: its writer was killed before it had written its name
        lives = owner_lives(other) if other else False
        steal = steal or (other or {}).get("host") == socket.gethostname()
        if lives is None and steal:
            lives = _shows_life(path, other or {})
        if lives is not False:
            raise RunError(_in_use(path, other or {}, steal))
        _remove_stale(path, other)
    try:
        with open(path, "x", encoding="utf-8") as file:  # O_EXCL: also another host cannot claim it a second time
            json.dump(owner, file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise RunError(_in_use(path, read_json(path) or {}, steal)) from None


def _remove_stale(path: Path, stale: Mapping[str, Any] | None) -> None:
    aside = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    with suppress(FileNotFoundError):  # somebody else was faster; open("x") decides
        os.rename(path, aside)
        if (read_json(aside) or None) != (stale or None):
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _in_use(path: Path, other: Mapping[str, Any], steal: bool) -> str:
    here = not other or owner_lives(other) is not None
    silent = None if here else _silence(path)
    shown = "" if silent is None else f"; its last sign of life was {silent:.0f} s ago"
    way = "" if here or steal else "set run.steal_lock=true, which takes the folder of a run that gives no sign of " \
                                   "life, or "
    return (f"run folder {path.parent} is in use by process {other.get('pid')} on {other.get('host')} since "
            f"{other.get('since')}{shown}. Stop that run, or give this one another folder with run.dir; if that "
            f"process is gone, {way}delete {path}.")


def _named(owner: Mapping[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"


def _shows_life(path: Path, other: Mapping[str, Any]) -> bool:
    try:
        modified_ns = path.stat().st_mtime_ns
        while (silent := _silence(path)) is not None and silent < SILENT_S:
            _log.warning("the run folder is still locked by %s; waiting %.0f s more for a sign of life",
                         _named(other), SILENT_S - silent)
            end = time.monotonic() + min(SILENT_S - silent, 2 * BEAT_S)
            while time.monotonic() < end:
                time.sleep(_LOOK_S)
                if path.stat().st_mtime_ns != modified_ns:
                    return True
    except FileNotFoundError:  # its owner has released it
        return False
    return False


def _silence(path: Path) -> float | None:
    probe = path.with_name(f".{path.name}.{uuid4().hex}.now.tmp")
    try:
        probe.touch()
        try:
            return max(0.0, probe.stat().st_mtime - path.stat().st_mtime)
        finally:
            probe.unlink()
    except OSError:
        return None


def owner_lives(owner: Mapping[str, Any]) -> bool | None:
    """Whether the process that a lock file names as its owner is running. None if this cannot be looked up: the process
    is on another host, in another container, or from before a reboot of this host."""
    if owner.get("host") != socket.gethostname() or owner.get("system", _system()) != _system():
        return None
    return _started(owner.get("pid")) == owner.get("process")


def this_process() -> dict[str, Any]:
    """Returns the description of this process that a lock file contains as its owner."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "system": _system(), "process": _started(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"), "command": sys.argv}


def _system() -> str:
    """Returns this system's kernel boot id and process namespace; "" if unknown. Process ids can only be compared
    between processes with the same boot id and namespace."""
    try:
        return f"{_BOOT.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: Any) -> str | None:
    """Returns the start time of a process of this host, unaffected by clock changes; None without such a process."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if _BOOT.exists():
            state, *fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            return None if state in "ZX" else f"{_BOOT.read_text().strip()}/{fields[18]}"
        process = psutil.Process(int(pid))
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except (OSError, psutil.Error):
        return None
