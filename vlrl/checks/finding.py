"""`Finding`, what every checker reports (of data, tasks and this machine), and findings as lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vlrl.data.reasons import counted, shape

Level = Literal["ok", "info", "missing", "warning", "error"]
"""ok: it works. info: worth knowing. missing: something optional is not installed. warning: it may be intended.
error: a check command exits with code 1, and a run does not start."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check of a row, a file, a task, one of its samples, or this machine."""

    message: str
    """What is wrong, with the value and the way out; it does not name the row."""
    rule: str = ""
    """Name of the rule, e.g. "box" or "field/spans"; empty until the rule's name is filled in."""
    level: Level = "error"
    id: str = ""
    """Of the row or sample; "" for the file, task or machine as a whole."""
    where: str = ""
    """File and line (or number of the row), or the task."""
    text: str = ""
    """The answer that shows it."""
    more: int = 0
    """Further findings of the rule that are not listed."""
    fix: str = ""
    """A command or setting that fixes it, where it is not part of the message."""

    @property
    def kind(self) -> str:
        """The rule's group: its name up to a slash."""
        return self.rule.partition("/")[0]

    @property
    def details(self) -> str:
        """The message, with the sample and the answer that show it."""
        sample = f"sample {self.id!r}: " if self.id and repr(self.id) not in self.message else ""
        return f"{sample}{self.message}" + (f"  answer: {self.text}" if self.text else "")

    def __str__(self) -> str:
        return f"{self.kind}: {self.details}" + (f"  (and {self.more} more)" if self.more else "")


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one rule whose messages differ in values only are one group; in the order of each group's first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, shape(finding.message)), []).append(finding)
    return list(groups.values())


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """One line per group: where its first finding is, the message, and how many more rows have it."""
    return [counted(f"{first.where}: {first.id or '(no id)'}: {first.kind}: {first.message}", len(group))
            for group in grouped(findings) for first in group[:1]]


def shorten(text: str) -> str:
    """A text as a Python literal in ASCII; of a long one the beginning and the end."""
    shown = ascii(text)
    return shown if len(shown) <= 120 else f"{shown[:80]}...{shown[-20:]} ({len(text)} characters)"
