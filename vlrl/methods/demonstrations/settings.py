"""Settings of the config section `algo.demonstrations`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from vlrl.config.base import MethodSettings, Named, Positive


class DemonstrationSettings(MethodSettings):
    """Trains demonstrations together with the policy's completions. A demonstration is a row's `solution`, or the
    task's perfect answer."""

    mix: Named = Field(default=Named(name="chord"), description=(
        "Weights and loss of demonstrations: chord, chord_phi, sasr, relift. It sets the weights of RL and "
        "demonstrations in each step, and the loss of demonstrations; or your own module:class."))
    rows: Positive = Field(
        default=8, description="Demonstrations per step. They are drawn from the training rows with a given answer.")

    def problem(self, config: Any) -> str:
        staleness, minibatches = config.asynchronous.max_staleness, config.rollout.minibatches
        for name in ("guided", "critic"):
            if getattr(config.algo, name) is not None:
                return (f"algo.demonstrations and algo.{name} both add a loss to the objective, but only one added "
                        f"loss is supported: set algo.{name}=null, or algo.demonstrations=null")
        if staleness:
            return (f"algo.demonstrations with async.max_staleness={staleness}: environments would replay "
                    "demonstrations while the policy acts in them: set async.max_staleness=0, or algo.demonstrations="
                    "null")
        if self.rows < minibatches:
            return (f"algo.demonstrations.rows={self.rows} leaves some of rollout.minibatches={minibatches} optimizer "
                    "steps without a demonstration: raise algo.demonstrations.rows, or lower rollout.minibatches")
        return ""

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        if self.mix.name == "relift" and self.rows != type(self)().rows:
            yield ("algo.demonstrations.rows", self.rows, "the mix relift trains on prompts that failed, "
                   "algo.demonstrations.mix.size at a time")
