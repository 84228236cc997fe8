"""The KL coefficient, whose state is in the checkpoint."""

from __future__ import annotations

from typing import Any


class KLCoefficient:
    """The weight of the KL: `algo.kl_coef`, adapted towards a target where one is set.

    After each step: coef <- coef * (1 + clip(KL / target - 1, -0.2, 0.2) * answers / horizon). Fine-Tuning Language
    Models from Human Preferences (arXiv 1909.08593) section 2.2, with the KL per token instead of per answer."""

    def __init__(self, start: float, target: float | None = None, horizon: int = 10_000):
        self.value, self.target, self.horizon = start, target, horizon

    def observe(self, kl: float, answers: float) -> None:
        """Updates the coefficient with the mean KL per token of a step with so many completions, over all processes."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * answers / self.horizon

    def metrics(self) -> dict[str, float]:
        return {"kl_coef": self.value} if self.target is not None else {}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value} if self.target is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state.get("value", self.value)
