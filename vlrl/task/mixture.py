"""Training on several tasks at once (`tasks:`). The rest of the run sees a single Task; the prompt and the score of
each sample come from the task it belongs to. Imports no torch.

mixture = Mixture({"digits": load("digits"), "scenes": load("grounding", {"drawn": True})})
samples = mixture.samples("train")              # digits, scenes, digits, scenes ... until each is exhausted
mixture.of(samples[1]).name                     # "scenes"
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlrl.data.samples import SampleSequence, fingerprint_rows, where
from vlrl.errors import ConfigError, DataError, VlrlError, did_you_mean
from vlrl.task.base import Task
from vlrl.task.interface import generated, task_samples
from vlrl.task.row_files import unread_file, unread_file_error
from vlrl.types import Answer, Sample


class Interleaved(SampleSequence):
    """One sequence made of a sequence of samples for each task label. It takes one sample from each of these in turn:
    a, b, a, b, ... When the shorter sequences are exhausted, the longer ones continue.

    Nothing is copied; indices are computed. Each sample gets the label as its `task`, and the id `label/id`."""

    def __init__(self, samples: Mapping[str, Sequence[Sample]]):
        self.labels = tuple(samples)
        self._samples = tuple(samples.values())
        self.parts = dict(samples)
        """Label -> the samples of this task."""
        sizes = [len(s) for s in self._samples]
        self._size = sum(sizes)
        self._stretches: list[tuple[int, int, tuple[int, ...]]] = []
        """A round takes one sample from each sequence that still has samples. Each entry describes a stretch of rounds
        that take samples from the same sequences: (index of its first sample, its first round, numbers of these
        sequences)."""
        place = round = 0
        for end in sorted(set(sizes)):
            going = tuple(k for k, size in enumerate(sizes) if size >= end)
            self._stretches.append((place, round, going))
            place, round = place + (end - round) * len(going), end
        self._firsts = [first for first, *_ in self._stretches]

    def where(self, index: int) -> str | None:
        label, own = self.locate(index)
        return where(self.parts[label], own)

    def fingerprint_rows(self) -> Sequence[int]:
        parts = {label: {*fingerprint_rows(own)} for label, own in self.parts.items()}
        return [i for i in range(self._size) if (place := self.locate(i))[1] in parts[place[0]]]

    def raw_record(self, index: int) -> tuple[str, Any] | None:
        label, own = self.locate(index)
        part = self.parts[label]
        return part.raw_record(own) if isinstance(part, SampleSequence) else None

    def __len__(self) -> int:
        return self._size

    def _at(self, index: int) -> Sample:
        label, own = self.locate(index)
        return with_label(self._samples[self.labels.index(label)][own], label)

    def locate(self, index: int) -> tuple[str, int]:
        """Converts an index of this sequence to (label, index in the sequence with this label)."""
        first, round, going = self._stretches[bisect_right(self._firsts, index) - 1]
        further, turn = divmod(index - first, len(going))
        return self.labels[going[turn]], round + further

    @property
    def tasks(self) -> list[str]:
        """[N] The label of each sample, computed without creating the samples."""
        ends = [*self._firsts[1:], self._size]
        parts = [np.tile(np.array(going), (end - first) // len(going))
                 for (first, _, going), end in zip(self._stretches, ends, strict=True)]
        return np.array(self.labels, dtype=object)[np.concatenate(parts)].tolist() if parts else []


def with_label(sample: Sample, label: str) -> Sample:
    """Converts a sample of a single task to a sample of a mixture: sets its `task` to the label and puts the label in
    front of its id."""
    return replace(sample, id=f"{label}/{sample.id}", task=label)


class Mixture(Task):
    """Several labelled tasks as one Task. A method that is called for a sample is delegated to the task with the label
    in `Sample.task`."""

    def __init__(self, tasks: Mapping[str, Task]):
        super().__init__()
        self.tasks = {label: _called(task, label) for label, task in tasks.items()}
        self._turns: dict[str, Interleaved] = {}
        every = tasks.values()
        vars(self).update(name=" + ".join(tasks), needs=frozenset(n for t in every for n in t.needs),
                          stage_fields=frozenset(n for t in every for n in t.stage_fields), knobs={
            f"{label}/{knob}": range for label, t in tasks.items() for knob, range in t.knobs.items()})

    @property
    def members(self) -> tuple[Task, ...]:
        return tuple(self.tasks.values())

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.tasks)

    def of(self, sample: Sample) -> Task:
        """The task that a sample belongs to. Raises DataError if no task has the label in `Sample.task`."""
        if sample.task not in self.tasks:
            raise DataError(f"sample {sample.id!r}: task={sample.task[:100]!r} is not a task of this config."
                            f"{did_you_mean(sample.task[:100], self.tasks)} Its tasks: {', '.join(self.tasks)}")
        return self.tasks[sample.task]

    def each(self, change: Callable[[str, Task], Task]) -> Mixture:
        """A new mixture, with `change(label, task)` in place of each task."""
        changed = Mixture({label: change(label, task) for label, task in self.tasks.items()})
        changed.seed, changed.data = self.seed, self.data
        return changed

    def __copy__(self) -> Mixture:
        return self.each(lambda _, task: copy.copy(task))

    def samples(self, split: str) -> Interleaved:
        """The samples of all tasks, interleaved. Raises ConfigError if a task has no samples in this split."""
        if split not in self._turns:
            self._turns[split] = Interleaved({label: _own_samples(i, task, split)
                                        for i, (label, task) in enumerate(self.tasks.items())})
            files = [unread_file(task, split) for task in self.members]
            if all(files):  # shared rows are unused only if no task reads them
                raise unread_file_error("every task of `tasks` makes", split, files[0])
        return self._turns[split]

    def generate(self, index: int, knobs: Mapping[str, float]) -> Sample:
        """Calls `generate` of the task to which the training sample at this index belongs. If this task has no knobs,
        returns the training sample at this index instead. In a mixture, the knobs of a task are called
        `<label>/<knob>`."""
        label, own = self.samples("train").locate(index)
        if not self.tasks[label].knobs:
            return self.samples("train")[index]
        mine = {name.removeprefix(f"{label}/"): v for name, v in knobs.items() if name.startswith(f"{label}/")}
        return with_label(generated(self.tasks[label], own, mine), label)

    def weights_at(self, step: int) -> dict[str, float]:
        """The weights of the reward parts of all tasks. If several tasks have a part of the same name, the weight is
        that of the first of these tasks."""
        return {part: w for task in reversed(self.members) for part, w in task.weights_at(step).items()}

    def readings(self, service: str, sample: Sample, answers: Sequence[Answer]) -> Sequence[Any]:
        return self.of(sample).readings(service, sample, answers)

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The summary metrics of each task over the records of its samples, as `<label>/<name>`."""
        return {f"{label}/{name}": value for label, task in self.tasks.items()
                for name, value in task.summarize([r for r in records if r["task"] == label]).items()}


