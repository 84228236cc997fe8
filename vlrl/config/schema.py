"""`Config`, all settings of a run: its sections, each defined in a module of this package, and the rules across
sections.

Each setting has a name, type, default, bounds and description; loading.py reads settings from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from vlrl.config.alerts import AlertSettings
from vlrl.config.algo import AlgoSettings
from vlrl.config.base import Count, Positive, Rate, Settings
from vlrl.config.data import AnswerType, DataSettings
from vlrl.config.engine import PLACES, EngineSettings
from vlrl.config.episodes import EnvironmentSettings, EpisodeSettings
from vlrl.config.model import LoraSettings, ModelSettings, TrainSettings
from vlrl.config.rollout import AsyncSettings, CurriculumSettings, RolloutSettings
from vlrl.config.running import EvalSettings, LimitsSettings, LogSettings, RunSettings, SaveSettings, StoreSettings
from vlrl.config.sections import SECTIONS, active
from vlrl.config.services import PLACES as SERVICE_PLACES
from vlrl.config.services import ServicesSettings, with_reference
from vlrl.config.stages import MergeSettings, RoundsSettings, StageEntry, check_stage_names
from vlrl.config.tasks import TaskEntry, TaskSettings, check_labels, label_of

__all__ = ["RESUMABLE", "SHORT", "AlgoSettings", "AnswerType", "AsyncSettings", "Config", "CurriculumSettings",
           "DataSettings", "EngineSettings", "EnvironmentSettings", "EpisodeSettings", "EvalSettings",
           "LimitsSettings", "LoraSettings", "MergeSettings", "ModelSettings", "RolloutSettings", "RoundsSettings",
           "SaveSettings", "StageEntry", "TaskSettings", "TrainSettings", "label_of", "resumable"]

RESUMABLE = ("steps", "epochs", "epoch_prompts", "eval", "save", "log", "store", "run", "resume", "alerts", "presets",
             "data.cache", "model.gradient_checkpointing", "train.sharding", "train.cpu_offload", "limits.collective_s",
             "limits.environment_errors", "limits.nonfinite_steps", "limits.score_s", "limits.service_errors",
             "limits.stuck_s", "environment.name",
             *SERVICE_PLACES, *(f"engine.{name}" for name in PLACES),
             *(f"{name}.{place}" for name, entry in SECTIONS.items() for place in entry.places))
"""Settings and sections that may change when a run is resumed from a checkpoint."""
LENGTH = ("steps", "epochs", "epoch_prompts")
"""Settings of a run's length: of two files or overrides, the later one replaces all of them."""
SHORT = ("engine", "task", "curriculum")
"""Sections that may be written as a string, which then sets their `name`."""


def resumable(name: str) -> bool:
    """Whether a setting, e.g. engine.servers, may change when a run is resumed from a checkpoint."""
    return any(name == one or name.startswith(f"{one}.") for one in RESUMABLE)


