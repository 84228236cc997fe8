"""A watchdog that ends a run which hangs, and writes the stacks of its threads to disk.

Every phase of a step is a sign of life (metrics.phase). After limits.stuck_s seconds without one, the stacks are
written to stuck-rank-00000.txt in the run folder, and the exception Stuck is raised in the main thread, so that engines
and files are closed as after any error. If the main thread is in native code, the process is killed."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vlrl.distributed import comm
from vlrl.errors import TrainingError
from vlrl.monitoring import metrics

GRACE_S = 60.0  # number of seconds without a sign of life (saving gives some) in which a run must end by itself
_SIGNAL = signal.SIGVTALRM
_TICK_S = 5.0
_FAREWELL_S = 5.0  # time limit in seconds for the last messages of a process that is ended


class Stuck(TrainingError):
    """Raised in the main thread if the run gave no sign of life for limits.stuck_s seconds."""


class Watchdog:
    """Context manager: during the block, ends this process if it hangs. `seconds` is limits.stuck_s; 0 = off."""

    def __init__(self, seconds: float, folder: Path):
        self.seconds, self.folder = seconds, folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._message = ""
        self._before: Any = None
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Watchdog:
        if self.seconds:
            if self._main:
                self._before = signal.signal(_SIGNAL, self._raise)
            metrics.sign_of_life()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._ended.set()
        if self.seconds:
            self._thread.join()
            if self._main:
                signal.signal(_SIGNAL, self._before)

    def _raise(self, number: int, frame: Any) -> None:
        raise Stuck(self._message)

    def _watch(self) -> None:
        tick, quiet, last, then = min(_TICK_S, self.seconds / 4), 0.0, metrics.last_sign_of_life(), time.monotonic()
        while not self._ended.wait(tick):
            now, life = time.monotonic(), metrics.last_sign_of_life()
            # a process that was stopped for hours (SIGSTOP) was not stuck
            quiet = 0.0 if life != last else quiet + min(now - then, 2 * tick)
            last, then = life, now
            if quiet > self.seconds:
                self._end(life)
                return

    def _end(self, life: tuple[int, str]) -> None:
        phase = life[1]
        path = self.folder / f"stuck-rank-{comm.rank():05d}.txt"
        try:
            with open(path, "w", encoding="utf-8") as file:
                print(f"nothing since the phase '{phase}' began, {time.strftime('%Y-%m-%d %H:%M:%S %z')}", file=file,
                      flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            where = f"The stacks of all threads are in {path}"
        except OSError as error:
            where = f"The stacks could not be written to {path} ({error.strerror})"
        waits = comm.describe_wait()
        waiting = f": {waits}" if waits else ""
        self._message = (f"nothing has happened for more than limits.stuck_s={self.seconds:g} seconds since the phase "
                         f"'{phase}' began{waiting}. {where}; the same command resumes from the last checkpoint. If "
                         "a phase needs more time than that, raise limits.stuck_s.")
        if self._main:
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            while not self._ended.wait(GRACE_S):
                if metrics.last_sign_of_life() == life:
                    break
                life = metrics.last_sign_of_life()  # a checkpoint is being written
            else:
                return
        last = threading.Thread(target=self._farewell, daemon=True)
        last.start()
        last.join(_FAREWELL_S)
        os._exit(1)

    def _farewell(self) -> None:
        """Prints the reason, removes the lock and flushes the output, before the process is killed. Runs in a thread,
        as a full pipe or a lost disk must not block the kill."""
        message = f"\nerror: {self._message} The process could not end by itself and is ended.\n".encode()
        lock = self.folder / "run.lock"
        for act in (lambda: os.write(2, message), lambda: lock.unlink(missing_ok=True) if comm.is_main() else None,
                    sys.stdout.flush):
            with suppress(OSError, ValueError):
                act()
