"""Finds rows whose answers cannot be scored, by scoring a few answers to each of the checked rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from vlrl.checks.answers import answer_of, original_pixels
from vlrl.checks.finding import Finding, shorten
from vlrl.checks.rule import CheckedRow, Rule
from vlrl.checks.tasks import PromptedSample, answers_to, has_score
from vlrl.config.schema import LimitsSettings
from vlrl.errors import VlrlError
from vlrl.task import Task, task_oracle
from vlrl.task.environment import has_environment
from vlrl.task.scoring import score_group
from vlrl.types import Sample

SECONDS = 2.0  # time limit for scoring answers to rows
_RULE = Rule(name="score", scope="row", find=lambda row, context: ())


def unscorable_rows(task: Task, rows: Iterable[CheckedRow], limits: LimitsSettings) -> list[Finding]:
    """Findings about rows for which `score` fails on every answer tried. They are errors if more than the share
    limits.score_errors of the scored rows are affected, else warnings. Empty if no row can be scored at all, which the
    rules of tasks report."""
    found: list[tuple[CheckedRow, Finding]] = []
    begun, scored = time.monotonic(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows:
            if time.monotonic() - begun > SECONDS:
                break
            own = task.of(row.sample) if row.sample else task
            if row.sample is None or any(f.level == "error" for f in row.findings) or not has_score(own) or (
                    has_environment(own)):
                continue
            scored += 1
            found += [(row, one) for one in _failure(own, row)]
    if len(found) == scored:
        return []
    level = "error" if len(found) > limits.score_errors * scored else "warning"
    return [_RULE.finding(replace(one, level=level), True, row.where, row.id) for row, one in found]


def _failure(task: Task, row: CheckedRow) -> Iterator[Finding]:
    sample, first = _with_size(row), None
    with original_pixels(task), suppress(VlrlError):  # reported by the rules of tasks
        prompted = PromptedSample(sample, "", sample, task_oracle(task, sample))
        for text in answers_to(prompted):
            (result,) = score_group(task, sample, [answer_of(text)], 0)
            if not result.error:
                return
            first = first or (result.error, text)
    if first:
        yield Finding(message=f"scoring fails for this row: {first[0]}, for the answer {shorten(first[1])}. Correct "
                      "the row or the task, or leave the row out")


def _with_size(row: CheckedRow) -> Sample:
    """The sample as `score` receives it, with the size from the header of its first image."""
    assert row.sample is not None
    size = row.files[0].size if row.files else None
    if not size or {"width", "height"} <= row.sample.row.keys():
        return row.sample
    return replace(row.sample, row={"width": size[0], "height": size[1], **row.sample.row})
