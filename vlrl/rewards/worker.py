"""A worker process that answers one request at a time. A process that takes too long is killed together with everything
it started.

    worker = Worker(start)                                  # start() -> (connection, the process or its id)
    reply = worker.ask(request, lambda: (progress, seconds))
    serve(connection, reply_to)                             # in the process: bytes -> bytes, until it closes

Requests and replies are numbered, so that a late reply cannot be taken for the reply to a later request. Foreign code
in the process may fork and return in the child; such a child is ended, so that it does not reply as well.

Task scoring and math-verify run in such processes. The library pebble (5.2.3) was tested for both and does not fit.
With pebble, children of a killed worker survive. A time limit counts from the request and not from the last progress. A
task must be picklable, or be forked after torch has started its threads. A call takes 0.2 to 0.4 ms instead of 0.05 ms.
Pebble restarts a process equally fast (0.01 s forked, 0.2 s spawned), and it can set a memory limit in an initializer.
"""

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
    """The worker process ended without a reply."""


class WorkerHung(WorkerEnded):
    """The worker process took too long and was killed."""


class Worker:
    """Sends requests to a process, which the function `start` starts at the first request. If the process has ended or
    was killed, the next request starts a new one."""

    def __init__(self, start: Callable[[], tuple[Connection, subprocess.Popen[bytes] | int]]):
        self._start = start
        self.process: subprocess.Popen[bytes] | int | None = None
        """The process that answers, or its id if a fork server started it, so that it is not a child of this process.
        The process leads its own process group."""
        self.late = 0  # number of replies that did not belong to the current request and were dropped
        self._connection: Connection | None = None
        self._number = self._answered = 0
        """Number of the last request sent; `_answered` is the number of the last request whose reply was received."""

    def ask(self, request: bytes, patience: Callable[[], tuple[object, float]]) -> bytes:
        """Sends a request and returns the reply.

        `patience()` returns the current progress (any value) and how many seconds may pass until the progress changes.
        Raises WorkerEnded or WorkerHung; the next request then starts a new process."""
        try:
            while self._connection and self._connection.poll(0):  # a late reply, or the process has ended
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
        except BaseException:  # including Ctrl-C: a later reply would belong to no request
            self.kill()
            raise

    def _reply(self) -> bytes | None:
        """Receives one reply; returns None if it does not belong to the current request."""
        assert self._connection
        number, reply = split_message(self._connection.recv_bytes())
        if number == self._number != self._answered:
            self._answered = number
            return reply
        self.late += 1
        _log.warning("process %s sent a reply that belongs to no pending request; it was dropped (%d so far)",
                     self.process, self.late)
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
        """To be called in a forked child process: drops the worker process without killing it, because it belongs to
        the parent."""
        process, connection = self.process, self._connection
        self.process = self._connection = None
        if connection:
            connection.close()
        if isinstance(process, subprocess.Popen):
            process.returncode = 0  # not a child of this process, so it cannot be waited for


def _await(connection: Connection, patience: Callable[[], tuple[object, float]]) -> None:
    """Waits until a reply can be received. `patience` is described in `Worker.ask`. Raises WorkerHung if the progress
    has not changed for too long."""
    at, seconds = patience()
    quiet, then = 0.0, time.monotonic()
    while not connection.poll(tick := min(_TICK_S, seconds / 4)):
        (now_at, seconds), now = patience(), time.monotonic()
        quiet = 0.0 if now_at != at else quiet + min(now - then, 2 * tick)  # not time spent stopped
        at, then = now_at, now
        if quiet > seconds:
            raise WorkerHung
