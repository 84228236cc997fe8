"""A process that answers one request at a time and is killed, with everything it started, when it takes too long.

    worker = Worker(start)                                  # start() -> (connection, the process or its id)
    reply = worker.ask(request, lambda: (progress, seconds))
    serve(connection, reply_to)                             # in the process: bytes -> bytes, until it closes

Requests and replies are numbered, so that a reply is matched to its request. Only the process itself replies: a copy
that foreign code forks and returns from is ended.

Task scoring and the verifier of mathematical answers use it. The library pebble (5.2.3) was measured for both and does
not fit: children of a killed worker live on, a limit counts from the request and not from the last progress, a task
must be picklable or forked after torch has started its threads, and a call costs 0.2 to 0.4 ms where this one takes
0.05. It restarts as fast (0.01 s forked, 0.2 s spawned) and takes a memory limit as an initializer."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from vlrl.rewards._wire import ending_forked_copies, numbered_message, serve, split_message

__all__ = ["Worker", "WorkerEnded", "WorkerHung", "ending_forked_copies", "serve"]
_TICK_S = 0.5
_log = logging.getLogger(__name__)


class WorkerEnded(Exception):
    """The process ended without a reply."""


class WorkerHung(WorkerEnded):
    """The process took too long and was killed."""


class Worker:
    """One process, started at the first request and again after it was killed or ended."""

    def __init__(self, start: Callable[[], tuple[Connection, subprocess.Popen[bytes] | int]]):
        self._start = start
        self.process: subprocess.Popen[bytes] | int | None = None
        """The process itself, or the id of one that is nobody's child here; it leads its own group."""
        self.late = 0
        """Replies that came to no request of now, and were dropped."""
        self._connection: Connection | None = None
        self._number = self._answered = 0
        """Of the last request, and of the last one that has its reply."""

    def ask(self, request: bytes, patience: Callable[[], tuple[object, float]]) -> bytes:
        """The reply to a request. `patience` gives the current progress and the seconds allowed since it last changed.
        Raises WorkerEnded or WorkerHung, after which the next request starts a new process."""
        try:
            while self._connection and self._connection.poll(0):  # nothing was asked: it has ended, or replies late
                self._reply()
        except (EOFError, OSError):
            self.kill()
        if self._connection is None:
            self._connection, self.process = self._start()
        self._number += 1
        try:
            self._connection.send_bytes(numbered_message(self._number, request))
            while True:
                _await(self._connection, patience)
                if (reply := self._reply()) is not None:
                    return reply
        except (EOFError, OSError):
            self.kill()
            raise WorkerEnded from None
        except BaseException:  # Ctrl-C too: a reply that comes later belongs to no request
            self.kill()
            raise

    def _reply(self) -> bytes | None:
        """The received reply; None if it belongs to another request."""
        assert self._connection
        number, reply = split_message(self._connection.recv_bytes())
        if number == self._number != self._answered:
            self._answered = number
            return reply
        self.late += 1
        _log.warning("process %s sent a reply that nothing waits for (%d so far): dropped", self.process, self.late)
        return None

    def kill(self) -> None:
        """Kills the process and everything it started, if it is running."""
        process, connection = self.process, self._connection
        self.process = self._connection = None
        if connection and process:
            connection.close()
            for end in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    end(process if isinstance(process, int) else process.pid, signal.SIGKILL)
            if not isinstance(process, int):
                process.wait()

    def forget(self) -> None:
        """Called in a forked process: the worker stays the parent's."""
        process, connection = self.process, self._connection
        self.process = self._connection = None
        if connection:
            connection.close()
        if isinstance(process, subprocess.Popen):
            process.returncode = 0  # nobody here waits for it


def _await(connection: Connection, patience: Callable[[], tuple[object, float]]) -> None:
    """Waits until there is something to read."""
    at, seconds = patience()
    quiet, then = 0.0, time.monotonic()
    while not connection.poll(tick := min(_TICK_S, seconds / 4)):
        (now_at, seconds), now = patience(), time.monotonic()
        quiet = 0.0 if now_at != at else quiet + min(now - then, 2 * tick)  # a stopped process does not hang
        at, then = now_at, now
        if quiet > seconds:
            raise WorkerHung
