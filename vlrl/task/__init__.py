"""The Task contract, mixtures of tasks, and scoring of completions. Imports no torch.

- A task knows neither the name of the model nor the engine that generates. It works in pixels of the original image;
`self.coordinates` converts to and from the units in which the model writes coordinates.
- Code that builds the prompt of a sample or scores its answers gets the task from `task.of(sample)`, because a mixture
has several tasks. The label of the sample's task is in `Sample.task` and at the start of its id (`label/id`).
- `task.combine=auto` stands for the default of the task or recipe, which is mostly the weighted sum of the reward
parts."""

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
