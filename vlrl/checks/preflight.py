"""Checks data and task before a run: faults that would silently spoil training stop the run, with the row and the
remedy.

The cheap rules of vlrl.checks are applied to the first rows and a seeded sample of the others, using only the headers
of media files, and some answers to the first samples are scored. No model, processor or torch is loaded. `vlrl train`,
`--dry-run` and `vlrl eval` share this module and print one line per rule; `vlrl data check` and `vlrl tasks check`
check everything."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from vlrl import checks
from vlrl.checks import CheckedRow, Context, Finding
from vlrl.checks.answers import OracleScore, original_pixels
from vlrl.checks.finding import shorten
from vlrl.checks.media_files import checked_row, read_header, unread_file, with_files
from vlrl.checks.row_scores import unscorable_rows
from vlrl.checks.rule import Size, default_refusal
from vlrl.checks.tasks import TaskSamples, task_findings
from vlrl.config.registry import prints_aside
from vlrl.config.schema import Config
from vlrl.data import Samples
from vlrl.data.samples import where
from vlrl.errors import DataError, TaskError, VlrlError
from vlrl.models.image_sizes import image_refusal
from vlrl.rewards.text import completion_for
from vlrl.task import Task, task_samples
from vlrl.types import Sample

FIRST = 4  # number of samples of each task that are checked in full; every prompt template is used at least once
OTHERS = 256  # number of further rows of each split whose fields and media headers are checked
_QUICK = 2.0
"""If making the samples of all splits takes more than this number of seconds, they are not made again to compare."""
COMPARED = 20_000  # number of rows of each split in memory that are compared with one another


@prints_aside()
def check(task: Task, samples: Sequence[Sample], config: Config, scored: bool = True, *,
          goes_on: bool = False) -> list[str]:
    """Checks the training samples of a task (of each task of a mixture) and the held-out samples before a run; returns
    the warnings.

    `scored=False` skips the rules of rewards, for supervised fine-tuning. With `run.checks=warn`, all errors become
    warnings. With `goes_on`, which means that a run is resumed, errors in rows become warnings. With `data.quarantine`,
    errors that only concern some of the samples become warnings.

    Raises TaskError listing the errors that stop the run."""
    findings: list[Finding] = []
    begun = time.monotonic()
    splits = {"train": samples, **_heldout(task, config)}
    again = _repeated(task, samples, quick=time.monotonic() - begun < _QUICK)
    for own, firsts in _by_task(task, samples, config.data.quarantine):
        mine = [sample for sample in again if task.of(sample) is own]
        of_task = TaskSamples(own, firsts, config.limits, scored, mine if len(mine) == len(firsts) else ())
        found = list(dict.fromkeys(task_findings(of_task, at_start=True)))
        bad = {f.id for f in found if f.level == "error"}
        if config.data.quarantine and "" not in bad and len(bad) < len(firsts):
            found = _as_warnings(found)
        findings += found
    rows = row_findings(task, splits, config, scored)
    if same := _same_file(config):
        rows = [*same, *(found for found in rows if not found.rule.startswith("leak"))]
    return _stop_or_warn([*findings, *(_as_warnings(rows) if goes_on else rows)], config)


@prints_aside()
def check_splits(task: Task, config: Config) -> list[str]:
    """Checks only the rows of the splits to evaluate; returns the warnings. Raises TaskError listing the errors, unless
    run.checks=warn."""
    train = {"train": task_samples(task, "train")} if "train" in config.eval.splits else {}
    return _stop_or_warn(row_findings(task, {**train, **_heldout(task, config)}, config), config)


def _same_file(config: Config) -> list[Finding]:
    """A warning for each data section whose data.heldout is its data.train."""
    sections = [config.data, *(entry.data for entry in config.tasks)]
    return [Finding(message=f"data.heldout={one.heldout!r} is the file of data.train, so evaluations only show how "
                            "well the rows of train are remembered: `vlrl data split` makes a held-out file",
                    level="warning") for one in sections
            if one.train and one.heldout and os.path.realpath(one.train) == os.path.realpath(one.heldout)]


def _as_warnings(findings: Sequence[Finding]) -> list[Finding]:
    return [replace(f, level="warning") for f in findings]


def _stop_or_warn(findings: Sequence[Finding], config: Config) -> list[str]:
    stops = [f for f in findings if f.level == "error" and config.run.checks == "stop"]
    if stops:
        rows = all(f.id and not f.where.startswith("task ") for f in stops) and not config.data.quarantine
        without = " data.quarantine=true starts it without these rows." if rows else ""
        raise TaskError("\n".join([*_lines(stops),
                                   f"If this is intended, run.checks=warn starts the run anyway.{without}"]))
    return _lines(findings)


@prints_aside()
def check_opened(task: Task, samples: Sequence[Sample], config: Config, opened: str) -> list[str]:
    """Returns one warning for each task whose perfect answer earns less when it follows `opened`, the text that the
    chat template puts at the start of every answer."""
    warnings = []
    for own, firsts in _by_task(task, samples, config.data.quarantine) if opened else ():
        prompted = TaskSamples(own, firsts[:1], config.limits).prompted[0]
        if prompted.oracle is None:
            continue
        try:
            with original_pixels(own):
                parts = OracleScore(own, prompted.scored, prompted.oracle)
                alone, less = parts.reward(prompted.oracle), parts.reward(prompted.oracle, opened)
        except (Exception, SystemExit):  # a task's own code; `check` reports it
            continue
        if less < alone - 1e-6:
            warnings.append(
                f"task '{own.name}': the chat template begins every answer with {opened!r}; after this beginning the "
                f"perfect answer {shorten(completion_for(prompted.oracle, opened))} earns {less:.3g}, but {alone:.3g} "
                "without it. The `score` of the task does not expect it: read answer.final or "
                "rewards.text.said(answer) there, or choose another beginning with model.chat_template_kwargs, such "
                "as {enable_thinking: false}")
    return warnings


def _heldout(task: Task, config: Config) -> dict[str, Sequence[Sample]]:
    """Returns {split: samples} of each split in eval.splits except train. Splits that cannot be read are left out,
    because the evaluation reports them."""
    splits: dict[str, Sequence[Sample]] = {}
    for split in config.eval.splits if config.eval.samples else ():
        with suppress(VlrlError):
            if split != "train":
                splits[split] = task_samples(task, split)
    return splits


# --- the first samples ------------------------------------------------------------------------------------------------


def _by_task(task: Task, samples: Sequence[Sample], quarantine: bool) -> Iterator[tuple[Task, list[Sample]]]:
    """Yields each task with its samples among the first samples of the split. (A mixture begins with one sample of each
    task.) With `quarantine`, samples that cannot be read are skipped."""
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


def _repeated(task: Task, samples: Sequence[Sample], quick: bool) -> list[Sample]:
    """Returns the first training samples, made a second time for a comparison; [] if the samples are rows of files.
    `quick` says whether the first time was fast; if it was not, a list of samples is not made again, and the result
    is []."""
    own, listed = type(task).samples is not Task.samples, isinstance(samples, (list, tuple))
    if not own or isinstance(samples, Samples) or (listed and not quick):
        return []
    with suppress(VlrlError):
        second = task_samples(task, "train") if listed else samples
        return [second[i] for i in range(min(len(second), FIRST * len(task.members)))]
    return []


# --- rows -------------------------------------------------------------------------------------------------------------


def row_findings(task: Task, splits: Mapping[str, Sequence[Sample]], config: Config, scored: bool = False
                 ) -> list[Finding]:
    """Findings of the cheap rules about the rows of some splits. Of generated samples, only the first are checked. With
    `scored`, answers to the checked rows are scored too."""
    refusal = image_refusal(config.model, default_refusal)
    rows = [row for split, samples in splits.items() for row in _rows(task, split, samples, config, refusal)]
    checks.file_findings(rows, Context(task=task, limits=config.limits), at_start=True)
    found = [f for row in rows for f in row.findings]
    if scored:
        found += unscorable_rows(task, (row for row in rows if row.checked), config.limits)
    return _as_warnings(found) if config.data.quarantine else found


def _rows(task: Task, split: str, samples: Sequence[Sample], config: Config, refusal: Callable[[Size], str]
          ) -> Iterator[CheckedRow]:
    """Yields the rows of a split that are checked. If the samples are in memory, also yields unchecked rows, with which
    other rows are compared. `refusal(size)` returns why the model's processor refuses an image of this size."""
    count = len(samples)
    others = min(count, OTHERS) if count and where(samples, 0) is not None else 0
    checked = {*range(min(count, FIRST * len(task.members))), *random.Random(config.seed).sample(range(count), others)}
    compared = range(0, count, max(1, -(-count // COMPARED))) if isinstance(samples, (list, tuple, Samples)) else ()
    for n in sorted({*checked, *compared}):
        row = checked_row(samples, n, split)
        if n in checked:
            own = task.of(row.sample) if row.sample else task
            with_files(row, lambda key: read_header(key, config.limits), config.limits)
            checks.row_findings(row, Context(task=own, limits=config.limits, refusal=refusal), at_start=True)
            row.checked = True
        else:
            with_files(row, unread_file)
        yield row


def _lines(findings: Sequence[Finding]) -> list[str]:
    """Returns one line per broken rule: the first sample or row that breaks it, and the number of further ones."""
    of_tasks: dict[tuple[str, str], list[Finding]] = {}
    of_rows = []
    for finding in findings:
        if finding.where.startswith("task ") or not finding.where:
            of_tasks.setdefault((finding.where, finding.rule), []).append(finding)
        else:
            of_rows.append(finding)
    lines = [(f"{first.where}: " if first.where else "") + first.details.removeprefix(f"{first.where}: ")
             + (f" (and {len(others)} more of the first samples)" if others else "")
             for first, *others in of_tasks.values()]
    return [*lines, *checks.finding_lines(of_rows)]
