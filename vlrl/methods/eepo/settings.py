"""Settings of the config section `rollout.forget`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from vlrl.config.base import MethodSettings, NonNegative, Rate


class ForgetSettings(MethodSettings):
    """Half of each group is sampled and then made less likely, before the other half is sampled (EEPO). The weights are
    restored before the update."""

    lr: NonNegative = Field(default=0.0, description=(
        "EEPO: step that makes earlier answers less likely; 0 = off. It acts on the first half of a group before "
        "the second half is sampled. A few times train.lr is usual. Needs algo.correction, because the second "
        "half is sampled by modified weights."))
    entropy: Rate | None = Field(default=None, description=(
        "EEPO: largest entropy at which the step is taken. It is the first half's mean entropy per token, in "
        "nats; null = the step is always taken."))

    @model_validator(mode="after")
    def _takes_place(self) -> ForgetSettings:
        if self.entropy is not None and not self.lr:
            raise ValueError(f"rollout.forget.entropy={self.entropy} has no effect with rollout.forget.lr=0: set "
                             "rollout.forget.lr above 0, or leave rollout.forget.entropy out")
        return self

    @property
    def active(self) -> bool:
        return self.lr > 0

    @property
    def other_weights(self) -> bool:
        return True

    @property
    def without_zero(self) -> tuple[str, str]:
        return f"rollout.forget.lr={self.lr:g}", "rollout.forget.lr=0"

    def problem(self, config: Any) -> str:
        """The reason why rollout.forget does not work with the other settings; "" if it does. rollout.forget needs
        algo.correction, unless algo.correction=none is set explicitly."""
        rollout, algo, most = config.rollout, config.algo, config.asynchronous.max_staleness
        if rollout.step_tokens is not None:
            return (f"rollout.step_tokens={rollout.step_tokens} lets answers continue in the next step, but "
                    f"rollout.forget.lr={self.lr:g} needs both halves of a group in one step: set "
                    "one of the two settings to its default")
        if most:
            return (f"async.max_staleness={most} generates while the weights are trained, but "
                    f"rollout.forget.lr={self.lr:g} changes them between the two halves of a group: set "
                    "rollout.forget.lr=0, or set async.max_staleness=0")
        if algo.corrected or "correction" in algo.model_fields_set:
            return ""
        return (f"rollout.forget.lr={self.lr:g} samples half of each group with modified weights, but "
                f"algo.loss={algo.loss.name} treats these answers as on-policy. Set "
                "algo.correction=token_truncate (extends=algorithms/eepo.yaml has it), or algo.correction=none to "
                "train on them without correction")
