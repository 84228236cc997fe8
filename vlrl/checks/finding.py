"""What a rule found, and findings as few lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vlrl.data.reasons import counted, shape

Level = Literal["error", "warning"]
"""An error makes a row or task bad: checks exit with 1 and a run does not start. A warning may be meant."""

@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a row, a file, a task or one of its samples."""

    rule: str
    """Name of the rule that found it: "box", "field/spans"."""
    message: str
    """What is wrong, with the value and the way out; the row is not named in it."""
    level: Level = "error"
    id: str = ""
    """Of the row or sample; "" for a fault of the whole."""
    where: str = ""
    """File and line, or file and number of the row, where it has one."""
    text: str = ""
    """The answer that shows it."""
    more: int = 0
    """Further findings of the rule that are not listed."""

    @property
    def kind(self) -> str:
        """The rule's group: the name up to a slash."""
        return self.rule.partition("/")[0]

    @property
    def said(self) -> str:
        """The message, with the sample and the answer that show it."""
        place = f"sample {self.id!r}: " if self.id and repr(self.id) not in self.message else ""
        return f"{place}{self.message}" + (f"  answer: {self.text}" if self.text else "")

    def __str__(self) -> str:
        return f"{self.kind}: {self.said}" + (f"  (and {self.more} more)" if self.more else "")


def grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Returns the findings of one rule that say the same of different rows together, in the order of the first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, shape(finding.message)), []).append(finding)
    return list(groups.values())


def lines(findings: Iterable[Finding]) -> list[str]:
    """Returns a line for each group: where the first stands, what is wrong with it, and how many more rows have it."""
    return [counted(_line(group), len(group)) for group in grouped(findings)]


def _line(group: Sequence[Finding]) -> str:
    first = group[0]
    return f"{first.where}: {first.id or '(no id)'}: {first.kind}: {first.message}"


def shorten(text: str) -> str:
    """Returns a text as Python would write it, its middle left out when it is long."""
    shown = ascii(text)
    return shown if len(shown) <= 120 else f"{shown[:80]}...{shown[-20:]} ({len(text)} characters)"
