"""The settings `episode.*` and `environment.*`: limits of episodes, and where environments run."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from vlrl.config.base import Count, Named, Positive, Settings


class EpisodeSettings(Settings):
    """Limits of episodes, for tasks with an environment. An action has at most rollout.max_new_tokens tokens."""

    max_turns: Positive = Field(
        default=8, description=(
        "Maximum actions of an episode. An episode that has not ended by then gets the finish_reason turns."))
    horizon: Named | None = Field(default=None, description=(
        "Turn limit that grows to max_turns; null = none. {name: add, start: 2, every: 10} (one more turn every "
        "10 steps), multiply (start, twice, three times as many, ...), success (more turns once enough episodes "
        "are correct), or your own module:function. Evaluations use max_turns (docs/curriculum.md)."))
    max_tokens: Positive = Field(default=4096, description=(
        "Maximum tokens of all actions and observations. An episode ends (finish_reason tokens) before an "
        "observation that would leave no room for an action."))
    max_media: Count = Field(default=32, description=(
        "Maximum images and videos in all observations. An episode ends (finish_reason media) before an "
        "observation that would exceed it."))
    max_pixels: Positive | None = Field(default=None, description=(
        "Maximum pixels of an observation's image. A larger image or frame is scaled down. model.max_pixels "
        "applies too."))
    history: str = Field(default="full", pattern=r"^(full|last:[1-9][0-9]{0,3})$", description=(
        "Context of a turn: full, or last:k observations. `full` = the episode so far; `last:k` = the prompt and "
        "the last k observations with the actions between them. With last:k each turn is a separate training row, "
        "but an episode still counts once."))

    @property
    def last(self) -> int | None:
        """How many of the last observations the context of a turn contains; None for all observations."""
        return None if self.history == "full" else int(self.history.partition(":")[2])


class EnvironmentSettings(Settings):
    """An external environment for a task that does not define one, and where environments run."""

    name: tuple[str, ...] = Field(default=(), description=(
        "External environment for a task without one (docs/environments.md). path/file.py:Class or module:Class "
        "(called with the sample), gym:FrozenLake-v1, openenv:http://host:8000, mcp:http://host:8000/mcp or "
        "mcp:command and its arguments. Several servers as a list; episodes are spread over the servers that "
        "respond. Empty = the task's environment."))
    options: Mapping[str, Any] = Field(default_factory=dict, description=(
        "Arguments of the environment. Those of the class or gymnasium environment, or those in "
        "docs/environments.md."))
    workers: Positive = Field(default=2, description=(
        "Worker processes for environments. On Linux; elsewhere they run in the training process, without time "
        "limits. Several episodes share a worker, one call at a time, so environments that wait for something "
        "need more workers."))
    order: Literal["auto", "fixed", "arrival"] = Field(default="auto", description=(
        "fixed (exact resume), or arrival (faster); auto = by engine. fixed: all episodes act, then all their "
        "environments respond, so a resumed run equals an uninterrupted one. arrival: the model continues with "
        "the episodes whose environments have responded while others wait; batches, and so the last bits of "
        "probabilities, then depend on timing. auto: fixed with engine.name=hf, else arrival."))
    step_s: float = Field(default=60.0, gt=0, description=(
        "Timeout of a step in seconds. After a timeout its process is killed and restarted, and the episode is "
        "not scored."))
    reset_s: float = Field(default=120.0, gt=0, description="Timeout of a reset in seconds.")

    @field_validator("name", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value else value or ()

    @field_validator("name")
    @classmethod
    def _no_empty_name(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in value):
            raise ValueError("one of the names is empty: remove it")
        return value
