"""Selects the first samples of a split, for evaluations and checks. Imports no torch."""

from __future__ import annotations

import itertools
from dataclasses import replace

from vlrl.data.samples import readable
from vlrl.errors import ConfigError
from vlrl.task.base import Task
from vlrl.task.interface import task_samples
from vlrl.types import Sample


def first_samples(task: Task, split: str, count: int) -> list[Sample]:
    """The first `count` samples of a split. Their prompts cycle through the templates of each task. Raises ConfigError
    if the split is empty."""
    samples = task_samples(task, split)
    if len(samples) == 0:
        raise ConfigError(f"task '{task.name}' has no samples in split '{split}'")
    leave_out = task.data is not None and task.data.quarantine
    candidates = (readable(samples, i) if leave_out else samples[i] for i in range(len(samples)))
    first = list(itertools.islice((sample for sample in candidates if sample is not None), count))
    out, last_turn = [], dict[str, int]()
    for sample in first:  # each task goes through its templates
        turn = last_turn[sample.task] = last_turn.get(sample.task, -1) + 1
        templates = task.of(sample).templates
        out.append(replace(sample, prompt=templates[turn % len(templates)]))
    return out
