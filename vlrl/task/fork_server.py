"""A fork server: a process that is started before torch has started its threads, and that forks further processes on
request.

    server = ForkServer(work)                       # before the model is loaded
    connection, process = server.start("norm1000")  # work(connection, "norm1000") runs in a new process

A process with torch's threads and locks must not be forked. The fork server has none of them. It holds the task and its
samples as they were when it was started; the processes that it forks share this memory, so that the samples never have
to be sent. When the fork server or its creator ends, all processes started by the fork server end too, including their
descendants in other sessions."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TextIO

import psutil

from vlrl.monitoring.signals import STOPS

Work = Callable[[Connection, str], None]
MOST_PRINTED = 2**20
"""Maximum number of characters that task code in one process may print to each of stdout and stderr."""
_ENDING = signal.SIGRTMIN + 3 if sys.platform == "linux" else signal.SIGTERM
"""The signal on which a fork server ends with all its descendants. It differs from the signals that stop a run
(signals.STOPS)."""
_END_S = 10.0
_PDEATHSIG, _SUBREAPER = 1, 36
"""Two prctl options. _PDEATHSIG sets the signal that a process gets when its parent dies. With _SUBREAPER, orphaned
descendants become children of this process."""


class ForkServerLost(ChildProcessError):
    """Raised when the fork server has ended, so that no process can be started."""


class ForkServer:
    """Starts processes on request. Each process is forked from the fork server and calls `work`. Linux only."""

    def __init__(self, work: Work):
        self._control, other = socket.socketpair()
        self._lock = threading.Lock()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # what is in its buffer would be written twice
                stream.flush()
        parent = os.getpid()
        self.process = os.fork()
        if not self.process:
            _alone(_keep, self._control, other, work, parent)
        other.close()

    def start(self, text: str) -> tuple[Connection, int]:
        """Starts a process that calls `work(connection, text)`; `text` is a single line. Returns (the connection to
        this process, the id of this process). Raises ForkServerLost."""
        mine, other = socket.socketpair()
        with other, self._lock, contextlib.suppress(ConnectionError, BrokenPipeError):
            reply = b""
            socket.send_fds(self._control, [text.encode() + b"\n"], [other.fileno()])
            reply = self._control.recv(8)
        if len(reply) < 8:
            mine.close()
            raise ForkServerLost(f"the fork server (pid {self.process}), which starts the processes that run task "
                                 "code, was killed from outside this run, e.g. because memory ran out")
        return Connection(mine.detach()), int.from_bytes(reply, "little")

    def close(self) -> None:
        """Ends the fork server and all processes that it and its children have started."""
        if self.process:
            self._control.close()
            with contextlib.suppress(OSError):
                os.kill(self.process, _ENDING)
                end = time.monotonic() + _END_S
                while not os.waitpid(self.process, os.WNOHANG)[0]:
                    if time.monotonic() > end:
                        os.kill(self.process, signal.SIGKILL)
                    time.sleep(0.002)
            self.process = 0


def _alone(call: Callable[..., Any], *given: Any) -> None:
    code = 1
    try:
        call(*given)
        code = 0
    except BaseException:
        with contextlib.suppress(Exception):
            import traceback

            traceback.print_exc()
    finally:
        os._exit(code)


def _die_with(parent: int, number: int = signal.SIGKILL) -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def _end(*_: Any) -> None:
    """Kills all descendants of this process, also orphaned ones (which have become its children), and exits."""
    me, until = psutil.Process(), time.monotonic() + _END_S / 2
    while (below := me.children(recursive=True)) and time.monotonic() < until:
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(below, timeout=0.2)
    os._exit(0)


def _keep(theirs: socket.socket, control: socket.socket, work: Work, parent: int) -> None:
    theirs.close()
    signal.signal(_ENDING, _end)
    _die_with(parent, _ENDING)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    os.setsid()
    for number in STOPS:  # only the training process handles the signals that stop a run (Slurm signals all)
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which started programs would inherit
    workers: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(workers))
    gc.freeze()
    while True:
        text, (*handles,), _, _ = socket.recv_fds(control, 4096, 1)
        if not handles:
            _end()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        me = os.getpid()
        child = os.fork()
        if not child:
            control.close()
            _alone(_begin, work, Connection(handles[0]), text.decode().strip(), me)
        workers.add(child)
        os.close(handles[0])
        control.send(child.to_bytes(8, "little"))


def _reap(workers: set[int]) -> None:
    """Reaps ended child processes whose id is not in `workers`. Workers are only reaped at the next request: until
    then, a worker may still be killed by its process id, which therefore must not be reused."""
    for process in psutil.Process().children():
        if process.pid not in workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _begin(work: Work, connection: Connection, text: str, parent: int) -> None:
    for number in (signal.SIGCHLD, _ENDING):
        signal.signal(number, signal.SIG_DFL)
    _die_with(parent)
    os.setpgid(0, 0)
    os.set_inheritable(connection.fileno(), False)
    sys.stdout, sys.stderr = _Printed(sys.stdout), _Printed(sys.stderr)
    work(connection, text)


class _Printed:
    """A text stream that prints the first MOST_PRINTED characters, then a note, and drops everything after this."""

    def __init__(self, stream: TextIO):
        self._stream, self._left = stream, MOST_PRINTED

    def write(self, text: str) -> int:
        if self._left > 0:
            self._stream.write(text[:self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._stream.write(f"\n[the code of this task has printed {MOST_PRINTED} characters; what this process "
                                   "prints from here on is left out]\n")
            self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
