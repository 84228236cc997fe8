"""How the entropy of the policy is held up: `x -> (per_token [N], metrics)`, added to the loss as a token mean.

It is always the mean over the trained tokens of the optimizer step, whatever algo.aggregation is, so a coefficient
means the same everywhere. A class carries a state: `observe(entropy)` tells it, after each optimizer step, the mean
entropy of that step's tokens over all processes.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from vlrl.algo.effect import FunctionUse, idle, idle_when
from vlrl.algo.inputs import LossInputs, Metrics, gather_values, requires

_Share = Annotated[float, Field(gt=0, le=1)]
_AboveZero = Annotated[float, Field(gt=0)]
_LEAST = 1e-6
"""Nats that an entropy of 0 counts as."""


@idle("algo.entropy.coef=0", coef=0)
@requires("stat:entropy")
def bonus(x: LossInputs, coef: float = 0.001) -> tuple[torch.Tensor, Metrics]:
    """Returns -coef * H per token, with H's own gradient. [N] -> [N].

    0.001 as in RL for Reasoning with One Training Example (arXiv 2504.20571); TRL's `entropy_coef`.
    """
    return -coef * x.stats["entropy"], {}


@idle("algo.entropy.most=0", most=0)
@requires("stat:entropy")
class Adaptive:
    """A bonus only while the entropy is at or below `target` (nats per token): its coefficient c rises by `delta`
    after an optimizer step at or below, and falls by it after one above, within 0 .. `most`.

    Skywork Open Reasoner 1 (arXiv 2505.22312) section 3.2, adaptive entropy control. The entropy that decides is that
    of the optimizer step before.
    """

    def __init__(self, target: _AboveZero = 0.2, delta: _AboveZero = 0.005, start: float = 0.0, most: float = 1.0):
        self.target, self.delta, self.most = target, delta, most
        self.coef, self.active = start, False

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        return -(self.coef if self.active else 0.0) * x.stats["entropy"], {}

    def observe(self, entropy: float) -> None:
        self.active = entropy <= self.target
        self.coef = min(max(self.coef + (self.delta if self.active else -self.delta), 0.0), self.most)

    def metrics(self) -> dict[str, float]:
        return {"entropy_coef": self.coef if self.active else 0.0}

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef, self.active = state["coef"], state["active"]


@idle("algo.entropy.coef=0", coef=0)
@requires("stat:nucleus_entropy:{top_p}", "step")
class Siren:
    """coef * (H - anchor)^2, H = mean nucleus entropy of the tokens whose nucleus entropy is in the top `share`.

    The nucleus has probability `top_p`; the quantile is that of the whole optimizer step, and the anchor is H of the
    first one, so the entropy is held where it began instead of being maximised. Selective entropy regularization
    (SIREN, arXiv 2509.25133), as described there; coefficient and shares are this project's.
    """

    def __init__(self, coef: float = 0.01, top_p: _Share = 0.8, share: _Share = 0.2):
        self.coef, self.top_p, self.share = coef, top_p, share
        self.anchor = math.nan

    def prepare(self, x: LossInputs) -> dict[str, torch.Tensor]:
        """Returns which tokens are selected, [N]; how many in the whole step, and their mean entropy."""
        own = x.stats[f"nucleus_entropy:{self.top_p}"].double()
        every = gather_values(own[x.mask > 0]).cpu().numpy()
        threshold = float(np.quantile(every, 1 - self.share))
        peaks = every[every >= threshold]
        if math.isnan(self.anchor):
            self.anchor = float(peaks.mean())
        return {"selected": (own >= threshold).to(x.mask.dtype), "count": torch.tensor(float(len(peaks))),
                "mean": torch.tensor(float(peaks.mean()))}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        values, p = x.stats[f"nucleus_entropy:{self.top_p}"], x.prepared
        # linear in the token: together the gradient is that of the square of the mean
        slope = 2 * self.coef * (float(p["mean"]) - self.anchor) * x.total_tokens / float(p["count"])
        return slope * values * p["selected"], {}

    def metrics(self) -> dict[str, float]:
        return {"entropy_anchor": self.anchor}

    def state_dict(self) -> dict[str, Any]:
        return {} if math.isnan(self.anchor) else {"anchor": self.anchor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.anchor = state.get("anchor", math.nan)


def _cannot_move(use: FunctionUse) -> str:
    bounds = {use.values["low"], use.values["high"], use.config.rollout.temperature}
    return "algo.entropy.low and high are rollout.temperature: it cannot move" if len(bounds) == 1 else ""


@idle_when(_cannot_move)
class Temperature:
    """No term of the loss: the sampling temperature T follows the entropy instead, sampler and trainer alike.

    After each step T <- clip(T * exp(rate * (1 - H / target)), low, high), H = mean entropy of the step's tokens at T.
    Without a target it is H of the first step. A proportional controller; that entropy should be held by the
    temperature as training sharpens the policy is from POLARIS (Polaris-4B-Preview).
    """

    def __init__(self, target: _AboveZero | None = None, rate: _AboveZero = 0.05, low: _AboveZero = 0.5,
                 high: _AboveZero = 1.5):
        if low > high:
            raise ValueError(f"low={low:g} is above high={high:g}")
        self.target, self.rate, self.low, self.high = target, rate, low, high
        self.factor = 1.0

    def moved(self, temperature: float, entropy: float, target: float, choices: int) -> float:
        """Returns the next temperature, before its bounds."""
        return temperature * math.exp(self.rate * (1 - entropy / target))

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        return torch.zeros_like(x.mask), {}

    def temperature(self, base: float) -> float:
        """Of the next step, from rollout.temperature."""
        return base * self.factor

    def observe_step(self, entropy: float, base: float, choices: int) -> None:
        """Takes the mean entropy of a step's tokens over all processes, each drawn among so many."""
        self.target = self.target or entropy
        moved = self.moved(base * self.factor, max(entropy, _LEAST), max(self.target, _LEAST), choices)
        self.factor = min(max(moved, self.low), self.high) / base

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "target": self.target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.target = state["factor"], state["target"]


class E3(Temperature):
    """As temperature, with T <- clip(T (1 + T ln(target / H) / (ln V + ln ln V)), low, high), V = the number of tokens
    that can be sampled: no rate to choose. The rule for the temperature of E3 (arXiv 2505.18573); its numbers of
    answers by difficulty are not part of it, and the bounds are this project's.
    """

    def __init__(self, target: _AboveZero | None = None, low: _AboveZero = 0.5, high: _AboveZero = 1.5):
        Temperature.__init__(self, target, low=low, high=high)

    def moved(self, temperature: float, entropy: float, target: float, choices: int) -> float:
        scale = math.log(choices) + math.log(math.log(choices))
        return temperature * (1 + temperature * math.log(target / entropy) / scale)
