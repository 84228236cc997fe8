"""The settings `rollout.*`, `async.*` and `curriculum.*`: how and when answers are drawn, to which prompts, and which
are learned from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from vlrl.config.algo import AlgoSettings
from vlrl.config.base import Count, MethodSettings, Named, Positive, Settings
from vlrl.config.sections import default_of, section


def _factor(value: Any) -> Any:
    """Returns a number as the fixed factor of curriculum.oversample."""
    return {"name": "fixed", "factor": value} if isinstance(value, (int, float)) else value


class RolloutSettings(Settings):
    """How many answers a step draws, how they are sampled, and how often they are learned from."""

    prompts_per_step: Positive = Field(default=32, description="Prompts a step, over all processes.")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="Answers per prompt.")
    max_new_tokens: Positive = Field(default=512, description="Most tokens of one answer.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; training uses the same.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Texts that end an answer; they stay part of it. Evaluations use them too.")
    thinking_budget: Positive | None = Field(
        default=None, description="Tokens after which an answer without </think> gets rollout.thinking_end, and goes "
        "on from there. Evaluations use it too.")
    thinking_end: str = Field(
        default="\n</think>\n", description="Text that ends thinking over budget; it is not learned from. "
        "</think><answer> forces an answer as GLM-4.1V-Thinking does (2507.01006).")
    step_tokens: Positive | None = Field(
        default=None, description="Most tokens of an answer that one step writes: a longer one goes on in the next "
        "step, and its group waits for it. Only what its last step wrote is learned from. Evaluations write whole "
        "answers.")
    score_ahead: bool = Field(
        default=True, description="Score finished groups in a thread while others are generated; false for a task that "
        "works in the main thread only.")
    forget: Annotated[SerializeAsAny[MethodSettings], section("rollout.forget")] = Field(
        default_factory=default_of("rollout.forget"))
    branch: Annotated[SerializeAsAny[MethodSettings], section("rollout.branch")] = Field(
        default_factory=default_of("rollout.branch"))
    updates: Positive = Field(default=1, description="Passes over one batch of rollouts.")
    minibatches: Positive = Field(default=1, description="Optimizer steps per pass.")

    @property
    def one_update(self) -> bool:
        """Whether a batch of rollouts has one optimizer step, so that the policy is the one at its start."""
        return self.updates * self.minibatches == 1

    @model_validator(mode="after")
    def _limits_apply(self) -> RolloutSettings:
        if self.thinking_budget is not None and self.thinking_budget >= self.max_new_tokens:
            raise ValueError(f"rollout.thinking_budget={self.thinking_budget} is not below rollout.max_new_tokens="
                             f"{self.max_new_tokens}, so it would never apply: lower it, or set it to null")
        if self.step_tokens is not None and self.step_tokens >= self.max_new_tokens:
            raise ValueError(f"rollout.step_tokens={self.step_tokens} is not below rollout.max_new_tokens="
                             f"{self.max_new_tokens}, so every answer ends in its first step: lower it, or set it to "
                             "null")
        if "</think>" not in self.thinking_end:
            raise ValueError(f"rollout.thinking_end={self.thinking_end!r} does not hold </think>, so thinking would "
                             "go on: add it")
        return self


class AsyncSettings(Settings):
    """Generation beside the update: answers of later steps are drawn while a step learns (docs/asynchronous.md)."""

    max_staleness: Count = Field(
        default=0, description="Most steps between the weights that sample an answer and those that learn from it. 0 = "
        "generate, then learn; 1 = the answers of a step are drawn while the step before it learns; more = so many "
        "steps are drawn ahead, and the engine takes new weights as rarely. Needs algo.correction; the hf engine keeps "
        "a copy of the model for it.")

    def problem(self, rollout: RolloutSettings, algo: AlgoSettings) -> str:
        """Returns why other settings forbid it, and the way out; "" where nothing does."""
        if not self.max_staleness:
            return ""
        most, off = self.max_staleness, "set async.max_staleness=0"
        if rollout.step_tokens is not None:
            return (f"async.max_staleness={most} draws a step's answers before it is known which of "
                    f"rollout.step_tokens={rollout.step_tokens} go on from the step before: leave "
                    f"rollout.step_tokens out, or {off}")
        if not algo.corrected:
            return (f"async.max_staleness={most} learns from answers of older weights, and with algo.correction=none "
                    f"algo.loss={algo.loss.name} takes them for answers of its own. Set algo.correction=token_truncate "
                    f"(extends=algorithms/decoupled_ppo.yaml is the decoupled objective), or {off}")
        return ""


class CurriculumSettings(Settings):
    """Which samples are drawn, and which groups are learned from. Further keys are options of the sampler."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    name: str = Field(default="uniform", min_length=1, description="What draws the prompts: uniform, sequential, sec, "
                      "... (docs/curriculum.md) or own module:Class. Its options stand beside: `curriculum.alpha=0.5`.")
    keep: Named = Field(
        default=Named(name="all"), description="Which groups are trained on; others are refilled. all; mixed: those "
        "that give some answer an advantage; some_right: those with right and wrong answers; pass_range: pass rates "
        "from low to high; std_ema: rewards that vary enough beside those of earlier steps; or own module:function.")
    max_refills: Count = Field(default=3, description="Most extra rounds of generation in a step to replace groups "
                               "that are not kept.")
    oversample: Annotated[Named, BeforeValidator(_factor)] = Field(
        default=Named(name="fixed"), description="Groups drawn for each one wanted: a number from 1 on, or ema: 1 / "
        "the share of groups that were neither all right nor all wrong, smoothed.")
    select: Named = Field(
        default=Named(name="first"), description="Which of more kept groups than are wanted are trained on: first, "
        "nearest_half (pass rate), most_varied (rewards), or own module:function.")
    part: str | None = Field(
        default=None, min_length=1, description="The reward part that says whether an answer is correct, to "
        "objectives, curricula, difficulty and evaluations alike; null = what the task names as its outcome.")
    pass_at: float | None = Field(default=None, description="An answer is correct when that part is at least this "
                                  "much; null = the task's threshold, 0.5 for another part than its own.")

    @property
    def sampler(self) -> Named:
        """The sampler with its options."""
        return Named(name=self.name, **(self.model_extra or {}))

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields groups drawn for a choice that is not made, and a choice that has none."""
        oversample, select = self.oversample, self.select
        alone = (oversample.name == "fixed" and oversample.options.get("factor", 1) == 1) or (
            oversample.name == "ema" and oversample.options.get("most", 4) == 1)
        if select != type(self).model_fields["select"].default and alone:
            yield ("curriculum.select", select, "curriculum.oversample=1 never draws more groups than are wanted")
        unchosen = self.keep.name == "all" and select.name == "first"
        if not alone and unchosen and self.name in ("uniform", "sequential"):
            yield ("curriculum.oversample", oversample, "curriculum.keep=all and curriculum.select=first train on the "
                   "first groups, and the others are thrown away")
