"""Turns `epochs` into `steps` when the training rows of a run are known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from vlrl.config.schema import Config
from vlrl.data.samples import Drawn, SampleSequence
from vlrl.errors import ConfigError
from vlrl.task import Task, task_samples
from vlrl.training.build_task import make_task

EACH_ROW = ("uniform", "sequential")
"""Samplers that draw every row once per epoch."""


class Length(NamedTuple):
    """The length of a run: its steps, and the training rows of an epoch (None if the run is not given in epochs)."""

    steps: int
    rows: int | None = None


def length_of(config: Config, task: Task | None = None) -> Length:
    """The length of a run: that of `steps`, or ceil(epochs * rows / rollout.prompts_per_step) steps, where the rows are
    those of all tasks together. Reads the data if the length is given in epochs; `task` is made from the config if it
    is None. Raises ConfigError if the task generates its samples, because these have no epochs."""
    if config.epochs is None:
        return Length(config.steps)
    samples = task_samples(task or make_task(config), "train")
    parts = {config.task.name: samples, **(samples.parts if isinstance(samples, SampleSequence) else {})}
    for name, part in parts.items():
        if isinstance(part, Drawn):
            raise ConfigError(f"epochs={config.epochs:g}: task '{name}' generates its samples, so there is no last one "
                              "that ends an epoch. Set steps instead, e.g. steps=100, or train on rows of a file "
                              "(data.train)")
    return Length(math.ceil(config.epochs * len(samples) / config.rollout.prompts_per_step), len(samples))


def with_length(config: Config, length: Length) -> Config:
    """The config with the length of the run filled in."""
    if length.rows is None:
        return config
    return config.model_copy(update={"steps": length.steps, "epoch_prompts": length.rows})


def length_lines(config: Config) -> Iterator[str]:
    """Says in words how many steps the epochs of a run are, and what an epoch means for its sampler. `config` has its
    length filled in. Yields nothing if the length is given in steps."""
    if config.epochs is None or config.epoch_prompts is None:
        return
    steps = f"{config.steps:,} step{'s' * (config.steps != 1)}"
    yield (f"epochs={config.epochs:g}: {steps} of {config.rollout.prompts_per_step} prompts, for "
           f"{config.epoch_prompts:,} training rows")
    if config.shares:
        yield "epochs: the tasks share the draws by their weights, so the rows of one task may be drawn more often"
    if config.curriculum.name not in EACH_ROW:
        yield (f"epochs: curriculum.name={config.curriculum.name} draws as many prompts as {config.epochs:g} epochs "
               "have, but some rows more often than others")
    if config.curriculum.keep.name != "all":
        yield (f"epochs: groups that curriculum.keep={config.curriculum.keep.name} replaces are drawn in addition, so "
               "the rows are passed more often")
