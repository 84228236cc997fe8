"""The contract of a task, mixtures of tasks, and scoring of completions. No torch."""

from vlrl.task.base import (
    Task,
    builtin_names,
    check_parts,
    check_shape,
    fill,
    generated,
    load,
    load_class,
    setting_names,
    task_messages,
    task_oracle,
    task_samples,
    task_target,
)
from vlrl.task.combine import Weight

__all__ = ["Task", "Weight", "builtin_names", "check_parts", "check_shape", "fill", "generated", "load", "load_class",
           "setting_names", "task_messages", "task_oracle", "task_samples", "task_target"]
