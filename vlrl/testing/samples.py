"""Checks of samples: ids are unique, every call and every process yields the same samples, train and held-out samples
differ, rows can be stored as JSON, and media can be loaded.

Samples generated with difficulty knobs (Task.generate) are checked and scored like those of the splits."""

import copy
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vlrl import checks
from vlrl.checks import CheckedRow, Context, MediaFile
from vlrl.checks.answers import original_pixels
from vlrl.checks.identity import fingerprint, source_digest, unstable_sample
from vlrl.checks.media_files import Key, checked_row, read_media, unread_file, with_files, with_sample
from vlrl.checks.tasks import TaskSamples, task_findings, with_media_size
from vlrl.config.registry import FILE_MODULE
from vlrl.config.schema import DataSettings, LimitsSettings
from vlrl.errors import ConfigError, TaskError, VlrlError
from vlrl.task import Task, generated, load, setting_names, task_samples
from vlrl.testing.findings import Findings
from vlrl.types import Sample

GENERATED = "made"
"""Key of the generated samples in dictionaries by split. A generated sample is identified by (index, knobs) instead of
an index."""
_LIMITS = LimitsSettings()
WIDE = 200
"""Number of samples of a split whose ids and content are compared."""
_CHILD = ("import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path']; "
          "from vlrl.testing.samples import child; child(given)")


def check_samples(task: Task, findings: Findings, count: int, processes: int) -> list[Sample]:
    """Checks the samples of both splits. Returns up to `count` training samples, evenly spaced, and some samples
    generated with difficulty knobs. Raises ConfigError or DataError if the user's data are at fault, not the task's
    code."""
    train = _split(task, findings, "train")
    if train is None:
        return []
    try:
        heldout = _split(task, findings, "heldout")
    except ConfigError as error:
        findings.note(f"held-out samples were not checked: {error}")
        heldout = None
    splits = {"train": train} if heldout is None else {"train": train, "heldout": heldout}
    rows = {split: _taken(samples, count, findings, split) for split, samples in splits.items()}
    rows[GENERATED] = _generated(task, findings)
    chosen = {split: [row.sample for row in taken if row.sample] for split, taken in rows.items()}
    for split, samples in chosen.items():
        for done, sample in enumerate(samples):
            findings.tell(f"{split} sample {done + 1} of {len(samples)}")
            _check_json(sample, findings)
    with findings.guard("samples", "checking the samples"), original_pixels(task):
        _apply_rules(task, splits, rows, count, findings)
    if not findings.by_rule:  # otherwise the same fault would be reported again
        where: dict[str, Sequence[Any]] = {split: places(len(samples), len(chosen[split]))
                                           for split, samples in splits.items()}
        spots = _spots(task) if chosen[GENERATED] else ()
        _check_repeatable(task, chosen, where | {GENERATED: spots}, findings, processes)
    return [_sized(sample) for sample in [*chosen["train"], *chosen[GENERATED]]]


def _split(task: Task, findings: Findings, split: str) -> Sequence[Sample] | None:
    try:
        samples = task_samples(task, split)
    except TaskError as error:
        findings.add("samples", str(error))
        return None
    if len(samples) == 0:
        findings.add("samples", f"samples({split!r}) is empty")
        return None
    return samples


def places(length: int, count: int) -> list[int]:
    """Up to `count` indices of a sequence of this length, evenly spaced from the first to the last."""
    count = min(length, count)
    return sorted({round(i * (length - 1) / max(count - 1, 1)) for i in range(count)})


def _taken(samples: Sequence[Sample], count: int, findings: Findings, split: str) -> list[CheckedRow]:
    taken = []
    for place in places(len(samples), count):
        with findings.guard("samples", f"samples({split!r})[{place}]"):
            row = checked_row(samples, place, split)
            if not row.error and not (isinstance(row.id, str) and row.id):
                findings.add("samples", f"samples({split!r})[{place}] has id={row.id!r}, expected a Sample whose id is "
                             "a non-empty string")
            else:
                taken.append(row)
    return taken


def _spots(task: Task) -> list[tuple[int, dict[str, float]]]:
    """Returns (index, {knob: value}) of each sample to generate; [] for a task without difficulty knobs. The values
    are: all knobs at minimum, all in the middle, all at maximum, and each knob alone at maximum with the others at
    minimum."""
    spots = [{name: low + share * (high - low) for name, (low, high) in task.knobs.items()} for share in (0, 0.5, 1)]
    spots += [{**spots[0], name: float(high)} for name, (_, high) in task.knobs.items() if len(task.knobs) > 1]
    return [(index, spot) for spot in spots for index in (0, 1)] if task.knobs else []


def _generated(task: Task, findings: Findings) -> list[CheckedRow]:
    for name, bounds in task.knobs.items():
        low, high = bounds if len(bounds) == 2 else (math.nan, math.nan)
        if not -math.inf < low < high < math.inf:
            findings.add("knobs", f"the knob {name!r} has (lowest, highest) = {bounds}: give two finite numbers with "
                         "lowest < highest")
            return []
    taken: list[CheckedRow] = []
    for index, knobs in _spots(task):
        with findings.guard("knobs", place := f"generate({index}, {knobs})"):
            taken.append(with_sample(CheckedRow(where=place, row={}, side="train"), generated(task, index, knobs)))
    return taken if len(taken) == len(_spots(task)) else []


def _check_json(sample: Sample, findings: Findings) -> None:
    with findings.guard("row", "writing the row as JSON", sample.id):
        again = json.loads(json.dumps(sample.row, allow_nan=False, ensure_ascii=False).encode())
        for key, value in sample.row.items():
            back = again.get(key)
            if back != value or type(back) is not type(value):
                findings.add("row", f"the field {key!r} is {str(value)[:80]}, but becomes {str(back)[:80]} when it is "
                             "written as JSON: use strings, numbers, lists, and dictionaries with strings as keys",
                             sample.id)


