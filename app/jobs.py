"""Runs work in a background thread and reports its progress and result to a page, which can cancel it. No Gradio, no
torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vlrl.config.registry import failure
from vlrl.errors import VlrlError

PATIENCE_S = 30.0
"""A job stops if nobody has polled it for this many seconds, because its page was closed."""
_BETWEEN_S = 0.04
_log = logging.getLogger("vlrl.app")


@dataclass(frozen=True)
class Progress:
    """A snapshot of a job's state."""

    phase: str = "waiting"
    """What the job is doing; at the end "done", "stopped" or "failed"."""
    done: float = 0.0
    """Completed share of the phase, in [0, 1]."""
    texts: tuple[str, ...] = ()
    """The text of each answer generated so far."""
    remark: str = ""
    """A remark on the phase; the error message if the job failed."""
    result: Any = None

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "stopped", "failed")


class JobStopped(Exception):
    """Raised inside a job that was asked to stop, to end its work."""


class Job:
    """Runs `work(job)` in a background thread. `work` reports progress with `tell`, and calls `check` regularly so that
    the job can be cancelled."""

    def __init__(self, work: Callable[[Job], Any]):
        self._work, self._now, self._looked = work, Progress(), time.monotonic()
        self._changed, self._stop = threading.Condition(), threading.Event()

    def tell(self, phase: str | None = None, **changes: Any) -> None:
        """Updates the reported progress. A new phase starts with a `done` of 0 and without a remark."""
        with self._changed:
            fresh = {"phase": phase, "done": 0.0, "remark": ""} if phase and phase != self._now.phase else {}
            then = replace(self._now, **{**fresh, **changes})
            if then != self._now:
                self._now = then
                self._changed.notify_all()

    def check(self) -> None:
        """Raises JobStopped if the job was asked to stop, or if nobody has polled it for PATIENCE_S seconds."""
        if self._stop.is_set() or time.monotonic() - self._looked > PATIENCE_S:
            raise JobStopped

    def stop(self) -> None:
        """Asks the job to stop at its next `check`."""
        self._stop.set()

    def follow(self) -> Iterator[Progress]:
        """Starts the work and yields its Progress after every change, ending with the final state. Closing the iterator
        early stops the job."""
        threading.Thread(target=self._run, name="vlrl-playground", daemon=True).start()
        shown: Progress | None = None
        try:
            while shown is None or not shown.ended:
                with self._changed:
                    self._changed.wait_for(lambda before=shown: self._now is not before, timeout=1.0)
                    now, self._looked = self._now, time.monotonic()
                if now is not shown:
                    shown = now
                    yield now
                    if not now.ended:
                        time.sleep(_BETWEEN_S)
        finally:
            self.stop()

    def _run(self) -> None:
        try:
            result = self._work(self)
            self.tell("done", done=1.0, result=result)
        except JobStopped:
            self.tell("stopped")
        except VlrlError as error:
            self.tell("failed", remark=str(error))
        except (Exception, SystemExit) as error:  # from code of a task, a decoder or a library
            _log.error("a job of the playground failed", exc_info=error)
            self.tell("failed", remark=failure(error))