class Config(Settings):
    """All settings of a run."""

    model_config = ConfigDict(serialize_by_alias=True)
    steps: Count = Field(default=100, description="Total number of training steps, including those before a resume.")
    epochs: Rate | None = Field(default=None, description=(
        "Passes over the training rows, in place of `steps`. The run has ceil(epochs * rows / "
        "rollout.prompts_per_step) steps, where the rows are those of all tasks together. Each row is drawn that often "
        "with curriculum.name=uniform or sequential; other samplers, and several tasks with weights, draw as many "
        "prompts but choose among the rows, and groups that curriculum.keep replaces are drawn in addition. Only for "
        "data of a known length."))
    epoch_prompts: Positive | None = Field(default=None, description=(
        "Training rows of an epoch, filled in when the run starts. config.yaml keeps it beside `epochs` and the "
        "resulting `steps`. A run whose rows have changed is not resumed."))
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of sampling, data order and dropout.")
    resume: Literal["auto", "never", "must"] = Field(default="auto", description=(
        "Whether to resume. auto: from the newest checkpoint if there is one; never: start over; must: fail "
        "without a checkpoint."))
    tasks: tuple[TaskEntry, ...] = Field(default=(), description=(
        "Several tasks in place of `task` (docs/tasks.md). A list with name, weight, label, data and the settings "
        "of `task` for each."))
    stages: tuple[StageEntry, ...] = Field(default=(), description=(
        "Stages of the run (docs/stages.md). A list with name, kind (sft, rl, rounds, merge), begin, hand_over, "
        "and settings that override those of the run. By default a stage starts from the weights of the previous "
        "stage."))
    presets: tuple[str, ...] = Field(default=(), description=(
        "Presets that these settings come from, filled in by the loader. Their needs are checked by this list "
        "(`vlrl presets`)."))
    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    asynchronous: AsyncSettings = Field(default=AsyncSettings(), alias="async")
    algo: AlgoSettings = AlgoSettings()
    episode: EpisodeSettings = EpisodeSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    services: ServicesSettings = ServicesSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    save: SaveSettings = SaveSettings()
    store: StoreSettings = StoreSettings()
    log: LogSettings = LogSettings()
    limits: LimitsSettings = LimitsSettings()
    alerts: AlertSettings = AlertSettings()
    rounds: RoundsSettings = RoundsSettings()
    merge: MergeSettings = MergeSettings()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """Expands short forms such as `engine: hf` and `task: grounding` to mappings with `name`. `task: null` removes
        the task that this config inherits from the file that it extends."""
        if isinstance(values, Mapping):
            values = {k: v for k, v in values.items() if v is not None or k not in ("task", "tasks")}
            named = {k: {"name": values[k]} for k in SHORT if isinstance(values.get(k), str)}
            return with_reference({**values, **named})
        return values

    @model_validator(mode="after")
    def _required(self) -> Config:
        if self.tasks and self.task != TaskSettings():
            if not self.task.name:
                given = next(iter(self.task.model_dump(exclude_defaults=True)))
                raise ValueError(f"task.{given} is set, but this config has several tasks ({self.task_name}): "
                                 f"set this field for one of the tasks, e.g. tasks.0.{given}")
            raise ValueError(f"task.name={self.task.name!r} and tasks ({self.task_name}) are both set, but a run has "
                             "either one task or several: remove task (task=null), or tasks (tasks=null)")
        if not self.tasks and not self.task.name:
            raise ValueError("task.name is not set: name a built-in task or a file, e.g. task.name=grounding")
        if not self.model.name:
            raise ValueError("model.name is not set: give a hub name or a folder, e.g. "
                             "model.name=Qwen/Qwen2.5-VL-3B-Instruct")
        return self

    @model_validator(mode="after")
    def _each_apart(self) -> Config:
        check_labels(self.tasks)
        if self.data.solutions and self.tasks:
            raise ValueError(f"data.solutions={self.data.solutions!r} refers to rows by their number in the training "
                             "split of one task, but this config has several tasks: select one task (task=LABEL), or "
                             "remove data.solutions")
        check_stage_names(self.stages)
        return self

    @model_validator(mode="after")
    def _stale_answers_fit(self) -> Config:
        if problem := (self.asynchronous.problem(self.rollout, self.algo)
                       or next(filter(None, (settings.problem(self) for _, settings in active(self))), "")):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Config:
        usual = SaveSettings.model_fields["best"].default  # the default promises nothing
        if self.save.best not in ("", usual) and not (self.eval.samples and self.eval.splits):
            raise ValueError(f"save.best={self.save.best!r} keeps the checkpoint of the best evaluation, but nothing "
                             "is evaluated: set eval.samples (and eval.every), or remove save.best")
        return self

    @property
    def each_task(self) -> Sequence[TaskSettings]:
        """The settings of each task: the section `task`, or the entries of `tasks`."""
        return self.tasks or (self.task,)

    @property
    def task_name(self) -> str:
        """The name of the task. For several tasks, their labels joined by " + "."""
        return " + ".join(entry.label for entry in self.tasks) or self.task.name

    @property
    def shares(self) -> dict[str, float]:
        """Task label -> weight (by default 1); {} if no task has a weight, so that one sampler draws from all tasks."""
        if all(entry.weight is None for entry in self.tasks):
            return {}
        return {entry.label: 1.0 if entry.weight is None else entry.weight for entry in self.tasks}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.rollout.minibatches > self.rollout.prompts_per_step:
            raise ValueError(f"rollout.minibatches={self.rollout.minibatches} is more than "
                             f"rollout.prompts_per_step={self.rollout.prompts_per_step}, so a minibatch would be "
                             "empty: lower rollout.minibatches (a preset may set it) or raise "
                             "rollout.prompts_per_step")
        low = self.model.min_pixels
        if low and low > self.limits.image_pixels:
            raise ValueError(f"model.min_pixels={low} enlarges every image beyond limits.image_pixels="
                             f"{self.limits.image_pixels}: lower model.min_pixels or raise limits.image_pixels")
        most = self.engine.max_model_len
        if most is not None and most <= self.rollout.max_new_tokens:
            raise ValueError(f"engine.max_model_len={most} leaves no room for a prompt in addition to "
                             f"rollout.max_new_tokens={self.rollout.max_new_tokens}: raise engine.max_model_len, or "
                             "lower rollout.max_new_tokens")
        return self
