"""`Finding`, a result of any check (of data, tasks or this machine), and the formatting of findings as lines of text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vlrl.data.samples import counted, shape

Level = Literal["ok", "info", "missing", "warning", "error"]
"""Severity of a finding. ok: the checked item works. info: worth knowing. missing: something optional is not installed.
warning: may be intended. error: a check command exits with code 1, and a run does not start."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check of a row, a file, a task, a sample of a task, or this machine."""

    message: str  # what is wrong, with the value and the remedy; it does not name the row
    rule: str = ""  # Name of the rule, e.g. "box" or "field/spans"; empty until Rule.finding sets it.
    level: Level = "error"
    id: str = ""  # Id of the row or sample; "" for a finding about a file, task or machine
    where: str = ""  # file and line (or number of the row), or the task
    text: str = ""  # the answer that shows the fault
    more: int = 0  # number of further findings of the rule that are not listed
    fix: str = ""  # A command or setting that fixes the fault, unless the message already contains the remedy

    @property
    def kind(self) -> str:
        """The rule's name up to the first slash."""
        return self.rule.partition("/")[0]

    @property
    def details(self) -> str:
        """The message, followed by the sample and the answer that show the fault."""
        sample = f"sample {self.id!r}: " if self.id and repr(self.id) not in self.message else ""
        return f"{sample}{self.message}" + (f"  answer: {self.text}" if self.text else "")

    def __str__(self) -> str:
        return f"{self.kind}: {self.details}" + (f"  (and {self.more} more)" if self.more else "")


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Returns lists of findings of the same rule whose messages differ only in values, in the order of the first
    finding of each list."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, shape(finding.message)), []).append(finding)
    return list(groups.values())


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Returns one line per group of similar findings: location, id and message of the first, number of others."""
    return [counted(f"{first.where}: {first.id or '(no id)'}: {first.kind}: {first.message}", len(group))
            for group in grouped(findings) for first in group[:1]]


def shorten(text: str) -> str:
    """The text as a Python literal in ASCII; a long text is reduced to its beginning and end."""
    shown = ascii(text)
    return shown if len(shown) <= 120 else f"{shown[:80]}...{shown[-20:]} ({len(text)} characters)"
