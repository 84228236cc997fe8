"""Settings of the config section `algo.guided`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from vlrl.config.base import MethodSettings, Named, Positive, Rate


class GuidedSettings(MethodSettings):
    """Retries groups that have wrong completions, with guidance added after the question (docs/objectives.md)."""

    answers: Positive = Field(default=1, description=(
        "Retries per group. They are generated with the guidance of algo.guided.words; with use=hinted as many as "
        "the group has answers."))
    groups: Literal["failed", "wrong"] = Field(default="failed", description=(
        "Which groups are retried. failed = those without a correct answer; wrong = those with an answer known to "
        "be wrong."))
    words: Named = Field(default=Named(name="task"), description=(
        "Guidance: task, hint, answer, solution or critique. task = Task.guidance; hint = a growing beginning of "
        "the given solution; answer = the true answer; solution = the given solution; critique = a wrong answer, "
        "with the statement that it is wrong; or your own module:function."))
    keep: Named = Field(default=Named(name="correct"), description=(
        "Which retries are trained on: correct or explains. correct = those with a correct answer; explains = "
        "those of them that make the true answer more probable under the prompt alone (ExPO); or your own "
        "module:function."))
    use: Named = Field(default=Named(name="beside"), description=(
        "How retries are used: beside, join, replace or hinted. beside = trained by the separate loss "
        "algo.guided.loss, and in no statistic of the group; join = one retry joins the group; replace = one "
        "retry replaces a wrong answer; hinted = the retries and their prompt replace the group; or your own "
        "module:function."))
    loss: Named = Field(default=Named(name="sft"), description=(
        "Loss of retries with use=beside: sft, expo or dpo. It is computed under the prompt alone: sft = "
        "cross-entropy; expo = cross-entropy that fades out; dpo = preference over the failures of their group; "
        "or your own module:function."))
    coef: Rate = Field(default=1.0, description="Weight of the retries' loss in the objective.")

    @property
    def beside(self) -> bool:
        """Whether retries are trained by a separate loss instead of becoming members of their group."""
        return self.use.name == "beside"

    def problem(self, config: Any) -> str:
        keep, off = config.curriculum.keep.name, "set algo.guided=null"
        if config.rollout.step_tokens is not None:
            return (f"algo.guided generates second attempts once a group is complete, but rollout.step_tokens="
                    f"{config.rollout.step_tokens} lets groups continue in the next step: leave "
                    f"rollout.step_tokens out, or {off}")
        if config.asynchronous.max_staleness:
            return ("algo.guided generates second attempts once answers are scored, but async.max_staleness="
                    f"{config.asynchronous.max_staleness} generates answers ahead of that: set "
                    f"async.max_staleness=0, or {off}")
        if keep in ("mixed", "some_right", "pass_range", "std_ema"):
            return (f"curriculum.keep={keep} drops groups without a correct answer, which are those that algo.guided "
                    f"retries: set curriculum.keep=all, or {off}")
        return ""

    @property
    def adds_members(self) -> bool:
        return self.use.name not in ("beside", "hinted")

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        usual = type(self)()
        if not self.beside and ":" not in self.use.name:
            for name in ("loss", "coef"):
                if getattr(self, name) != getattr(usual, name):
                    yield (f"algo.guided.{name}", getattr(self, name), f"algo.guided.use={self.use.name} makes "
                           "attempts members of their group, which the objective trains")
        if self.use.name == "hinted" and self.answers != usual.answers:
            yield "algo.guided.answers", self.answers, "algo.guided.use=hinted retries a whole group"
