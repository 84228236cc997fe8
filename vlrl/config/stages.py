"""The settings `stages`, `rounds` and `merge`: a run of several parts, each from the weights of the one before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vlrl.config.base import Named, Positive, Rate, Settings

KINDS = ("sft", "rl", "rounds", "merge")
_TAKEN = ("start", "before", "media", "checkpoints", "rollouts")
_NOT_OF_A_STAGE = ("stages", "resume")


class StageEntry(BaseModel):
    """One stage of `stages`; further keys are settings that override those of the run."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(description="What the stage is called; its run folder below that of the run is named after it.")
    kind: Literal["sft", "rl", "rounds", "merge"] = Field(
        description="sft: as `vlrl sft`; rl: as `vlrl train`; rounds: `rounds.*`; merge: `merge.*`.")
    begin: str = Field(default="before", description="The weights that it begins with: before = those that the stage "
                       "before hands over; start = the model of the run; or those of an earlier stage, by name.")
    hand_over: Literal["last", "best"] = Field(
        default="last", description="The weights that the next stage begins with: those of the last step, or of the "
        "best evaluation (save.best).")

    times: dict[str, Rate] = Field(
        default={}, description="Settings of the run that it has so many times, by their names: "
        "{rollout.max_new_tokens: 0.5} halves the length.")

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,59}", name) or name in _TAKEN:
            raise ValueError("a stage's name is a folder: up to 60 letters, digits, '_' and '-', and none of "
                             f"{', '.join(_TAKEN)}")
        return name

    @model_validator(mode="after")
    def _fits(self) -> StageEntry:
        run = self.settings.get("run")
        given = [name for name in _NOT_OF_A_STAGE if name in self.settings]
        given += ["run.dir"] if isinstance(run, Mapping) and "dir" in run else []
        if given:
            raise ValueError(f"{given[0]} is a setting of the whole run: set it beside stages")
        if self.hand_over == "best" and self.kind not in ("sft", "rl"):
            raise ValueError(f"hand_over=best chooses among the evaluations of a stage, and kind={self.kind} has none "
                             "of its own: leave it out")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """What it overrides, nested."""
        return dict(self.model_extra or {})


class RoundsSettings(Settings):
    """Stages of kind `rounds`: answers are drawn, some of those that are right are kept, and are learned from."""

    count: Positive = Field(default=3, description="Rounds.")
    prompts: Positive = Field(default=256, description="Prompts of a round, the first ones of the training rows; each "
                              "round goes on with those after them, from the beginning again when they end.")
    answers: Positive = Field(default=8, description="Answers to a prompt.")
    temperature: Annotated[float, Field(ge=0, le=10)] | None = Field(
        default=None, description="Sampling temperature of the answers; 0 = greedy, null = rollout.temperature.")
    choose: Named = Field(
        default=Named(name="best"), description="Which right answers to a prompt are kept: best, shortest, diverse, "
        "all, or own module:function.")
    least: Rate | None = Field(
        default=None, description="The reward from which an answer is right; null = as the task says (Task.correct).")
    gold: bool = Field(
        default=False, description="A prompt without a right answer is learned by its row's solution, or the task's "
        "perfect answer, as in selective self-rehearsal.")
    start: Literal["before", "stage", "start"] = Field(
        default="before", description="What a round trains: before = the weights of the round before; stage = those "
        "that the stage began with, as in expert iteration; start = the model of the run, as in re-distillation.")
    keep_rows: bool = Field(
        default=False, description="A round learns the answers of all rounds before it too, each text once.")
    learn: Named = Field(
        default=Named(name="sft"), description="How a round learns: sft = the answers that were kept; dpo = that these "
        "are preferred to longer answers to their prompts, wrong ones and right ones (rounds.longer).")
    longer: Rate = Field(
        default=1.5, ge=1, description="With learn=dpo: a right answer is rejected where it has more than so many "
        "times the tokens of the kept one; a wrong one where it is longer at all.")
    epochs: Rate | None = Field(
        default=None, description="Passes over the answers that were kept, in place of `steps`; null = `steps` steps.")


class MergeSettings(Settings):
    """Stages of kind `merge`: the weights of two models are averaged."""

    other: str = Field(default="start", description="The model that joins those of the stage before: the name of an "
                       "earlier stage, start = the model of the run, or a folder.")
    share: float = Field(default=0.5, allow_inf_nan=False, description="share * other + (1 - share) * weights of the "
                         "stage before; below 0 goes on beyond these, away from the other.")


def apart(stages: Sequence[StageEntry]) -> None:
    """Raises ValueError where two stages have one name."""
    names = [stage.name for stage in stages]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"stages.{names.index(name)} and stages.{i} are both called {name!r}: give one another "
                             "name")
