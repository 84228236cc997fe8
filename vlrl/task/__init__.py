"""The contract of a task, mixtures of tasks, and scoring of completions. No torch.

- A task knows neither a model name nor an engine. It works in pixels of the original image; `self.coordinates` converts
  from and to the units of the model.
- Whatever asks or scores a sample goes through `task.of(sample)`; the label of a mixture's sample is in its `task` and
  in its id (`label/id`).
- `task.combine=auto` is the default of the task or recipe, mostly the sum."""

from vlrl.task.base import Task, fill, setting_names
from vlrl.task.combine import Weight
from vlrl.task.interface import (
    check_parts,
    check_shape,
    generated,
    task_messages,
    task_oracle,
    task_oracle_actions,
    task_samples,
    task_target,
    tool_schemas,
    with_guidance,
)
from vlrl.task.loading import builtin_names, load, load_class

__all__ = ["Task", "Weight", "builtin_names", "check_parts", "check_shape", "fill", "generated", "load", "load_class",
           "setting_names", "task_messages", "task_oracle", "task_oracle_actions", "task_samples", "task_target",
           "tool_schemas", "with_guidance"]
