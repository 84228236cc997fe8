"""Runs work in threads and returns the results in order.

A consumer can process the first results of a slow producer while the producer computes the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from vlrl.monitoring.metrics import Clock

T = TypeVar("T")
R = TypeVar("R")


class OverlappedWork(Generic[T]):
    """Context manager that calls `work(i, value)` for numbered values in threads:

        with OverlappedWork(score, clock, "score") as scoring:
            answers = engine.generate(requests, scoring.begin)
            groups = scoring.results(answers)

    At most `threads` calls run at once. If `begin` was never called and threads=1, `results` does the work in the
    caller's thread. The clock counts the time of the calls for `phase`, even if they run during another phase."""

    def __init__(self, work: Callable[[int, Any], T], clock: Clock, phase: str, threads: int = 1):
        self._work, self._clock, self._phase, self._threads = work, clock, phase, threads
        self._thread = ThreadPoolExecutor(threads, phase)
        self._begun: dict[int, Future[T]] = {}
        self._spent, self._at_work, self._since = 0.0, 0, 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> OverlappedWork[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def begin(self, i: int, value: Any) -> None:
        """Passes the i-th value to a thread, and returns at once."""
        self._begun[i] = self._thread.submit(self._timed, i, value)

    def results(self, values: Sequence[Any]) -> list[T]:
        """Returns the results of `work` for all `values`, in order. Values that were passed to `begin` are not
        processed twice. Raises the error of the first value whose work failed."""
        with self._clock(self._phase):
            if not self._begun and self._threads == 1:
                return [self._work(i, value) for i, value in enumerate(values)]
            start = time.perf_counter()
            for i, value in enumerate(values):
                if i not in self._begun:
                    self.begin(i, value)
            finished = [self._begun[i].result() for i in range(len(values))]
            waited = time.perf_counter() - start
        self._clock.add_parallel(self._phase, max(self._spent - waited, 0.0))
        return finished

    def _timed(self, i: int, value: Any) -> T:
        with self._lock:
            self._since = self._since if self._at_work else time.perf_counter()
            self._at_work += 1
        try:
            return self._work(i, value)
        finally:
            with self._lock:
                self._at_work -= 1
                self._spent += 0.0 if self._at_work else time.perf_counter() - self._since


def parallel_map(threads: int, work: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """Returns `work(value)` for every value, in order, computed in `threads` threads."""
    values = list[T](values)
    if threads == 1 or len(values) < 2:
        return [work(value) for value in values]
    with ThreadPoolExecutor(min(threads, len(values)), "score") as pool:
        return list(pool.map(work, values))
