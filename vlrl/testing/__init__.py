"""The contract that every task must keep, as checks for `vlrl tasks check` and for tests.

    from vlrl import testing
    from vlrl.task import load

    def test_the_contract():
        testing.assert_ok(load("count.py:CountCircles"))

Samples: unique ids, the same every time and in every process, train and held-out disjoint, JSON-able rows, loadable
media; also samples generated with knobs, anywhere within their bounds. Scoring: never raises, stays finite, bounded and
fast whatever the text; the perfect answer earns the most, in every coordinate convention; the prompt mentions the tags
it needs; non-answers earn nothing (`testing.cheats`). Episodes, for a task with environments or tools instead: the same
for the same seed and actions; no action breaks them; the actions of `oracle_actions` earn the most; nothing keeps
running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

from vlrl.checks.finding import Finding
from vlrl.config.registry import prints_aside
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.testing.answers import (
    check_best,
    check_groups,
    check_oracle,
    check_texts,
    oracle_of,
    try_answer,
    wrapped,
)
from vlrl.testing.cheats import CheatRow, check_cheats, with_template
from vlrl.testing.episodes import check_episodes
from vlrl.testing.findings import Findings
from vlrl.testing.samples import check_samples
from vlrl.types import Sample

__all__ = ["CheatRow", "Finding", "Report", "assert_ok", "check", "examine", "try_text"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of an examination."""

    task: str
    samples: int
    """Training samples examined, including those generated with knobs."""
    findings: tuple[Finding, ...]
    cheats: tuple[CheatRow, ...]
    notes: tuple[str, ...]
    """What could not be checked, and why."""


def check(task: Task, samples: int = 20, processes: int = 2) -> list[Finding]:
    """Everything that is wrong with a task; empty for a sound one. See `examine`."""
    return list(examine(task, samples, processes).findings)


def assert_ok(task: Task, samples: int = 20, processes: int = 2) -> None:
    """Raises AssertionError listing the findings of `check`."""
    findings = check(task, samples, processes)
    if findings:
        raise AssertionError(f"task '{task.name}' breaks the contract:\n" + "\n".join(map(str, findings)))


@prints_aside()
def examine(task: Task, samples: int = 20, processes: int = 2, tell: Callable[[str], None] = lambda what: None
            ) -> Report:
    """Checks a task on up to `samples` samples of each split.

    The samples are also compared with those of as many fresh `processes`, each with its own hash seed. `tell` receives
    progress messages.

    Raises ConfigError and DataError for faults of the settings or the data file rather than of the task."""
    findings, rows = Findings(tell=tell), []
    chosen = check_samples(task, findings, samples, processes)
    if chosen:
        visits = [with_template(s, t) for s, t in zip(chosen, cycle(task.templates), strict=False)]
        if has_environment(task):
            check_episodes(task, visits, findings)
            return _report(task, chosen, findings, rows)
        check_texts(task, visits, findings)
        check_oracle(task, visits, findings)
        answers = ["", "junk", *wrapped(oracle_of(task, visits[0], findings) or "1"), "junk"]
        check_groups(task, visits[0], answers, findings)
        for template in task.templates:
            rows += judge_cheats(task, [with_template(s, template) for s in chosen], findings,
                                 template if len(task.templates) > 1 else "")
    return _report(task, chosen, findings, rows)


def _report(task: Task, chosen: list[Sample], findings: Findings, rows: list[CheatRow]) -> Report:
    return Report(task=task.name, samples=len(chosen), findings=tuple(findings.all()), cheats=tuple(rows),
                  notes=tuple(findings.notes))


def try_text(task: Task, sample: Sample, text: str) -> list[Finding]:
    """What is wrong with how the task handles one text; for property tests."""
    findings = Findings()
    try_answer(task, sample, text, findings)
    return findings.all()


def judge_cheats(task: Task, samples: list[Sample], findings: Findings, template: str = "") -> list[CheatRow]:
    """Compares the perfect answers of the samples of one template with everything else that might earn a reward."""
    known = [(s, text) for s in samples if (text := oracle_of(task, s, findings)) is not None]
    others = list(dict.fromkeys(text for _, text in known))[:10]
    scored = [(s, text, reward) for s, text in known
              if (reward := check_best(task, s, text, [o for o in others if o != text], findings)) is not None]
    if not scored:
        return []
    return check_cheats(task, [s for s, _, _ in scored], [(text, r) for _, text, r in scored], findings, template)
