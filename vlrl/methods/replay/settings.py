"""The settings `algo.stored`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.algo.tables import BATCHES
from vlrl.config.base import MethodSettings, Named, NonNegative, Positive, Rate


class StoredSettings(MethodSettings):
    """Replay of stored rollouts beside the policy's new ones: of this run's steps, and of other runs' folders."""

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

    def problem(self, config: Any) -> str:
        staleness, minibatches = config.asynchronous.max_staleness, config.rollout.minibatches
        for name in ("guided", "critic", "demonstrations"):
            if getattr(config.algo, name) is not None:
                return (f"algo.stored and algo.{name} both have a loss beside the objective, and one at a time is "
                        f"supported: set algo.{name}=null, or algo.stored=null")
        if staleness:
            return (f"algo.stored with async.max_staleness={staleness}: rollouts would be read and scored while others "
                    "are made: set async.max_staleness=0, or algo.stored=null")
        if not self.own and not self.runs:
            return ("algo.stored.own=false, and algo.stored.runs names no other run: there is nothing to learn from. "
                    "Set one of them, or algo.stored=null")
        if self.own and not config.store.rollouts:
            return ("algo.stored.own=true learns from the rollouts of earlier steps, and store.rollouts=false writes "
                    "none: set store.rollouts=true, or algo.stored.own=false")
        if self.groups < minibatches:
            return (f"algo.stored.groups={self.groups} leaves some of rollout.minibatches={minibatches} optimizer "
                    "steps without a stored group: raise the one, or lower the other")
        return ""

    @property
    def functions(self) -> Sequence[tuple[str, Named, Mapping[str, Any]]]:
        from vlrl.methods.replay.rules import RULES  # which needs torch
        return ("algo.stored.batch", self.batch, BATCHES), ("algo.stored.rule", self.rule, RULES)

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        if self.coef == 0:
            yield "algo.stored", "{}", "algo.stored.coef=0: nothing is drawn"
        elif (self.logprobs == "own" and config.rollout.one_update
              and self.rule.name in ("truncated", "clipped")):
            yield ("algo.stored.rule", self.rule, "algo.stored.logprobs=own and one optimizer step a batch, so its "
                   "ratio is 1 and nothing is clipped; raise rollout.minibatches or rollout.updates")
