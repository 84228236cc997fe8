"""A memory cache of decoded video frames, so that a clip shown by several prompts or steps is decoded only once.

The cache key is the hash of the video file, the sampling settings, and the start and end of the clip. A file is hashed
again when its size or modification time changes. The cache never changes pixels."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vlrl.store.files import file_sha256

_MOST_HASHES = 2**16


class ClipCache:
    """A thread-safe cache of at most `mib` MiB of decoded frames (0 disables the cache). The least recently used clips
    are dropped first."""

    def __init__(self, mib: int):
        self._room, self._used = mib << 20, 0
        self._lock = threading.Lock()
        self._clips: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._hashes: dict[tuple[str, int, int], str] = {}

    def sha256(self, path: Path) -> str:
        """The SHA-256 hash of a file, as a hexadecimal string. The file is hashed again only if its size or
        modification time has changed. Raises OSError."""
        status = path.stat()
        file = str(path), status.st_size, status.st_mtime_ns
        digest = self._hashes.get(file)
        if digest is None:
            digest = file_sha256(path)
            if self._room:
                if len(self._hashes) >= _MOST_HASHES:
                    self._hashes.clear()
                self._hashes[file] = digest
        return digest

    def clip(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Returns the clip cached under `key`. If there is no such clip, `read()` decodes it, and it is cached. If
        another thread is decoding the clip, waits for the result of that thread. Raises the errors of `read()`."""
        if not self._room:
            return read()
        with self._lock:
            cached = self._clips.get(key)
            if cached is None:
                own = self._clips[key] = Future()
            else:
                self._clips.move_to_end(key)
        if cached is not None:
            return cached.result()
        try:
            clip = read()
        except BaseException as error:
            with self._lock:
                del self._clips[key]
            own.set_exception(error)
            raise
        own.set_result(clip)
        self._make_room(clip)
        return clip

    def _make_room(self, added: Any) -> None:
        with self._lock:
            self._used += _size(added)
            for key in [k for k, future in self._clips.items() if future.done()]:
                if self._used <= self._room:
                    break
                self._used -= _size(self._clips.pop(key).result())


def _size(clip: Any) -> int:
    return sum(w * h * 3 for w, h in {id(f): f.size for f in clip.frames}.values())
