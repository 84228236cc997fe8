"""The settings `rollout.*`, `async.*` and `curriculum.*`: sampling, and the choice of prompts and groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from vlrl.config.algo import AlgoSettings
from vlrl.config.base import Count, MethodSettings, Named, Positive, Settings
from vlrl.config.sections import default_of, section

_FACTOR = BeforeValidator(lambda v: {"name": "fixed", "factor": v} if isinstance(v, (int, float)) else v)
"""Shorthand: curriculum.oversample=2 selects the rule `fixed` with factor 2."""


class RolloutSettings(Settings):
    """How completions are sampled in a step, and how often each completion is trained on."""

    prompts_per_step: Positive = Field(default=32, description=(
        "Prompts per step, over all processes. 32 is a step of minutes on one GPU; TRL's default is one prompt "
        "per GPU, which is noisy, and EasyR1's is 512, for many GPUs."))
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description=(
        "Completions per prompt. 8, as in TRL (EasyR1: 5): the smaller the group, the more often all of its "
        "rewards are equal and teach nothing."))
    max_new_tokens: Positive = Field(
        default=512, description=(
        "Maximum tokens of a completion. 512, as in TRL, for short reasoning; EasyR1 allows 2048."))
    temperature: float = Field(default=1.0, gt=0, description=(
        "Sampling temperature. 1 samples from the policy itself; training computes log-probabilities at the same "
        "temperature."))
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Stop strings, which remain part of the completion. Evaluations use them too.")
    thinking_budget: Positive | None = Field(default=None, description=(
        "Tokens after which thinking is ended. rollout.thinking_end is appended to a completion without </think>, "
        "which then continues. Evaluations use it too."))
    thinking_end: str = Field(default="\n</think>\n", description=(
        "Text that ends thinking at the budget. It is not trained on. </think><answer> forces an answer as "
        "GLM-4.1V-Thinking does (2507.01006)."))
    step_tokens: Positive | None = Field(default=None, description=(
        "Partial rollouts: maximum tokens generated per step and completion. A longer completion continues in the "
        "next step, and its group waits for it; only the tokens of its last step are trained on. Evaluations "
        "generate complete answers."))
    score_ahead: bool = Field(default=True, description=(
        "Score complete groups in a thread during generation. false for tasks whose code only works in the main "
        "thread."))
    forget: Annotated[SerializeAsAny[MethodSettings], section("rollout.forget")] = Field(
        default_factory=default_of("rollout.forget"))
    branch: Annotated[SerializeAsAny[MethodSettings], section("rollout.branch")] = Field(
        default_factory=default_of("rollout.branch"))
    updates: Positive = Field(default=1, description="Passes over each batch of rollouts (epochs of PPO).")
    minibatches: Positive = Field(default=1, description="Optimizer steps per pass.")

    @property
    def one_update(self) -> bool:
        """Whether each batch of rollouts gets a single optimizer step. Then the policy that is trained is the policy
        that sampled the batch."""
        return self.updates * self.minibatches == 1

    @model_validator(mode="after")
    def _limits_apply(self) -> RolloutSettings:
        if self.thinking_budget is not None and self.thinking_budget >= self.max_new_tokens:
            raise ValueError(f"rollout.thinking_budget={self.thinking_budget} is not below rollout.max_new_tokens="
                             f"{self.max_new_tokens}, so the budget would never apply: lower "
                             "rollout.thinking_budget, or set it to null")
        if self.step_tokens is not None and self.step_tokens >= self.max_new_tokens:
            raise ValueError(f"rollout.step_tokens={self.step_tokens} is not below rollout.max_new_tokens="
                             f"{self.max_new_tokens}, so every completion ends in its first step: lower "
                             "rollout.step_tokens, or set it to null")
        if "</think>" not in self.thinking_end:
            raise ValueError(f"rollout.thinking_end={self.thinking_end!r} does not contain </think>, so thinking "
                             "would not end: add </think> to the text")
        return self


class AsyncSettings(Settings):
    """Asynchronous generation: completions of later steps are sampled during the update (docs/asynchronous.md)."""

    max_staleness: Count = Field(default=0, description=(
        "Maximum age of the sampling weights, in steps. 0 = generate, then update; 1 = a step's completions are "
        "sampled during the update of the previous step; n = sampling is up to n steps ahead, and the engine gets "
        "new weights every n steps. Requires algo.correction; the hf engine needs a second copy of the model."))

    def problem(self, rollout: RolloutSettings, algo: AlgoSettings) -> str:
        """Returns why asynchronous generation cannot be combined with other settings, with a remedy; "" if it can."""
        if not self.max_staleness:
            return ""
        most, off = self.max_staleness, "set async.max_staleness=0"
        if rollout.step_tokens is not None:
            return (f"async.max_staleness={most} samples the completions of a step before it is known which "
                    f"completions of the previous step are unfinished (rollout.step_tokens={rollout.step_tokens}): "
                    f"remove rollout.step_tokens, or {off}")
        if not algo.corrected:
            return (f"async.max_staleness={most} trains on completions of older weights, but with algo.correction=none "
                    f"algo.loss={algo.loss.name} treats them as completions of the current weights. Set "
                    "algo.correction=token_truncate (extends=algorithms/decoupled_ppo.yaml is the decoupled "
                    f"objective), or {off}")
        return ""


class CurriculumSettings(Settings):
    """Which samples are drawn, and which groups are used for training. Further keys are options of the sampler."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    name: str = Field(default="uniform", min_length=1, description=(
        "Sampler of prompts: uniform, sequential, sec, ... (docs/curriculum.md). Or your own module:Class. Its "
        "options are further keys: `curriculum.alpha=0.5`."))
    keep: Named = Field(default=Named(name="all"), description=(
        "Which groups are trained on: all, mixed, some_right, ... The others are replaced by new groups. mixed: "
        "groups with a non-zero advantage; some_right: groups with correct and wrong answers; pass_range: pass "
        "rates from low to high; std_ema: rewards that vary enough compared with earlier steps; or your own "
        "module:function."))
    max_refills: Count = Field(
        default=3, description="Maximum extra rounds of generation per step. They replace groups that are not kept.")
    oversample: Annotated[Named, _FACTOR] = Field(default=Named(name="fixed"), description=(
        "Groups sampled per group needed. A number of at least 1, or ema: 1 / the smoothed share of groups that "
        "were neither all correct nor all wrong."))
    select: Named = Field(default=Named(name="first"), description=(
        "Which of the surplus groups are trained on. first, nearest_half (pass rate), most_varied (rewards), or "
        "your own module:function."))
    part: str | None = Field(default=None, min_length=1, description=(
        "Reward part that decides what is correct. It counts in objectives, curricula, difficulty and "
        "evaluations; null = the task's outcome."))
    pass_at: float | None = Field(default=None, description=(
        "Threshold of curriculum.part for a correct answer. An answer is correct if the part is at least this "
        "large; null = the task's threshold, or 0.5 for a part for which the task sets none."))

    @property
    def sampler(self) -> Named:
        """The sampler as a Named: its name and options."""
        return Named(name=self.name, **(self.model_extra or {}))

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, value, reason) for curriculum.oversample if the additional groups would only be dropped, and
        for curriculum.select if there are no additional groups to select from."""
        oversample, select = self.oversample, self.select
        alone = (oversample.name == "fixed" and oversample.options.get("factor", 1) == 1) or (
            oversample.name == "ema" and oversample.options.get("most", 4) == 1)
        if select != type(self).model_fields["select"].default and alone:
            yield ("curriculum.select", select, "curriculum.oversample=1 never samples more groups than needed")
        unchosen = self.keep.name == "all" and select.name == "first"
        if not alone and unchosen and self.name in ("uniform", "sequential"):
            yield ("curriculum.oversample", oversample, "curriculum.keep=all and curriculum.select=first train on the "
                   "first groups and drop the others")
