"""The settings `task` and `tasks`: one task, or a mixture of several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vlrl.config.base import Names, Settings, refuse_bool


class TaskSettings(BaseModel):
    """`task.name` and the settings that every task has. Additional keys are settings of the particular task."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(default="", description="Name of a built-in task, module:Class or path/file.py:Class.")
    coordinates: Literal["auto", "original", "processed", "norm1000", "norm999", "norm1"] = Field(
        default="auto", description="How the model writes boxes and points; auto = the model family's convention.")
    rewards: dict[str, Any] = Field(
        default_factory=dict, description=(
        "Weight of each reward part. A number, or a schedule [[step, weight], ...] with linear interpolation."))
    parts: Names = Field(default=(), description=(
        "Additional reward parts for any task. Each is a name or {name: ..., options}: judge, cascade, "
        "general_verdict, rubric, reasoned, pairwise, tournament, principles, likelihood, consistency, "
        "reward_model (docs/services.md), or your own file.py:function. task.rewards.<part> sets the weight."))
    combine: str = Field(default="auto", description=(
        "How reward parts are combined; auto = as the task defines. sum, product, gate:<part> (other parts count "
        "only if this part is above 0), gate:<part>>=<minimum>, max:<a>,<b> (the larger of two parts, plus all "
        "others), tool_star:<format>,<accuracy>,<tools>, or your own file.py:function(parts, weights). Most tasks "
        "define sum."))


class TaskData(Settings):
    """The data files of one task of `tasks`. For a value of null, the setting of the section `data` is used."""

    train: str | None = Field(default=None, description="Used in place of data.train.")
    heldout: str | None = Field(default=None, description="Used in place of data.heldout.")
    root: str | None = Field(default=None, description="Used in place of data.root.")
    format: str | None = Field(default=None, description="Used in place of data.format.")
    columns: Mapping[str, str] | None = Field(default=None, description="Used in place of data.columns.")


class TaskEntry(TaskSettings):
    """One task of `tasks`: the settings of the section `task`, plus weight, label and data files."""

    weight: Annotated[float, Field(ge=0, le=1e9)] | None = Field(default=None, description=(
        "Share of the drawn prompts, relative to the other tasks; null = 1 if another task has a weight."))
    label: str = Field(default="", description="Name in metrics and commands; empty = the last part of the task's "
                       "name.")
    data: TaskData = TaskData()

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, values: Any) -> Any:
        values = {"name": values} if isinstance(values, str) else values
        if isinstance(values, Mapping) and not values.get("label") and isinstance(values.get("name"), str):
            return {**values, "label": label_of(values["name"])}
        return values

    @field_validator("weight", mode="before")
    @classmethod
    def _no_bool(cls, value: Any) -> Any:
        return refuse_bool(float, value)

    @field_validator("label")
    @classmethod
    def _plain(cls, label: str) -> str:
        if not re.fullmatch(r"(?=.*\w)[\w.-]{1,60}", label) or label in _METRIC_GROUPS:
            raise ValueError("a label must have 1 to 60 letters, digits, '_', '-' or '.', and must not be one of "
                             f"{', '.join(_METRIC_GROUPS)}, which are prefixes of metrics")
        return label

    @model_validator(mode="after")
    def _named(self) -> TaskEntry:
        if not self.name:
            raise ValueError("every task of tasks needs a name: a built-in task or a file, e.g. {name: grounding}")
        return self


_METRIC_GROUPS = ("reward", "completion", "groups", "tokens", "curriculum", "variants", "prompts", "rollouts", "time",
                  "memory", "balance", "judge", "clip", "logprobs", "reward_model")


def label_of(name: str) -> str:
    """The default label of a task, made from its name: the last part, without the file suffix."""
    location, _, attribute = name.partition(":")
    if location.endswith(".py"):
        location = Path(location).stem
    return re.sub(r"[^\w.-]+", "-", attribute or location.rpartition(".")[2])[:60]


def check_labels(tasks: Sequence[TaskEntry]) -> None:
    """Raises ValueError if two tasks have the same label, or if all weights are 0."""
    labels = [entry.label for entry in tasks]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            first = labels.index(label)
            raise ValueError(f"tasks.{first}.name={tasks[first].name!r} and tasks.{i}.name={tasks[i].name!r} are both "
                             f"labelled {label!r}: change the label of one, e.g. tasks.{i}.label={label}-{i}")
    if tasks and all(entry.weight == 0 for entry in tasks):
        raise ValueError("tasks: every weight is 0, so no prompt would be drawn; give one task a weight above 0")
