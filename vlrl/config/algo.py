"""The settings `algo.*`: from rewards to a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from vlrl.config.base import Count, Fraction, MethodSettings, Named, Names, NonNegative, Positive, Rate, Settings
from vlrl.config.sections import section

PAIRS = "bradley_terry"
"""The loss of a run that learns to score answers from pairs of them."""
SUPERVISED = ("supervised", PAIRS)
"""Losses of `vlrl sft`."""
HEAD_LR = 1e-3

CLIPS = ("clip_low", "clip_high")
"""Settings of algo that are options of algo.loss by another way."""


class CriticSettings(Settings):
    """A value head beside the output layer, for algo.advantage=gae, turn_gae, bilevel_gae or macro_gae."""

    lr: Rate = Field(default=1e-5, description="Learning rate of the value head, under train.schedule and train.warmup "
                     "like the others.")
    warmup: Count = Field(default=0, description="First steps in which the value head learns alone: the policy stays "
                          "as it is.")
    coef: NonNegative = Field(
        default=0.1, description="Weight of the value loss in the gradient of the policy's weights; 0 = the value head "
        "reads their hidden states and changes nothing of them.")
    clip: Rate | None = Field(
        default=0.2, description="A value that has moved further than this from that before the update has no "
        "gradient, where it moves away from its target or beyond; null = no clip.")
    gamma: Fraction = Field(default=1.0, description="Discount of one token (gae), turn (turn_gae, "
                            "bilevel_gae) or macro action (macro_gae).")
    lam: Fraction = Field(
        default=1.0, description="Lambda of generalised advantage estimation, per token or turn: 1 = the return less "
        "the value, 0 = the next value in place of all that follows.")


class StoredSettings(Settings):
    """Stored rollouts learned from again beside the policy's own: of this run's steps, and of other runs' folders."""

    runs: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Folders of other runs, or folders with a `rollouts` of the same columns, whose "
        "rollouts to prompts of this run's training rows are learned from too. They may grow meanwhile. Their rewards "
        "are not believed: the answers are scored again.")
    own: bool = Field(default=True, description="Learn from this run's own earlier rollouts.")
    groups: Positive = Field(default=8, description="Stored groups drawn in a step.")
    rule: Named = Field(
        default=Named(name="truncated"), description="What is learned from them: truncated, clipped, a_lol, copg, "
        "webrl, or own module:class.")
    batch: Named = Field(
        default=Named(name="all"), description="Which answers of a stored group are learned from: all, right, rest, "
        "pf_ppo, rorecomp, or own module:function.")
    advantage: Named = Field(
        default=Named(name="grpo"), description="Their advantage, from the rewards of their whole stored group: names "
        "as in algo.advantage, of those that give an answer one number.")
    draw: Named = Field(
        default=Named(name="uniform"), description="By what groups are drawn: uniform, by_advantage, recent, or own "
        "module:function.")
    every: Named = Field(
        default=Named(name="constant"), description="In which steps: constant (every k-th), growing, or own "
        "module:function.")
    coef: NonNegative = Field(default=1.0, description="Weight of their loss beside the objective.")
    logprobs: Literal["stored", "own"] = Field(
        default="stored", description="What ratios are to: the log-probabilities that are stored, of the weights that "
        "sampled; or those of the policy before the update.")
    max_age: Positive | None = Field(
        default=None, description="Most steps between the weights that sampled a group and now, or since a group of "
        "another run was taken; null = no limit.")
    capacity: Positive = Field(default=100_000, description="Rollouts that are remembered, the newest.")
    max_gap: Rate = Field(
        default=0.2, description="A row whose log-probabilities of sampler and trainer differ by more, as the mean of "
        "its tokens, is refused: they are of different weights.")
    max_drift: Rate = Field(
        default=1.0, description="An answer of which log p - stored log p is further from 0 than this, as the mean of "
        "its tokens, is left out: other weights sampled it, or it is too old.")


class AlgoSettings(Settings):
    """From rewards to a loss. docs/objectives.md lists the names with their formulas, options and papers."""

    advantage: Named = Field(default=Named(name="grpo"), description="grpo, dr_grpo, rloo, ... or own module:function.")
    shaping: Names = Field(
        default=(), description="Changes of the rewards before the advantage, in order: overlong, kimi_length, ... or "
        "own module:function.")
    critic: CriticSettings | None = Field(
        default=None, description="A value head, trained beside the policy, for an advantage that needs one (gae, "
        "turn_gae, bilevel_gae, macro_gae); {} = with the defaults below; null = none.")
    guided: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.guided")] = Field(
        default=None, description="Second attempts of groups in which answers failed, with more behind the question: "
        "guidance of the task, a hint, the solution, a critique; {} = with the defaults below; null = none.")
    demonstrations: Annotated[SerializeAsAny[MethodSettings] | None, section("algo.demonstrations")] = Field(
        default=None, description="Cross-entropy on given answers beside the objective; {} = with the defaults below; "
        "null = none.")
    stored: StoredSettings | None = Field(
        default=None, description="Rollouts of earlier steps and of other runs, learned from again beside the "
        "objective; {} = with the defaults below; null = none.")
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

    def stored_problem(self, minibatches: int, staleness: int, rollouts: bool) -> str:
        """Returns why other settings forbid algo.stored, and the way out; "" where nothing does."""
        if self.stored is None:
            return ""
        for name in ("guided", "critic", "demonstrations"):
            if getattr(self, name) is not None:
                return (f"algo.stored and algo.{name} both have a loss beside the objective, and one at a time is "
                        f"supported: set algo.{name}=null, or algo.stored=null")
        if staleness:
            return (f"algo.stored with async.max_staleness={staleness}: rollouts would be read and scored while others "
                    "are made: set async.max_staleness=0, or algo.stored=null")
        if not self.stored.own and not self.stored.runs:
            return ("algo.stored.own=false, and algo.stored.runs names no other run: there is nothing to learn from. "
                    "Set one of them, or algo.stored=null")
        if self.stored.own and not rollouts:
            return ("algo.stored.own=true learns from the rollouts of earlier steps, and store.rollouts=false writes "
                    "none: set store.rollouts=true, or algo.stored.own=false")
        if self.stored.groups < minibatches:
            return (f"algo.stored.groups={self.stored.groups} leaves some of rollout.minibatches={minibatches} "
                    "optimizer steps without a stored group: raise the one, or lower the other")
        return ""

    @property
    def corrected(self) -> bool:
        """Whether the loss makes up for answers that other weights sampled; an own one is trusted to."""
        return (self.correction.name != "none" or ":" in self.loss.name
                or self.loss.options.get("from_sampler") is True)

    @model_validator(mode="before")
    @classmethod
    def _default_names(cls, values: Any) -> Any:
        """Options without a name are those of the default: `algo.loss.dual_clip=3`."""
        if not isinstance(values, Mapping):
            return values
        return {key: {"name": cls.model_fields[key].default.name, **value}
                if key in cls.model_fields and cls.model_fields[key].annotation is Named and isinstance(value, Mapping)
                else value for key, value in values.items()}
