"""The position of a process in the run, shown in the error messages of ranks that wait for this process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

GRACE = 30.0  # A waiting rank is ended this number of seconds after the timeout, if its transport raises no error


class RankPosition:
    """The current step and phase of this rank, and the collective in which it waits."""

    def __init__(self) -> None:
        self.step = "before the first step"
        self.phases: list[str] = []
        self.doing, self.caller = "", ("", 0)
        self.since = time.monotonic()  # when this rank entered the current collective or step (time.monotonic)
        self.count = 0  # number of collectives entered so far; equal on every rank at the same point of the program
        self.patient = False  # whether this rank waits for rank 0 without a timeout

    def at(self, step: str) -> None:
        """Records that this rank begins a step."""
        self.step, self.phases, self.since = step, [], time.monotonic()

    def enter(self, doing: str, depth: int = 2) -> None:
        """Records that this rank enters a collective, described by `doing`. Also records the code outside comm.py that
        called the collective (`caller`), which is at least `depth` stack frames above."""
        frame = sys._getframe(depth)
        while frame.f_back is not None and os.path.basename(frame.f_code.co_filename) in ("comm.py", "contextlib.py"):
            frame = frame.f_back
        self.caller = frame.f_code.co_filename, frame.f_lineno
        self.doing, self.since, self.count = doing, time.monotonic(), self.count + 1

    def leave(self) -> None:
        """Records that this rank has left the collective that it entered last."""
        self.doing, self.since, self.patient = "", time.monotonic(), False

    def __str__(self) -> str:
        """Returns the position as text, such as "step 12, train: adding up gradients (update.py:117)"."""
        place = ", ".join([self.step, *self.phases[-1:]])
        return f"{place}: {self.doing} ({Path(self.caller[0]).name}:{self.caller[1]})" if self.doing else place