def _sized(sample: Sample) -> Sample:
    with suppress(VlrlError):  # already a finding
        return with_media_size(sample, _LIMITS)
    return sample


def _apply_rules(task: Task, splits: Mapping[str, Sequence[Sample]], chosen: Mapping[str, Sequence[CheckedRow]],
                 count: int, findings: Findings) -> None:
    """Applies the rules of vlrl.checks to the rows `chosen` by split, and adds their findings. Rules that compare rows
    of a file also see some rows that were not chosen. count: number of chosen rows per split."""
    rows: list[CheckedRow] = []
    for split, looked in chosen.items():
        for row in looked:
            with_files(row, _opened, _LIMITS)
            checks.row_findings(row, Context(task=task, limits=_LIMITS), at_start=True)
        samples = splits.get(split, ())
        others = set(places(len(samples), WIDE)) - set(places(len(samples), count))
        rows += [*looked, *(with_files(checked_row(samples, place, split), _told_apart,
                                       _LIMITS) for place in sorted(others))]
    checks.file_findings(rows, Context(task=task, limits=_LIMITS))
    sound = [row.sample for looked in chosen.values() for row in looked
             if row.sample and not any(f.level == "error" for f in row.findings)]
    findings.take([*(f for row in rows for f in row.findings),
                   *task_findings(TaskSamples(task, sound, _LIMITS, every=True))])


def _opened(key: Key) -> MediaFile:
    return replace(read_media(key, _LIMITS), sha256=source_digest(key[0]))


def _told_apart(key: Key) -> MediaFile:
    return replace(unread_file(key), sha256=source_digest(key[0]))


def rebuilt(task: Task) -> Task:
    """A second instance of the task with the same settings."""
    new = type(task)(**_settings(task), rewards=dict(task.weights), combine=task.combination)
    new.seed, new.data, new.coordinates = task.seed, task.data, copy.copy(task.coordinates)
    new.outside = task.outside
    return new


def _settings(task: Task) -> dict[str, Any]:
    return {name: vars(task)[name] for name in setting_names(type(task)) if name in vars(task)}


def _check_repeatable(task: Task, chosen: Mapping[str, list[Sample]], places_of: Mapping[str, Sequence[Any]],
                      findings: Findings, processes: int) -> None:
    first = {split: [fingerprint(task, s) for s in samples] for split, samples in chosen.items()}

    def compare(other: Mapping[str, list[str]], what: str) -> bool:
        for split, samples in chosen.items():
            for sample, a, b in zip(samples, first[split], other[split], strict=True):
                if a != b:
                    findings.add("deterministic", unstable_sample(what), sample.id)
                    return False
        return True

    def backwards(which: Task) -> dict[str, list[str]]:
        return {split: _fingerprints(which, split, at[::-1])[::-1] for split, at in places_of.items()}

    with findings.guard("deterministic", "making the samples again"):
        if compare(backwards(task), "when asked for again, in another order") and \
                compare(backwards(rebuilt(task)), "in a second instance, in another order") and processes:
            for other in _elsewhere(task, places_of, findings, processes):
                if not compare(other, "in another process"):
                    break


def _fingerprints(task: Task, split: str, at: Sequence[Any]) -> list[str]:
    if split == GENERATED:
        return [fingerprint(task, generated(task, index, knobs)) for index, knobs in at]
    samples = task_samples(task, split)
    return [fingerprint(task, samples[i]) for i in at]


def _elsewhere(task: Task, places_of: Mapping[str, Sequence[Any]], findings: Findings,
               processes: int) -> list[dict[str, list[str]]]:
    address = _address(type(task))
    if address is None:
        findings.note("samples were not compared with those of another process: the class is not at a module's top "
                      "level")
        return []
    given = {"path": sys.path, "name": address, "settings": _settings(task), "seed": task.seed, "places": places_of,
             "data": task.data.model_dump(mode="json") if isinstance(task.data, DataSettings) else None}
    try:
        text = json.dumps(given, default=lambda v: v.model_dump(mode="json"))
    except (TypeError, AttributeError):
        findings.note("samples were not compared with those of another process: a setting cannot be written as JSON")
        return []
    running = [subprocess.Popen([sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)})
               for seed in range(1, processes + 1)]
    results = []
    for process in running:
        out, err = process.communicate(text, timeout=300)
        if process.returncode:
            findings.add("deterministic", f"the samples cannot be made in another process: {err.strip()[-300:]}")
        else:
            results.append(json.loads(out.splitlines()[-1]))
    return results


def _address(cls: type[Task]) -> str | None:
    if "." in cls.__qualname__:
        return None
    file = inspect.getsourcefile(cls)
    try:
        spec = importlib.util.find_spec(cls.__module__)
        if spec and spec.origin == file and not cls.__module__.startswith(FILE_MODULE):
            return f"{cls.__module__}:{cls.__qualname__}"
    except (ImportError, ValueError):
        pass
    return f"{file}:{cls.__qualname__}" if file and file.endswith(".py") else None


def child(given: Mapping[str, Any]) -> None:
    """Main function of a separate process. Makes the task that `given` describes, and prints {split: fingerprints of
    the listed samples} as JSON. Exits with the message of a VlrlError."""
    try:
        task = load(given["name"], given["settings"])
        task.seed, task.data = given["seed"], given["data"] and DataSettings(**given["data"])
        print(json.dumps({split: _fingerprints(task, split, at) for split, at in given["places"].items()}))
    except VlrlError as error:
        sys.exit(str(error))
