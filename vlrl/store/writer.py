"""Files written in the background, while the next step computes.

    with BackgroundWriter() as writer:
        writer.submit(lambda: folder.write_rollouts(...))
        writer.flush()                                      # it is on disk, or its error is raised

Writes run in order. If the process dies only work is lost that a resumed run repeats: a checkpoint is made after a
flush."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundWriter:
    """One writer thread with at most `most` pending writes: `submit` waits for room."""

    def __init__(self, most: int = 1):
        self.most = most
        self._waiting: deque[Future[Any]] = deque()
        self._thread = ThreadPoolExecutor(1, "writer")

    def submit(self, write: Callable[[], Any]) -> None:
        """Queues a write. Raises the error of an earlier write, which drops this one."""
        self._settle(self.most - 1)
        self._waiting.append(self._thread.submit(write))

    def flush(self) -> None:
        """Waits until everything is written; raises the first error."""
        self._settle(0)

    def close(self) -> None:
        """Flushes and ends the thread, also when a write fails, whose error is raised."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, left: int) -> None:
        """Waits until at most `left` writes are pending."""
        while self._waiting and (len(self._waiting) > left or self._waiting[0].done()):
            self._waiting.popleft().result()
