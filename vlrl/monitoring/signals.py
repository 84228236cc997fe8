"""Signals that end a run: the first one asks it to stop, the second stops it, the third ends the process.

    SIGINT (Ctrl-C)       the step in flight may take its time
    SIGTERM, SIGUSR1      it is given up after `grace` seconds: who sends them (Slurm, Kubernetes) kills soon after

Stopping is a KeyboardInterrupt in the main thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a run."""
_TWICE_S = 1.0
"""A launcher and the terminal may both send what was meant once: what comes so soon after the first is the first."""


class StopSignals:
    """A context manager. `first(number)` is called by the first signal, in the main thread, between any two lines."""

    def __init__(self, first: Callable[[int], object], grace: float, tell: Callable[[str], object]):
        self._first, self._grace, self._tell = first, grace, tell
        self._before: dict[int, Any] = {}
        self._since: float | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGALRM)}
            for number in STOPS:
                signal.signal(number, self._on_signal)
            signal.signal(signal.SIGALRM, self._over)
        return self

    def __exit__(self, *_: object) -> None:
        self.completed()
        self._restore()

    def completed(self) -> None:
        """Notes that the step in flight has ended: its time is not limited any more."""
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._since = time.monotonic()
            if number != signal.SIGINT:
                signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-3))
            self._first(number)
        elif time.monotonic() - self._since > _TWICE_S:
            self._stop()

    def _over(self, number: int, frame: FrameType | None) -> None:
        self._tell(f"\nThe step in flight was not done in {self._grace:g} s (save.grace) and is given up.\n")
        self._stop()

    def _stop(self) -> None:
        self.completed()
        self._restore()
        raise KeyboardInterrupt

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def to_terminal(text: str) -> None:
    """Straight to the terminal: a signal may fall into the middle of a print."""
    os.write(2, text.encode())
