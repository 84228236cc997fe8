"""Work in a thread that a page watches: what it says meanwhile, stopping it, its end. No Gradio, no torch."""

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
"""A job at which nobody has looked for so long stops: its page was closed."""
_BETWEEN_S = 0.04
_log = logging.getLogger("vlrl.app")


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    phase: str = "waiting"
    """What it does; at the end "done", "stopped" or "failed"."""
    done: float = 0.0
    """Share of the phase, in [0, 1]."""
    texts: tuple[str, ...] = ()
    """What the answers hold so far."""
    remark: str = ""
    """A remark; of a job that failed, why."""
    result: Any = None

    @property
    def ended(self) -> bool:
        return self.phase in ("done", "stopped", "failed")


class Stopped(Exception):
    """The job was asked to stop."""


class Job:
    """`work(job)` in a thread of its own. It tells its progress, and checks now and then whether it is to stop."""

    def __init__(self, work: Callable[[Job], Any]):
        self._work, self._now, self._looked = work, Progress(), time.monotonic()
        self._changed, self._stop = threading.Condition(), threading.Event()

    def tell(self, phase: str | None = None, **changes: Any) -> None:
        """Changes the progress; a phase begins at 0 with no remark."""
        with self._changed:
            fresh = {"phase": phase, "done": 0.0, "remark": ""} if phase and phase != self._now.phase else {}
            then = replace(self._now, **{**fresh, **changes})
            if then != self._now:
                self._now = then
                self._changed.notify_all()

    def check(self) -> None:
        """Raises Stopped when the job is to end."""
        if self._stop.is_set() or time.monotonic() - self._looked > PATIENCE_S:
            raise Stopped

    def stop(self) -> None:
        """Asks the job to end; it does so at its next check."""
        self._stop.set()

    def follow(self) -> Iterator[Progress]:
        """Starts the work and gives its progress whenever it has changed, the end last. Whoever leaves stops it."""
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
        except Stopped:
            self.tell("stopped")
        except VlrlError as error:
            self.tell("failed", remark=str(error))
        except (Exception, SystemExit) as error:  # a task's code, a decoder, a library
            _log.error("the playground failed", exc_info=error)
            self.tell("failed", remark=failure(error))
