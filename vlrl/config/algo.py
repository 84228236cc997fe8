"""The settings `algo.*`: how rewards become a loss."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from vlrl.config.base import MethodSettings, Named, Names, NonNegative, Positive, Rate, Settings
from vlrl.config.sections import PAIRS, section

SUPERVISED = ("supervised", PAIRS)
"""Values of algo.loss for supervised training (`vlrl sft`)."""
HEAD_LR = 1e-3

CLIPS = ("clip_low", "clip_high")
"""Settings of algo that are shorthands for options of algo.loss."""


class AlgoSettings(Settings):
    """How rewards become a loss. docs/objectives.md lists the names with formulas, options and papers."""

    advantage: Named = Field(
        default=Named(name="grpo"), description="Advantage estimator: grpo, dr_grpo, rloo, ... or module:function.")
    shaping: Names = Field(default=(), description=(
        "Reward shaping before the advantage: overlong, kimi_length, ... Several are applied in order; or your "
        "own module:function."))
    critic: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.critic")] = Field(default=None, description=(
        "A value head for advantages that need one. These are gae, turn_gae, bilevel_gae and macro_gae; the head "
        "is trained together with the policy. {} = with the defaults below; null = none."))
    guided: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.guided")] = Field(default=None, description=(
        "Second attempts with guidance for groups with wrong answers. Their prompt adds the task's own guidance, "
        "a hint, the solution or a critique; {} = with the defaults below; null = none."))
    demonstrations: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.demonstrations")] = Field(
        default=None, description=(
        "Cross-entropy on demonstrations, added to the objective. Demonstrations are solutions of training rows; "
        "{} = with the defaults below; null = none."))
    stored: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.stored")] = Field(default=None, description=(
        "Replay of rollouts of earlier steps and other runs. It is added to the objective; {} = with the defaults "
        "below; null = none."))
    distillation: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.distillation")] = Field(
        default=None, description=(
        "On-policy distillation from a teacher. It scores each token of the policy's own completions, in addition "
        "to the objective or in place of it; {} = with the defaults below; null = none."))
    batch: Named = Field(default=Named(name="all"), description=(
        "Which rollouts of a step are trained on. all, rorecomp, right, pf_ppo, rest, or your own "
        "module:function."))
    loss: Named = Field(
        default=Named(name="ppo_clip"), description=(
        "Policy loss: ppo_clip, gspo, cispo, reinforce, ... or module:function."))
    weights: Names = Field(default=(), description=(
        "Weights of tokens or completions: top_entropy, hicra, ... They are multiplied into the policy loss; or "
        "your own module:function."))
    correction: Named = Field(default=Named(name="none"), description=(
        "Importance weights for differences between sampler and trainer. none, token_truncate (TIS), token_mask "
        "(IcePop), sequence_mask, ... or your own module:function."))
    aggregation: Named = Field(default=Named(name="token_mean"), description="How token losses are aggregated. "
                               "token_mean: sum / tokens of the optimizer step; sequence_mean: mean of the means per "
                               "completion; constant: sum / (completions * rollout.max_new_tokens); sequence_sum; or "
                               "your own module:function.")
    clip_low: float | None = Field(default=None, gt=0, description=(
        "Lower clip range; null = the loss's default. The probability ratio is clipped at 1 - clip_low, or as "
        "algo.loss defines it. The same setting as algo.loss.clip_low; the one that is set last counts. An error "
        "for a loss that does not clip."))
    clip_high: float | None = Field(default=None, gt=0, description=(
        "Upper clip range; null = the loss's default. The probability ratio is clipped at 1 + clip_high, or as "
        "algo.loss defines it. The same setting as algo.loss.clip_high; the one that is set last counts. An error "
        "for a loss that does not clip."))
    kl: Named = Field(
        default=Named(name="k3_bounded"), description="KL estimator: k1, k2, k3, k3_bounded, ... or module:function.")
    kl_in: Literal["loss", "reward"] = Field(default="loss", description=(
        "Where the KL enters: loss or reward. As a term of the loss, or subtracted from the reward as log p - log "
        "p(reference) per token."))
    kl_coef: NonNegative = Field(default=0.0, description=(
        "Coefficient of the KL to the reference policy; 0 = none. 0, as in TRL (EasyR1: 0.01), keeps no reference "
        "policy, which saves the memory of a second model in full fine-tuning."))
    kl_target: Rate | None = Field(default=None, description=(
        "Target KL per token, reached by adapting kl_coef. algo.kl_coef is adapted after each step (Ziegler et "
        "al.); null = it stays constant."))
    kl_horizon: Positive = Field(
        default=10_000, description="Completions over which kl_coef is adapted. A smaller number adapts faster.")
    kl_weights: Names = Field(
        default=(), description="Weights of tokens or completions in the KL. Names as in algo.weights.")
    entropy: Named = Field(default=Named(name="none"), description=(
        "How entropy is maintained: none, bonus, adaptive, ... Also siren, temperature, e3, or your own "
        "module:function."))
    reference: Named = Field(default=Named(name="auto"), description=(
        "Reference policy: auto (the initial policy), ema, reset. Under LoRA, auto is the model without its "
        "adapter."))
    mask_truncated: bool = Field(
        default=False, description="Leave completions that hit the length limit out of the loss.")

    @property
    def corrected(self) -> bool:
        """Whether the loss corrects for the difference between the current weights and the older weights that sampled
        the completions. A user's own loss is assumed to correct for it."""
        return (self.correction.name != "none" or ":" in self.loss.name
                or self.loss.options.get("from_sampler") is True)

    def chosen(self, setting: str) -> bool:
        """Whether the setting `setting` of this section differs from its default."""
        return getattr(self, setting) != type(self).model_fields[setting].default

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, value, reason) of each KL setting that has no effect, because the KL is off or
        algo.kl_in=reward fixes the form of the KL."""
        if not self.kl_coef:
            why = "algo.kl_coef=0: there is no KL" + (", so algo.kl_target does nothing" if self.kl_target else "")
            unread: tuple[str, ...] = ("kl", "kl_in", "kl_target", "kl_weights")
        else:
            why = "algo.kl_in=reward subtracts log p - log p(reference) per token from the reward, which is k1"
            unread = ("kl",) * (self.kl.name != "k1") + ("kl_weights",) if self.kl_in == "reward" else ()
        for setting in filter(self.chosen, unread):
            yield f"algo.{setting}", getattr(self, setting), why
        if self.chosen("kl_horizon") and self.kl_target is None:
            yield "algo.kl_horizon", self.kl_horizon, "algo.kl_target=null: the coefficient does not change"

    @model_validator(mode="before")
    @classmethod
    def _default_names(cls, values: Any) -> Any:
        """Adds the default name of a setting to its options if no name is given, as in `algo.loss.dual_clip=3`."""
        if not isinstance(values, Mapping):
            return values
        return {key: {"name": cls.model_fields[key].default.name, **value}
                if key in cls.model_fields and cls.model_fields[key].annotation is Named and isinstance(value, Mapping)
                else value for key, value in values.items()}
