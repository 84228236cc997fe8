"""Data and task before a run: what would train on nonsense in silence stops it, with the row and the way out.

The cheap rules of vlrl.checks are applied to the first rows and a seeded sample of the others, by the headers of their
files, and some answers to the first samples are scored: without model, processor and torch. `vlrl train`, `--dry-run`
and `vlrl eval` share this and say one line a rule; `vlrl data check` and `vlrl tasks check` look at everything.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from vlrl import checks
from vlrl.checks import CheckedRow, Context, Finding
from vlrl.checks.answers import OracleScore, original_pixels
from vlrl.checks.finding import shorten
from vlrl.checks.media_files import looked_at, unopened
from vlrl.checks.rule import Size, usual_refusal
from vlrl.checks.samples import look, row_at
from vlrl.checks.tasks import TaskSamples, task_findings
from vlrl.config.registry import prints_aside
from vlrl.config.schema import Config
from vlrl.data import Samples
from vlrl.data.sequences import where
from vlrl.errors import DataError, TaskError, VlrlError
from vlrl.models.image_sizes import image_refusal
from vlrl.rewards.text import completion_for
from vlrl.task import Task, task_samples
from vlrl.types import Sample

FIRST = 4
"""Samples of each task that are looked at in full; of several prompt templates at least one each."""
OTHERS = 256
"""Rows of each split, beside the first, whose fields and headers are looked at."""
_QUICK = 2.0  # seconds in which the held-out samples were made, where those for training are made twice
COMPARED = 20_000
"""Rows of each split that are at hand and are compared with one another."""


@prints_aside()
def check(task: Task, samples: Sequence[Sample], config: Config, scored: bool = True, *,
          goes_on: bool = False) -> list[str]:
    """Checks the training samples of a task, or of each task of a mixture, and those held out; returns the warnings.

    `scored` = False leaves out what concerns rewards, for supervised fine-tuning. With `run.checks=warn` everything is
    a warning; with `data.quarantine` what is wrong with some of the samples alone is one, and so is what is wrong with
    rows of a run that `goes_on`.

    Raises TaskError listing what stops the run.
    """
    findings: list[Finding] = []
    begun = time.monotonic()
    splits = {"train": samples, **_heldout(task, config)}
    again = _again(task, samples, quick=time.monotonic() - begun < _QUICK)
    for own, firsts in _by_task(task, samples, config.data.quarantine):
        mine = [sample for sample in again if task.of(sample) is own]
        seen = TaskSamples(own, firsts, config.limits, scored, mine if len(mine) == len(firsts) else ())
        found = list(dict.fromkeys(task_findings(seen, at_start=True)))
        findings += _spared(found, len(firsts)) if config.data.quarantine else found
    rows = row_findings(task, splits, config)
    return _settled([*findings, *([replace(f, level="warning") for f in rows] if goes_on else rows)], config)


@prints_aside()
def check_splits(task: Task, config: Config) -> list[str]:
    """Checks the rows of what is evaluated alone, likewise."""
    train = {"train": task_samples(task, "train")} if "train" in config.eval.splits else {}
    return _settled(row_findings(task, {**train, **_heldout(task, config)}, config), config)


def _settled(findings: Sequence[Finding], config: Config) -> list[str]:
    stops = [f for f in findings if f.level == "error" and config.run.checks == "stop"]
    if stops:
        raise TaskError("\n".join([*_lines(stops), "If this is meant, run.checks=warn goes on all the same."]))
    return _lines(findings)


@prints_aside()
def check_opened(task: Task, samples: Sequence[Sample], config: Config, opened: str) -> list[str]:
    """Returns a warning for each task that pays its perfect answer less where the chat template has `opened` it."""
    warnings = []
    for own, firsts in _by_task(task, samples, config.data.quarantine) if opened else ():
        visit = TaskSamples(own, firsts[:1], config.limits).visits[0]
        if visit.oracle is None:
            continue
        try:
            with original_pixels(own):
                parts = OracleScore(own, visit.shown, visit.oracle)
                alone, less = parts.reward(visit.oracle), parts.reward(visit.oracle, opened)
        except (Exception, SystemExit):  # a task's own code, of which `check` has told
            continue
        if less < alone - 1e-6:
            warnings.append(
                f"task '{own.name}': the chat template begins every answer with {opened!r}; behind it the perfect "
                f"answer {shorten(completion_for(visit.oracle, opened))} earns {less:.3g}, and {alone:.3g} without. "
                "Its `score` reads a form that has no such beginning: read answer.final or rewards.text.said(answer), "
                "or choose another beginning with model.chat_template_kwargs, such as {enable_thinking: false}")
    return warnings


def _heldout(task: Task, config: Config) -> dict[str, Sequence[Sample]]:
    """Returns the samples of each split of eval.splits but train; an evaluation says why there are none."""
    splits: dict[str, Sequence[Sample]] = {}
    for split in config.eval.splits if config.eval.samples else ():
        with suppress(VlrlError):
            if split != "train":
                splits[split] = task_samples(task, split)
    return splits


# --- the first samples ------------------------------------------------------------------------------------------------


def _by_task(task: Task, samples: Sequence[Sample], quarantine: bool) -> Iterator[tuple[Task, list[Sample]]]:
    """Yields each task with its first samples; those of a mixture take turns at its beginning."""
    firsts: dict[int, tuple[Task, list[Sample]]] = {}
    for i in range(min(len(samples), FIRST * len(task.members))):
        try:
            sample = samples[i]
        except DataError:  # a row that is read only now
            if not quarantine:
                raise
            continue
        own = task.of(sample)
        firsts.setdefault(id(own), (own, []))[1].append(sample)
    yield from firsts.values()


def _again(task: Task, samples: Sequence[Sample], quick: bool) -> list[Sample]:
    """Returns the first samples as they are when asked for again: of a list where making another is `quick`; [] for
    rows of files.
    """
    own, listed = type(task).samples is not Task.samples, isinstance(samples, (list, tuple))
    if not own or isinstance(samples, Samples) or (listed and not quick):
        return []
    with suppress(VlrlError):
        once_more = task_samples(task, "train") if listed else samples
        return [once_more[i] for i in range(min(len(once_more), FIRST * len(task.members)))]
    return []


def _spared(findings: Sequence[Finding], count: int) -> list[Finding]:
    """Returns findings as warnings where they are of some of `count` samples alone."""
    bad = {f.id for f in findings if f.level == "error"}
    spared = "" not in bad and len(bad) < count
    return [replace(f, level="warning") if spared else f for f in findings]


# --- rows -------------------------------------------------------------------------------------------------------------


def row_findings(task: Task, splits: Mapping[str, Sequence[Sample]], config: Config) -> list[Finding]:
    """Returns what the cheap rules say of the rows of some splits; of samples that code makes, of the first."""
    refusal = image_refusal(config.model, usual_refusal)
    rows: list[CheckedRow] = []
    for split, samples in splits.items():
        rows += _rows(task, split, samples, config, refusal)
    checks.file_findings(rows, Context(task=task, limits=config.limits), at_start=True)
    spared = config.data.quarantine
    return [replace(f, level="warning") if spared else f for row in rows for f in row.findings]


def _rows(task: Task, split: str, samples: Sequence[Sample], config: Config, refusal: Callable[[Size], str]
          ) -> Iterator[CheckedRow]:
    """Yields the rows of a split that are looked at, and, of rows at hand, others that are compared alone."""
    count = len(samples)
    others = min(count, OTHERS) if count and where(samples, 0) is not None else 0
    looked = {*range(min(count, FIRST * len(task.members))), *random.Random(config.seed).sample(range(count), others)}
    at_hand = range(0, count, max(1, -(-count // COMPARED))) if isinstance(samples, (list, tuple, Samples)) else ()
    for place in sorted({*looked, *at_hand}):
        row = row_at(samples, place, split)
        if place in looked:
            own = task.of(row.sample) if row.sample else task
            look(row, lambda key: looked_at(key, config.limits), config.limits)
            checks.row_findings(row, Context(task=own, limits=config.limits, refusal=refusal), at_start=True)
        else:
            look(row, unopened)
        yield row


# --- words ------------------------------------------------------------------------------------------------------------


def _lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a line a rule: the first sample or row that has it, and how many more."""
    of_tasks: dict[tuple[str, str], list[Finding]] = {}
    of_rows = []
    for finding in findings:
        if finding.where.startswith("task "):
            of_tasks.setdefault((finding.where, finding.rule), []).append(finding)
        else:
            of_rows.append(finding)
    return [*map(_task_line, of_tasks.values()), *checks.lines(of_rows)]


def _task_line(same: Sequence[Finding]) -> str:
    first, more = same[0], len(same) - 1
    return (f"{first.where}: {first.said.removeprefix(f'{first.where}: ')}"
            + (f" (and {more} more of the first samples)" if more else ""))
