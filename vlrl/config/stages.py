"""The settings `stages`, `rounds` and `merge`: a run of several stages, each of which starts from the weights of an
earlier stage."""

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
    """One stage in `stages`; additional keys are settings that override the settings of the run."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(description="Name of the stage, and of its folder in the run folder.")
    kind: Literal["sft", "rl", "rounds", "merge"] = Field(description="sft: as `vlrl sft`; rl: as `vlrl train`; "
                                                          "rounds: see `rounds.*`; merge: see `merge.*`.")
    begin: str = Field(default="before", description="Initial weights: before = those handed over by the previous "
                       "stage; start = the model of the run; or the name of an earlier stage.")
    hand_over: Literal["last", "best"] = Field(default="last", description="Weights handed over to the next stage: "
                                               "those of the last step, or of the best evaluation (save.best).")

    times: dict[str, Rate] = Field(default={}, description="Factors by which settings of the run are multiplied, by "
                                   "name: {rollout.max_new_tokens: 0.5} halves the length.")

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,59}", name) or name in _TAKEN:
            raise ValueError("a stage's name becomes a folder: use up to 60 letters, digits, '_' and '-', but none of "
                             f"the names {', '.join(_TAKEN)}")
        return name

    @model_validator(mode="after")
    def _fits(self) -> StageEntry:
        run = self.settings.get("run")
        given = [name for name in _NOT_OF_A_STAGE if name in self.settings]
        given += ["run.dir"] if isinstance(run, Mapping) and "dir" in run else []
        if given:
            raise ValueError(f"{given[0]} is a setting of the run: set it outside of stages")
        if self.hand_over == "best" and self.kind not in ("sft", "rl"):
            raise ValueError(f"hand_over=best selects among the evaluations of a stage, but kind={self.kind} has none: "
                             "remove hand_over=best")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the stage overrides, as nested dictionaries."""
        return dict(self.model_extra or {})


class RoundsSettings(Settings):
    """Stages of kind `rounds`: sample answers, keep some correct ones, and train on them (rejection sampling)."""

    count: Positive = Field(default=3, description="Number of rounds.")
    prompts: Positive = Field(default=256, description=(
        "Prompts per round, in the order of the rows. The next round continues after them, and starts over at the "
        "end."))
    answers: Positive = Field(default=8, description="Answers sampled per prompt.")
    temperature: Annotated[float, Field(ge=0, le=10)] | None = Field(default=None, description="Sampling temperature; "
                                                                     "0 = greedy, null = rollout.temperature.")
    choose: Named = Field(
        default=Named(name="best"), description=(
        "Which correct answers are kept: best, shortest, diverse, all. Per prompt; or your own module:function."))
    least: Rate | None = Field(
        default=None, description="Reward from which an answer is correct. null = as the task decides (Task.correct).")
    gold: bool = Field(default=False, description=(
        "Train failed prompts on their given solution. Failed prompts have no correct answer; the given solution "
        "is the row's, or the task's perfect answer, as in selective self-rehearsal."))
    start: Literal["before", "stage", "start"] = Field(default="before", description=(
        "Initial weights of a round: before, stage or start. before = those of the previous round; stage = those "
        "that the stage began with, as in expert iteration; start = the model of the run, as in re-distillation."))
    keep_rows: bool = Field(
        default=False, description=(
        "Also train on the answers of earlier rounds. Each distinct kept answer counts once."))
    learn: Named = Field(default=Named(name="sft"), description=(
        "How a round trains: sft or dpo. sft = cross-entropy on the kept answers; dpo = preference of the kept "
        "answers over longer answers to the same prompts, wrong or correct (rounds.longer)."))
    longer: Rate = Field(default=1.5, ge=1, description=(
        "dpo: how much longer a rejected correct answer is. A correct answer is rejected if it has more than this "
        "many times the tokens of the kept answer; a wrong answer if it is longer at all."))
    epochs: Rate | None = Field(
        default=None, description="Passes over the kept answers, in place of `steps`. null = use `steps`.")


class MergeSettings(Settings):
    """Stages of kind `merge`: average the weights of two models."""

    other: str = Field(default="start", description=(
        "The model to merge with the previous stage's. The name of an earlier stage, start = the model of the "
        "run, or a folder."))
    share: float = Field(default=0.5, allow_inf_nan=False, description=(
        "Weight of the other model; negative extrapolates. share * other + (1 - share) * weights of the previous "
        "stage; a negative share extrapolates away from the other model."))


def check_stage_names(stages: Sequence[StageEntry]) -> None:
    """Raises ValueError if two stages have the same name."""
    names = [stage.name for stage in stages]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"stages.{names.index(name)} and stages.{i} are both called {name!r}: rename one of "
                             "them")
