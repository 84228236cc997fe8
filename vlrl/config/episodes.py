"""The settings `episode.*` and `environment.*`: how long an episode may be, and where its environment runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from vlrl.config.base import Count, Named, Positive, Settings


class EpisodeSettings(Settings):
    """How long an episode may be, for tasks with an environment. Its actions have rollout.max_new_tokens each."""

    max_turns: Positive = Field(default=8, description="Actions of an episode; one that has not ended then has the "
                                "finish_reason turns.")
    horizon: Named | None = Field(
        default=None, description="Fewer turns at the start of training, growing to max_turns: {name: add, start: 2, "
        "every: 10} (one turn more every 10 steps), multiply (start, twice, three times as many ...), success (more "
        "where enough episodes are correct), or own module:function. Evaluations have max_turns (docs/curriculum.md).")
    max_tokens: Positive = Field(default=4096, description="Tokens of all actions and observations of an episode; it "
                                 "ends (tokens) before an observation that would leave no room for an action.")
    max_media: Count = Field(default=32, description="Images and videos of all observations of an episode; it ends "
                             "(media) before an observation with more.")
    max_pixels: Positive | None = Field(default=None, description="Pixels of an image or frame of an observation; a "
                                        "larger one is made smaller. model.max_pixels holds for it too.")
    history: str = Field(default="full", pattern=r"^(full|last:[1-9][0-9]{0,3})$",
                         description="What a turn is asked under: `full` = the whole episode so far; `last:k` = the "
                         "prompt and the last k observations with the actions between them. Each turn is then a "
                         "training row of its own, and an episode still counts once.")

    @property
    def last(self) -> int | None:
        """Observations that a turn is asked under; None = all."""
        return None if self.history == "full" else int(self.history.partition(":")[2])


class EnvironmentSettings(Settings):
    """Which environment a task without one of its own has, and where environments run."""

    name: tuple[str, ...] = Field(
        default=(), description="An environment from outside, for a task that has none of its own (docs/environments.md"
        "): path/file.py:Class or module:Class (called with the sample), gym:FrozenLake-v1, openenv:http://host:8000, "
        "mcp:http://host:8000/mcp or mcp:command and its arguments. Several servers as a list; episodes are spread "
        "over those that answer. Empty = the task's own.")
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="Arguments of environment.name: of the class, of the gymnasium environment, "
        "or those in docs/environments.md.")
    workers: Positive = Field(default=2, description="Processes of their own that environments run in (Linux; "
                              "elsewhere the training process, without time limits). Several episodes share each, "
                              "one call at a time; environments that wait need as many as wait at once.")
    order: Literal["auto", "fixed", "arrival"] = Field(
        default="auto", description="fixed: all episodes act, then all their environments answer, so a resumed run is "
        "the undisturbed one. arrival: the model goes on with those whose environments have answered while others "
        "wait; which answers are written side by side depends on the clock, and so do their last bits. auto: fixed "
        "with engine.name=hf, else arrival.")
    step_s: float = Field(default=60.0, gt=0, description="Seconds that one step of an environment may take. Its "
                          "process is ended then and started again; the episode is not scored.")
    reset_s: float = Field(default=120.0, gt=0, description="Seconds that a reset may take.")

    @field_validator("name", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) and value else value or ()

    @field_validator("name")
    @classmethod
    def _no_empty_name(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in value):
            raise ValueError("one of the names is empty")
        return value