def _delegated(method: str) -> Callable[..., Any]:
    return lambda self, sample, *given: getattr(self.of(sample), method)(sample, *given)


for _method in ("template", "messages", "score", "score_group", "oracle", "pair", "variants", "guidance", "parse",
                "target", "metrics", "overlay", "cheats"):
    setattr(Mixture, _method, _delegated(_method))


def _called(task: Task, label: str) -> Task:
    vars(task)["name"] = label
    return task


def _own_samples(place: int, task: Task, split: str) -> Sequence[Sample]:
    try:
        samples = task_samples(task, split)
    except VlrlError as error:
        raise type(error)(f"tasks.{place} ({task.name}): {error} (the files of this task are set by "
                          f"tasks.{place}.data.*)") from error
    if not len(samples):
        raise ConfigError(f"tasks.{place} ({task.name}) has no samples in split '{split}', but every task of a mixture "
                          f"needs samples in each split that is used. Set tasks.{place}.data.{split}, or do not use "
                          "this split")
    return samples


def require_one_task(task: Task, what: str) -> Task:
    """Returns the task if it is a single task. Raises ConfigError for a mixture; `what` names the command that cannot
    handle a mixture."""
    if isinstance(task, Mixture):
        raise ConfigError(f"{what} takes one task, and this config has several: {', '.join(task.labels)}. Add "
                          f"task={task.labels[0]} to select one of them")
    return task
