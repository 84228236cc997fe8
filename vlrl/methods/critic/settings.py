"""Settings of the config section `algo.critic`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from vlrl.config.base import Count, Fraction, MethodSettings, NonNegative, Rate


class CriticSettings(MethodSettings):
    """A value head on the policy's last hidden state, for algo.advantage=gae, turn_gae, bilevel_gae or macro_gae."""

    lr: Rate = Field(
        default=1e-5, description="Learning rate of the value head. train.schedule and train.warmup apply to it too.")
    warmup: Count = Field(
        default=0, description="Initial steps that train only the value head. The policy does not change in them.")
    coef: NonNegative = Field(
        default=0.1, description=(
        "Weight of the value loss for the policy's weights. 0 = the value head does not train the policy."))
    clip: Rate | None = Field(default=0.2, description=(
        "PPO's value clip; null = none. A value that has moved further than this from its value before the update "
        "has no gradient, unless the target pulls it back."))
    gamma: Fraction = Field(default=1.0, description=(
        "Discount per token, turn or macro action. Per token with gae, per turn with turn_gae and bilevel_gae, "
        "per macro action with macro_gae."))
    lam: Fraction = Field(default=1.0, description=(
        "Lambda of generalised advantage estimation. Per token or turn: 1 = return - value, 0 = one-step "
        "bootstrapping with the next value."))

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        if self.clip is not None and self.clip != type(self)().clip and config.rollout.one_update:
            yield ("algo.critic.clip", self.clip, "with one optimizer step per batch the values have not changed "
                   "yet; raise rollout.minibatches or rollout.updates")
        if self.warmup >= config.steps:
            yield ("algo.loss", config.algo.loss, f"algo.critic.warmup={self.warmup} is not below steps="
                   f"{config.steps}, so only the critic is trained")


def without_values(config: Any, advantage: str) -> str:
    """The error message for an advantage that needs a critic although algo.critic=null; "" if there is a critic."""
    if config.algo.critic is not None:
        return ""
    return (f"algo.advantage={advantage!r} needs the values of a critic, but algo.critic=null: set algo.critic={{}} "
            "(docs/objectives.md), or choose an advantage without a critic, such as algo.advantage=grpo")
