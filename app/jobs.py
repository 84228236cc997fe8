"""Background work in a thread that a page watches: progress, cancellation, result. No Gradio, no torch."""

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
"""A job that nobody has polled for this many seconds stops: its page was closed."""
_BETWEEN_S = 0.04
_log = logging.getLogger("vlrl.app")


@dataclass(frozen=True)
class Progress:
    """The state of a job."""

    phase: str = "waiting"
    """The current phase; finally "done", "stopped" or "failed"."""
    done: float = 0.0
    """Completed share of the phase, in [0, 1]."""
    texts: tuple[str, ...] = ()
    """The answers so far."""
    remark: str = ""
    """A remark; for a failed job, the error."""
    result: Any = None

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "stopped", "failed")


class JobStopped(Exception):
    """Raised inside a job that was asked to stop."""


class Job:
    """Runs `work(job)` in its own thread. `work` reports progress and checks regularly for cancellation."""

    def __init__(self, work: Callable[[Job], Any]):
        self._work, self._now, self._looked = work, Progress(), time.monotonic()
        self._changed, self._stop = threading.Condition(), threading.Event()

    def tell(self, phase: str | None = None, **changes: Any) -> None:
        """Updates the progress; a new phase starts at 0 without a remark."""
        with self._changed:
            fresh = {"phase": phase, "done": 0.0, "remark": ""} if phase and phase != self._now.phase else {}
            then = replace(self._now, **{**fresh, **changes})
            if then != self._now:
                self._now = then
                self._changed.notify_all()

    def check(self) -> None:
        """Raises JobStopped if the job was asked to stop."""
        if self._stop.is_set() or time.monotonic() - self._looked > PATIENCE_S:
            raise JobStopped

    def stop(self) -> None:
        """Requests the job to stop at its next check."""
        self._stop.set()

    def follow(self) -> Iterator[Progress]:
        """Starts the work and yields its progress on every change, the final state last. Abandoning the iterator stops
        it.
        """
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
        except (Exception, SystemExit) as error:  # a task's code, a decoder, a library
            _log.error("the playground failed", exc_info=error)
            self.tell("failed", remark=failure(error))
