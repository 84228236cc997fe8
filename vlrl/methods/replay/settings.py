"""Settings of the config section `algo.stored`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.algo.tables import BATCHES
from vlrl.config.base import MethodSettings, Named, NonNegative, Positive, Rate


class StoredSettings(MethodSettings):
    """Replays stored rollouts together with the policy's new ones: rollouts of this run's earlier steps, and of other
    runs' folders."""

    runs: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), description=(
        "Other run folders to replay from. Also folders that hold a `rollouts` folder of files with the same "
        "columns. Their rollouts on this run's training rows are replayed too. The folders may grow during the "
        "run. Rewards in these folders are not trusted: this run scores the answers again."))
    own: bool = Field(default=True, description="Replay this run's own earlier rollouts.")
    groups: Positive = Field(default=8, description="Stored groups replayed per step.")
    rule: Named = Field(
        default=Named(name="truncated"), description=(
        "Off-policy loss: truncated, clipped, a_lol, copg, webrl. Or your own module:class."))
    batch: Named = Field(default=Named(name="all"), description=(
        "Which answers of a stored group are trained on. all, right, rest, pf_ppo, rorecomp, or your own "
        "module:function."))
    advantage: Named = Field(
        default=Named(name="grpo"), description=(
        "Advantage within the stored group. A name as in algo.advantage that gives one number per answer."))
    draw: Named = Field(default=Named(name="uniform"), description=(
        "Sampling weights: uniform, by_advantage, recent. They are weights of stored groups; or your own "
        "module:function."))
    every: Named = Field(default=Named(name="constant"), description=(
        "Steps with replay: constant or growing. constant (every k-th), growing (intervals grow), or your own "
        "module:function."))
    coef: NonNegative = Field(default=1.0, description="Weight of the replay loss in the objective.")
    logprobs: Literal["stored", "own"] = Field(default="stored", description=(
        "Denominator of ratios: stored or own. stored = the stored log-probabilities of the weights that sampled; "
        "own = those of the policy before the update."))
    max_age: Positive | None = Field(default=None, description=(
        "Largest age of a group in steps; null = any. It counts from the step that sampled the group, or for a "
        "group of another run from the step that read it."))
    capacity: Positive = Field(default=100_000, description="Size of the buffer in rollouts. The newest are kept.")
    max_gap: Rate = Field(default=0.2, description=(
        "Refuse rows whose log-probabilities differ by more. The difference is between sampler and trainer, as a "
        "mean over tokens: a larger one shows that they are from different weights."))
    max_drift: Rate = Field(default=1.0, description=(
        "Skip answers whose log p has drifted by more. The drift is log p - stored log p in absolute value, as a "
        "mean over tokens: a larger one shows that the answer was sampled by other weights, or is too old."))

    def problem(self, config: Any) -> str:
        staleness, minibatches = config.asynchronous.max_staleness, config.rollout.minibatches
        for name in ("guided", "critic", "demonstrations"):
            if getattr(config.algo, name) is not None:
                return (f"algo.stored and algo.{name} both add a loss to the objective, but only one added loss is "
                        f"supported: set algo.{name}=null, or algo.stored=null")
        if staleness:
            return (f"algo.stored with async.max_staleness={staleness}: stored rollouts would be read and scored while "
                    "new ones are generated: set async.max_staleness=0, or algo.stored=null")
        if not self.own and not self.runs:
            return ("algo.stored.own=false and algo.stored.runs names no other run, so there is nothing to replay: "
                    "set algo.stored.own=true, name a folder in algo.stored.runs, or set algo.stored=null")
        if self.own and not config.store.rollouts:
            return ("algo.stored.own=true replays the rollouts of earlier steps, but store.rollouts=false writes "
                    "none: set store.rollouts=true, or algo.stored.own=false")
        if self.groups < minibatches:
            return (f"algo.stored.groups={self.groups} leaves some of rollout.minibatches={minibatches} optimizer "
                    "steps without a stored group: raise algo.stored.groups, or lower rollout.minibatches")
        return ""

    @property
    def functions(self) -> Sequence[tuple[str, Named, Mapping[str, Any]]]:
        from vlrl.methods.replay.rules import RULES  # which needs torch
        return ("algo.stored.batch", self.batch, BATCHES), ("algo.stored.rule", self.rule, RULES)

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        if self.coef == 0:
            yield "algo.stored", "{}", "algo.stored.coef=0: nothing is replayed"
        elif (self.logprobs == "own" and config.rollout.one_update
              and self.rule.name in ("truncated", "clipped")):
            yield ("algo.stored.rule", self.rule, "with algo.stored.logprobs=own and one optimizer step per batch "
                   "the ratio is 1 and nothing is clipped; raise rollout.minibatches or rollout.updates")
