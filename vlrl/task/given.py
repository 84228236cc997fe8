"""The answer that a sample is given with."""

from __future__ import annotations

from vlrl.task.asked import task_oracle
from vlrl.task.base import Task
from vlrl.types import Sample


def given_answer(task: Task, sample: Sample) -> str | None:
    """Returns the answer that is learned: the row's `solution`, or the task's perfect one; None without either."""
    return sample.get("solution") or task_oracle(task, sample)
