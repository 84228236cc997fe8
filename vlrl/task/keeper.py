"""A process that forks others, kept from before torch has started its threads.

    keeper = Keeper(work)                           # before the model is loaded
    connection, process = keeper.start("norm1000")  # work(connection, "norm1000") runs in a new process

A process with the threads and locks of torch must not be forked, so one that has none of them yet is kept, asleep, with
the task and its samples as they were then. They are shared by the fork and never sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vlrl.monitoring.signals import STOPS

Work = Callable[[Connection, str], None]


class Keeper:
    """Forks a process for `work` whenever it is asked; linux only."""

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
        """Returns the connection to a new process, which works with that line of text, and its id. Raises
        ChildProcessError."""
        mine, other = socket.socketpair()
        with other, self._lock:
            socket.send_fds(self._control, [text.encode() + b"\n"], [other.fileno()])
            reply = self._control.recv(8)
        if len(reply) < 8:
            raise ChildProcessError("the process that starts others for the task has gone")
        return Connection(mine.detach()), int.from_bytes(reply, "little")

    def close(self) -> None:
        """Ends it; the processes that it has started end with it."""
        if self.process:
            self._control.close()
            with contextlib.suppress(OSError):
                os.kill(self.process, signal.SIGKILL)
                os.waitpid(self.process, 0)
            self.process = 0


def _alone(call: Callable[..., Any], *given: Any) -> None:
    """All that a forked process does; it runs nothing that the parent has for its own end."""
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


def _die_with(parent: int) -> None:
    """Has the kernel end this process with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _keep(theirs: socket.socket, control: socket.socket, work: Work, parent: int) -> None:
    """Forks a process whenever it is asked, until nobody can ask any more."""
    theirs.close()
    _die_with(parent)
    os.setsid()
    for number in STOPS:  # what asks a run to end, Slurm each of its processes, is for the training process alone
        signal.signal(number, lambda *_: None)  # no SIG_IGN, which programs inherit
    gc.freeze()
    while True:
        text, (*handles,), _, _ = socket.recv_fds(control, 4096, 1)
        if not handles:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        me = os.getpid()
        child = os.fork()
        if not child:
            control.close()
            _alone(_begin, work, Connection(handles[0]), text.decode().strip(), me)
        os.close(handles[0])
        control.send(child.to_bytes(8, "little"))


def _begin(work: Work, connection: Connection, text: str, parent: int) -> None:
    _die_with(parent)
    os.setpgid(0, 0)
    work(connection, text)
