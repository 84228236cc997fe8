"""Signals that end a run: the first signal asks the run to stop, the second stops it at once, the third ends the
process.

    SIGINT (Ctrl-C)       the current step may take its time
    SIGTERM, SIGUSR1      the current step is dropped after `grace` seconds: Slurm and Kubernetes kill soon after
    SIGHUP                as for SIGTERM, and no more output goes to the closed terminal; under nohup, which ignores
                          SIGHUP, the run continues

A run is stopped by raising KeyboardInterrupt in the main thread."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # signals that ask a run to stop
_USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler}
_TWICE_S = 1.0
"""Launcher and terminal may both send the same signal, so a further signal within this number of seconds is ignored."""


class StopSignals:
    """Context manager that handles stop signals in its block: calls `first(number)` at the first signal. The call is
    made in the main thread and may come between any two lines of code. grace: seconds that the current step gets
    after SIGTERM, SIGUSR1 and SIGHUP. tell: prints a message."""

    def __init__(self, first: Callable[[int], object], grace: float, tell: Callable[[str], object]):
        self._first, self._grace, self._tell = first, grace, tell
        self._before: dict[int, Any] = {}
        self._since: float | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in (*_heeded(), signal.SIGALRM)}
            for number in _heeded():
                signal.signal(number, self._on_signal)
            signal.signal(signal.SIGALRM, self._over)
        return self

    def __exit__(self, *_: object) -> None:
        self.completed()
        self._restore()

    @property
    def came(self) -> bool:
        """Whether a stop signal has arrived."""
        return self._since is not None

    def completed(self) -> None:
        """Records that the current step has ended, so that its time is no longer limited."""
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            detach_terminal()
        if self._since is None:
            self._since = time.monotonic()
            if number != signal.SIGINT:
                signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-3))
            self._first(number)
        elif time.monotonic() - self._since > _TWICE_S:
            self._stop()

    def _over(self, number: int, frame: FrameType | None) -> None:
        self._tell(f"\nThe current step did not finish within {self._grace:g} s (save.grace) and is given up.\n")
        self._stop()

    def _stop(self) -> None:
        self.completed()
        # a signal that was ignored before (a background job of a script) would no longer end the process
        self._before = {number: _USUAL.get(number, signal.SIG_DFL) if handler is signal.SIG_IGN else handler
                        for number, handler in self._before.items()}
        self._restore()
        raise KeyboardInterrupt

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextlib.contextmanager
def as_interrupt() -> Iterator[None]:
    """Context manager that raises KeyboardInterrupt in its block at the first stop signal. After that signal, only
    Ctrl-C raises it again. Has no effect outside of the main thread."""
    begun: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            detach_terminal()
        begun.append(number)
        if len(begun) == 1 or number == signal.SIGINT:
            raise KeyboardInterrupt

    alone = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in (_heeded() if alone else ())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _heeded() -> list[int]:
    return [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def write_to_terminal(text: str) -> None:
    """Writes text directly to the terminal, if there still is one. Used by signal handlers, as a signal may have
    interrupted a print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def detach_terminal() -> None:
    """Redirects output that goes to a closed terminal to the null device, because writing to it would raise an error
    and end the run before the run is saved. Files and pipes are not affected."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
    os.close(nowhere)
