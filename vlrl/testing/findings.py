"""Collects the findings of a check, and computes rewards from reward parts for the checks."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from vlrl.checks.answers import part_weights
from vlrl.checks.finding import Finding, grouped, shorten
from vlrl.config.registry import failure
from vlrl.data.samples import counted
from vlrl.errors import TaskError
from vlrl.task import Task

_SHOWN = 3  # findings kept per rule; further ones are counted


@dataclass
class Findings:
    """Collects the findings of a check, limited to a few for each rule, and notes about checks that were skipped."""

    by_rule: dict[str, list[Finding]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tell: Callable[[str], None] = field(default=lambda what: None, repr=False)
    """Called with a progress message for each answer that is scored and each sample that is checked."""
    answers: int = 0
    """Number of answers scored so far."""

    _known: set[Finding] = field(default_factory=set, repr=False)

    def add(self, rule: str, message: str, sample: str = "", text: str | None = None, most: int = _SHOWN) -> None:
        """Adds a finding. After `most` findings of the same rule, further findings are only counted."""
        listed = self.by_rule.setdefault(rule, [])
        new = Finding(rule=rule, message=message[:500], id=sample, text="" if text is None else shorten(text))
        if new in self._known:  # under several templates
            return
        self._known.add(new)
        if len(listed) < most:
            listed.append(new)
        else:
            listed[-1] = replace(listed[-1], more=listed[-1].more + 1)

    def take(self, found: Iterable[Finding]) -> None:
        """Adds findings that the rules of vlrl.checks made. Errors are added as findings; warnings with the same
        message are combined into one note."""
        warned = []
        for one in found:
            if one.level == "error":
                self.add(one.rule, one.message, one.id, one.text or None)
            else:
                warned.append(one)
        for group in grouped(warned):
            self.note(counted(group[0].message, len(group)))

    def scoring(self) -> None:
        """Counts one more answer and reports it as progress."""
        self.answers += 1
        self.tell(f"answer {self.answers:,}")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def all(self) -> list[Finding]:
        return [f for listed in self.by_rule.values() for f in listed]

    @contextmanager
    def guard(self, rule: str, doing: str, sample: str = "", text: str | None = None) -> Iterator[None]:
        """Context manager for calls of task code, which turns an exception into a finding of `rule`. doing: name of the
        call, for the message."""
        try:
            yield
        except TaskError as error:
            self.add(rule, str(error), sample, text)
        except (Exception, SystemExit) as error:
            self.add(rule, f"{doing} raised {failure(error)}", sample, text)


def full_marks(task: Task) -> float:
    """The reward of an answer with the value 1 for every part of positive weight and 0 for all other parts."""
    return reward_of(task, {name: float(w > 0) for name, w in part_weights(task).items()})


def reward_of(task: Task, parts: Mapping[str, float | None]) -> float:
    """The task's reward for these values of its reward parts. Reward parts with the value None are left out."""
    return float(task.combine({k: v for k, v in parts.items() if v is not None}, part_weights(task)))


class TooSlow(BaseException):
    """Raised by `timed` at the time limit. It is not a subclass of Exception, so that an `except Exception` in a
    scoring method cannot hide it."""


def timed(call: Callable[[], Any], limit: float) -> tuple[Any, float]:
    """Calls a function and returns (result, CPU seconds). Raises TooSlow after `limit` CPU seconds. This limit works
    only in the main thread and on Unix."""
    started = time.process_time()
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return call(), time.process_time() - started

    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        return call(), time.process_time() - started
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
