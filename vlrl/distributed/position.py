"""The position of a process in the run, for ranks that wait for it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

GRACE = 30.0
"""Seconds past the timeout after which a waiting rank is ended, if its transport raises no error."""


class RankPosition:
    """The step of this rank, its phase, and the collective in which it waits."""

    def __init__(self) -> None:
        self.step = "before the first step"
        self.phases: list[str] = []
        self.doing, self.caller = "", ("", 0)
        self.since = time.monotonic()
        """When it entered the collective or step."""
        self.count = 0
        """Collectives entered so far; equal on every rank at the same point."""
        self.patient = False
        """Whether it waits for rank 0 without a timeout."""

    def at(self, step: str) -> None:
        """A step begins."""
        self.step, self.phases, self.since = step, [], time.monotonic()

    def enter(self, doing: str, depth: int = 2) -> None:
        """A collective begins; `caller` is the code outside comm.py that asked for it."""
        frame = sys._getframe(depth)
        while frame.f_back is not None and os.path.basename(frame.f_code.co_filename) in ("comm.py", "contextlib.py"):
            frame = frame.f_back
        self.caller = frame.f_code.co_filename, frame.f_lineno
        self.doing, self.since, self.count = doing, time.monotonic(), self.count + 1

    def leave(self) -> None:
        """The collective is over."""
        self.doing, self.since, self.patient = "", time.monotonic(), False

    def __str__(self) -> str:
        """Example: step 12, train: adding up gradients (update.py:117)"""
        place = ", ".join([self.step, *self.phases[-1:]])
        return f"{place}: {self.doing} ({Path(self.caller[0]).name}:{self.caller[1]})" if self.doing else place
