"""Checks that a task keeps the Task contract, for `vlrl tasks check` and for tests.

    from vlrl import testing
    from vlrl.task import load

    def test_the_contract():
        testing.assert_ok(load("count.py:CountCircles"))

- Samples: ids are unique; every call and every process yields the same samples; train and held-out samples differ; rows
are JSON-able; media can be loaded. The same holds for samples generated with difficulty knobs.
- Scoring: whatever the text of an answer, scoring never raises, is fast, and returns finite and bounded rewards. The
perfect answer earns the most, in every coordinate convention. The prompt mentions the tags that the answer needs.
Non-answers earn nothing (`testing.cheats`).
- Episodes, for a task with environments or tools: the same seed and actions give the same episode; no action makes the
environment fail; the actions of `oracle_actions` earn the most; no process is left running."""

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
    """The results of checking a task: findings, the rewards of cheats, and notes."""

    task: str
    samples: int
    """Number of training samples that were checked, including those generated with difficulty knobs."""
    findings: tuple[Finding, ...]
    cheats: tuple[CheatRow, ...]
    notes: tuple[str, ...]
    """What could not be checked, and why."""


def check(task: Task, samples: int = 20, processes: int = 2) -> list[Finding]:
    """Checks a task and returns its findings: [] if the task keeps the contract. Parameters: see `examine`."""
    return list(examine(task, samples, processes).findings)


def assert_ok(task: Task, samples: int = 20, processes: int = 2) -> None:
    """Checks a task. Raises an AssertionError that lists the findings, if there are any. Parameters: see `examine`."""
    findings = check(task, samples, processes)
    if findings:
        raise AssertionError(f"task '{task.name}' breaks the contract:\n" + "\n".join(map(str, findings)))


@prints_aside()
def examine(task: Task, samples: int = 20, processes: int = 2, tell: Callable[[str], None] = lambda what: None
            ) -> Report:
    """Checks a task on up to `samples` samples of each split and returns a report.

    The samples are also compared with those made in `processes` new processes, each with a different hash seed. `tell`
    is called with progress messages.

    Raises ConfigError or DataError if the settings or the data file are at fault, not the task."""
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
    """Scores `text` as an answer to the sample and returns the findings, for property-based tests."""
    findings = Findings()
    try_answer(task, sample, text, findings)
    return findings.all()


def judge_cheats(task: Task, samples: list[Sample], findings: Findings, template: str = "") -> list[CheatRow]:
    """Checks that perfect answers earn more than cheats, on samples with the same prompt template. Returns the rewards
    of perfect answers and of each cheat."""
    known = [(s, text) for s in samples if (text := oracle_of(task, s, findings)) is not None]
    others = list(dict.fromkeys(text for _, text in known))[:10]
    scored = [(s, text, reward) for s, text in known
              if (reward := check_best(task, s, text, [o for o in others if o != text], findings)) is not None]
    if not scored:
        return []
    return check_cheats(task, [s for s, _, _ in scored], [(text, r) for _, text, r in scored], findings, template)
