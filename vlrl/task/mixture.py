"""Several tasks at once (`tasks:`): one Task to the rest of the run, each sample asked and scored by its own. No torch.

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

from vlrl.data.samples import fingerprint_rows
from vlrl.data.sequences import SampleSequence, where
from vlrl.errors import ConfigError, DataError, VlrlError, did_you_mean
from vlrl.task.base import Task
from vlrl.task.interface import generated, task_samples
from vlrl.task.row_files import unread_file, unread_file_error
from vlrl.types import Answer, Sample


class Interleaved(SampleSequence):
    """The samples of labelled sequences in turn, a, b, a, b, ...; the longer ones continue after the others are
    exhausted.

    Nothing is copied: indices are computed. The label of a sample is in its `task`, and its id is `label/id`."""

    def __init__(self, samples: Mapping[str, Sequence[Sample]]):
        self.labels = tuple(samples)
        self._samples = tuple(samples.values())
        self.parts = dict(samples)
        """The samples of each label."""
        sizes = [len(s) for s in self._samples]
        self._size = sum(sizes)
        self._stretches: list[tuple[int, int, tuple[int, ...]]] = []
        """(first place, first round, the sequences that last through it) of each stretch of rounds."""
        place = round = 0
        for end in sorted(set(sizes)):
            going = tuple(k for k, size in enumerate(sizes) if size >= end)
            self._stretches.append((place, round, going))
            place, round = place + (end - round) * len(going), end
        self._firsts = [first for first, *_ in self._stretches]

    def where(self, place: int) -> str | None:
        label, own = self.locate(place)
        return where(self.parts[label], own)

    def fingerprint_rows(self) -> Sequence[int]:
        parts = {label: {*fingerprint_rows(own)} for label, own in self.parts.items()}
        return [i for i in range(self._size) if (place := self.locate(i))[1] in parts[place[0]]]

    def raw_record(self, place: int) -> tuple[str, Any] | None:
        label, own = self.locate(place)
        part = self.parts[label]
        return part.raw_record(own) if isinstance(part, SampleSequence) else None

    def __len__(self) -> int:
        return self._size

    def _at(self, place: int) -> Sample:
        label, own = self.locate(place)
        return with_label(self._samples[self.labels.index(label)][own], label)

    def locate(self, place: int) -> tuple[str, int]:
        """The label of an index, and the index within that label's own samples."""
        first, round, going = self._stretches[bisect_right(self._firsts, place) - 1]
        further, turn = divmod(place - first, len(going))
        return self.labels[going[turn]], round + further

    @property
    def tasks(self) -> list[str]:
        """[N] the label of every index, without making a sample."""
        ends = [*self._firsts[1:], self._size]
        parts = [np.tile(np.array(going), (end - first) // len(going))
                 for (first, _, going), end in zip(self._stretches, ends, strict=True)]
        return np.array(self.labels, dtype=object)[np.concatenate(parts)].tolist() if parts else []


def with_label(sample: Sample, label: str) -> Sample:
    """A task's own sample as one of a mixture."""
    return replace(sample, id=f"{label}/{sample.id}", task=label)


class Mixture(Task):
    """Labelled tasks as one. Whatever concerns a sample is delegated to the task that its `Sample.task` names."""

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
        """The task of a sample. Raises DataError if it names none of these."""
        if sample.task not in self.tasks:
            raise DataError(f"sample {sample.id!r}: task={sample.task[:100]!r} is not a task of this config."
                            f"{did_you_mean(sample.task[:100], self.tasks)} Its labels: {', '.join(self.tasks)}")
        return self.tasks[sample.task]

    def each(self, change: Callable[[str, Task], Task]) -> Mixture:
        """A mixture of `change(label, task)` of every task."""
        changed = Mixture({label: change(label, task) for label, task in self.tasks.items()})
        changed.seed, changed.data = self.seed, self.data
        return changed

    def __copy__(self) -> Mixture:
        return self.each(lambda _, task: copy.copy(task))

    def samples(self, split: str) -> Interleaved:
        """Those of every task in turn. Raises ConfigError naming a task without samples."""
        if split not in self._turns:
            self._turns[split] = Interleaved({label: _own_samples(i, task, split)
                                        for i, (label, task) in enumerate(self.tasks.items())})
            files = [unread_file(task, split) for task in self.members]
            if all(files):  # rows that the tasks have in common are for those that read rows
                raise unread_file_error("every task of `tasks` makes", split, files[0])
        return self._turns[split]

    def generate(self, index: int, knobs: Mapping[str, float]) -> Sample:
        """A sample of the task at this index of the training split, by its own knobs, `<label>/<knob>`; a plain sample
        of a task without knobs."""
        label, own = self.samples("train").locate(index)
        if not self.tasks[label].knobs:
            return self.samples("train")[index]
        mine = {name.removeprefix(f"{label}/"): v for name, v in knobs.items() if name.startswith(f"{label}/")}
        return with_label(generated(self.tasks[label], own, mine), label)

    def weights_at(self, step: int) -> dict[str, float]:
        """The parts of all tasks; the weight of a shared part is that of the first task."""
        return {part: w for task in reversed(self.members) for part, w in task.weights_at(step).items()}

    def readings(self, service: str, sample: Sample, answers: Sequence[Answer]) -> Sequence[Any]:
        return self.of(sample).readings(service, sample, answers)

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """`<label>/<name>`, of each task over its own records."""
        return {f"{label}/{name}": value for label, task in self.tasks.items()
                for name, value in task.summarize([r for r in records if r["task"] == label]).items()}


def _delegated(method: str) -> Callable[..., Any]:
    return lambda self, sample, *given: getattr(self.of(sample), method)(sample, *given)


for _method in ("template", "messages", "score", "score_group", "oracle", "pair", "variants", "guidance", "parse",
                "target", "metrics", "overlay", "cheats"):
    setattr(Mixture, _method, _delegated(_method))


def _called(task: Task, label: str) -> Task:
    """The task under its label, which messages and stored rollouts use as its name."""
    vars(task)["name"] = label
    return task


def _own_samples(place: int, task: Task, split: str) -> Sequence[Sample]:
    try:
        samples = task_samples(task, split)
    except VlrlError as error:
        raise type(error)(f"tasks.{place} ({task.name}): {error} (its own files: tasks.{place}.data.*)") from error
    if not len(samples):
        raise ConfigError(f"tasks.{place} ({task.name}) has no samples in split '{split}'; every task of a mixture "
                          f"needs some: set tasks.{place}.data.{split}, or leave the split out")
    return samples


def require_one_task(task: Task, what: str) -> Task:
    """The task, unless it is a mixture. Raises ConfigError for a mixture, which `what` cannot take."""
    if isinstance(task, Mixture):
        raise ConfigError(f"{what} takes one task, and this config has several: {', '.join(task.labels)}. Add "
                          f"task={task.labels[0]} to take that one alone")
    return task
