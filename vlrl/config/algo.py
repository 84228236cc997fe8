"""The settings `algo.*`: from rewards to a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from vlrl.config.base import MethodSettings, Named, Names, NonNegative, Positive, Rate, Settings
from vlrl.config.sections import PAIRS, section

SUPERVISED = ("supervised", PAIRS)
"""Losses of `vlrl sft`."""
HEAD_LR = 1e-3

CLIPS = ("clip_low", "clip_high")
"""Settings of algo that are options of algo.loss by another way."""


class AlgoSettings(Settings):
    """From rewards to a loss. docs/objectives.md lists the names with their formulas, options and papers."""

    advantage: Named = Field(default=Named(name="grpo"), description="grpo, dr_grpo, rloo, ... or own module:function.")
    shaping: Names = Field(
        default=(), description="Changes of the rewards before the advantage, in order: overlong, kimi_length, ... or "
        "own module:function.")
    critic: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.critic")] = Field(
        default=None, description="A value head, trained beside the policy, for an advantage that needs one (gae, "
        "turn_gae, bilevel_gae, macro_gae); {} = with the defaults below; null = none.")
    guided: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.guided")] = Field(
        default=None, description="Second attempts of groups in which answers failed, with more behind the question: "
        "guidance of the task, a hint, the solution, a critique; {} = with the defaults below; null = none.")
    demonstrations: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.demonstrations")] = Field(
        default=None, description="Cross-entropy on given answers beside the objective; {} = with the defaults below; "
        "null = none.")
    stored: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.stored")] = Field(
        default=None, description="Rollouts of earlier steps and of other runs, learned from again beside the "
        "objective; {} = with the defaults below; null = none.")
    distillation: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.distillation")] = Field(
        default=None, description="A teacher that scores each token of the policy's own answers, beside the objective "
        "or in place of it; {} = with the defaults below; null = none.")
    batch: Named = Field(
        default=Named(name="all"), description="Which rollouts of a step are trained on: all, rorecomp, right, pf_ppo, "
        "rest, or own module:function.")
    loss: Named = Field(
        default=Named(name="ppo_clip"), description="The policy term of a token: ppo_clip, gspo, cispo, reinforce, ... "
        "or own module:function.")
    weights: Names = Field(
        default=(), description="Weights on tokens or answers, multiplied into the policy term: top_entropy, hicra, "
        "... or own module:function.")
    correction: Named = Field(
        default=Named(name="none"), description="Weight that makes up for a sampler that computes otherwise than the "
        "trainer: none, token_truncate (TIS), token_mask (IcePop), sequence_mask, ... or own module:function.")
    aggregation: Named = Field(
        default=Named(name="token_mean"), description="token_mean: sum / tokens of the optimizer step; sequence_mean: "
        "mean of per-answer means; constant: sum / (answers * rollout.max_new_tokens); sequence_sum; or own "
        "module:function.")
    clip_low: float | None = Field(
        default=None, gt=0, description="The ratio is clipped below 1 - clip_low, or what the loss makes of it: the "
        "same as algo.loss.clip_low, of which the later word holds. Refused where the loss has no clip; null = its "
        "default.")
    clip_high: float | None = Field(
        default=None, gt=0, description="The ratio is clipped above 1 + clip_high, or what the loss makes of it: the "
        "same as algo.loss.clip_high, of which the later word holds. Refused where the loss has no clip; null = its "
        "default.")
    kl: Named = Field(default=Named(name="k3_bounded"), description="Estimator of the KL to the reference: k1, k2, k3, "
                      "k3_bounded, ... or own module:function.")
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Where the KL enters: as a term of the loss, or subtracted from the reward, as "
        "log p - log p(reference) of each token.")
    kl_coef: NonNegative = Field(
        default=0.0, description="Weight of the KL to the reference; 0 = no reference is kept.")
    kl_target: Rate | None = Field(
        default=None, description="The KL per token that algo.kl_coef is steered to from step to step (Ziegler et "
        "al.); null = it stays.")
    kl_horizon: Positive = Field(default=10_000, description="Answers over which it is steered; fewer = faster.")
    kl_weights: Names = Field(
        default=(), description="Weights on tokens or answers, multiplied into the KL; names as in algo.weights.")
    entropy: Named = Field(
        default=Named(name="none"), description="How the entropy of the policy is held up: none, bonus, adaptive, "
        "siren, temperature, e3, or own module:function.")
    reference: Named = Field(
        default=Named(name="auto"), description="The reference policy: auto = frozen (the adapter switched off under "
        "LoRA), ema, reset.")
    mask_truncated: bool = Field(default=False, description="Leave answers that hit the length limit out of the loss.")

    @property
    def corrected(self) -> bool:
        """Whether the loss makes up for answers that other weights sampled; an own one is trusted to."""
        return (self.correction.name != "none" or ":" in self.loss.name
                or self.loss.options.get("from_sampler") is True)

    def chosen(self, setting: str) -> bool:
        """Whether a setting is not the default."""
        return getattr(self, setting) != type(self).model_fields[setting].default

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields what belongs to a KL that is not there, or is there in another form."""
        if not self.kl_coef:
            why = "algo.kl_coef=0: there is no KL" + (", and 0 times anything stays 0" if self.kl_target else "")
            unread: tuple[str, ...] = ("kl", "kl_in", "kl_target", "kl_weights")
        else:
            why = "algo.kl_in=reward takes log p - log p(reference) of each token off the reward, which is k1"
            unread = ("kl",) * (self.kl.name != "k1") + ("kl_weights",) if self.kl_in == "reward" else ()
        for setting in filter(self.chosen, unread):
            yield f"algo.{setting}", getattr(self, setting), why
        if self.chosen("kl_horizon") and self.kl_target is None:
            yield "algo.kl_horizon", self.kl_horizon, "algo.kl_target=null: the coefficient stays as it is"

    @model_validator(mode="before")
    @classmethod
    def _default_names(cls, values: Any) -> Any:
        """Options without a name are those of the default: `algo.loss.dual_clip=3`."""
        if not isinstance(values, Mapping):
            return values
        return {key: {"name": cls.model_fields[key].default.name, **value}
                if key in cls.model_fields and cls.model_fields[key].annotation is Named and isinstance(value, Mapping)
                else value for key, value in values.items()}
