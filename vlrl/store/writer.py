"""Writes files in the background while the next step computes.

    with BackgroundWriter() as writer:
        writer.submit(lambda: folder.write_rollouts(...))
        writer.flush()                                      # returns when it is on the disk, or raises its error

Writes run in order. A checkpoint is saved only after a flush, so after a crash, a resumed run repeats all lost work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundWriter:
    """Runs writes in one thread. At most `most` writes are pending; if there are more, `submit` waits."""

    def __init__(self, most: int = 1):
        self.most = most
        self._waiting: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, "writer")

    def submit(self, write: Callable[[], Any]) -> None:
        """Queues a write. If an earlier write failed, raises its error instead."""
        self._settle(self.most - 1)
        self._waiting.append(self._thread.submit(write))

    def flush(self) -> None:
        """Waits until all queued writes are done. Raises the first error."""
        self._settle(0)

    def close(self) -> None:
        """Waits for all queued writes and ends the thread. Raises the error of a failed write."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, left: int) -> None:
        while self._waiting and (len(self._waiting) > left or self._waiting[0].done()):
            self._waiting.popleft().result()
