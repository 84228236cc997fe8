"""Control of the policy entropy: `x -> (per_token [N], metrics)`, added to the loss as a token mean.

The mean is always over the trained tokens of the optimizer step, whatever algo.aggregation is, so a coefficient has the
same meaning everywhere. A class has state: `observe(entropy)` gets, after each optimizer step, the mean entropy of that
step's tokens over all processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from vlrl.algo.effect import FunctionUse, idle, idle_when
from vlrl.algo.inputs import LossInputs, Metrics, gather_values, requires
from vlrl.algo.state import Saved
from vlrl.config.base import Rate, Share

_LEAST = 1e-6
"""Lower bound of an entropy, in nats."""


@idle("algo.entropy.coef=0", coef=0)
@requires("stat:entropy")
def bonus(x: LossInputs, coef: float = 0.001) -> tuple[torch.Tensor, Metrics]:
    """-coef * H per token, with the gradient of H. [N] -> [N].

    0.001 as in RL for Reasoning with One Training Example (arXiv 2504.20571); TRL's `entropy_coef`."""
    return -coef * x.stats["entropy"], {}


@idle("algo.entropy.most=0", most=0)
@requires("stat:entropy")
class Adaptive(Saved):
    """A bonus only while the entropy is at or below `target` (nats per token): its coefficient c rises by `delta` after
    an optimizer step at or below, and falls by it after one above, within 0 .. `most`.

    Skywork Open Reasoner 1 (arXiv 2505.22312) section 3.2, adaptive entropy control. The entropy of the previous
    optimizer step decides."""

    saved = ("coef", "active")

    def __init__(self, target: Rate = 0.2, delta: Rate = 0.005, start: float = 0.0, most: float = 1.0):
        self.target, self.delta, self.most = target, delta, most
        self.coef, self.active = start, False

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        return -(self.coef if self.active else 0.0) * x.stats["entropy"], {}

    def observe(self, entropy: float) -> None:
        self.active = entropy <= self.target
        self.coef = min(max(self.coef + (self.delta if self.active else -self.delta), 0.0), self.most)

    def metrics(self) -> dict[str, float]:
        return {"entropy_coef": self.coef if self.active else 0.0}


@idle("algo.entropy.coef=0", coef=0)
@requires("stat:nucleus_entropy:{top_p}", "step")
class Siren(Saved):
    """coef * (H - anchor)^2, H = mean nucleus entropy of the tokens whose nucleus entropy is in the top `share`.

    The nucleus has probability `top_p`; the quantile is that of the whole optimizer step, and the anchor is H of the
    first one, so the entropy is held at its initial value instead of being maximised. Selective entropy regularization
    (SIREN, arXiv 2509.25133), as described there; coefficient and shares are this project's."""

    saved = ("anchor",)

    def __init__(self, coef: float = 0.01, top_p: Share = 0.8, share: Share = 0.2):
        self.coef, self.top_p, self.share = coef, top_p, share
        self.anchor = math.nan

    def prepare(self, x: LossInputs) -> dict[str, torch.Tensor]:
        """"selected" [N], and for the whole step "count" and "mean": number and mean entropy of the selected tokens."""
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
        return {} if math.isnan(self.anchor) else super().state_dict()


def _cannot_move(use: FunctionUse) -> str:
    bounds = {use.values["low"], use.values["high"], use.config.rollout.temperature}
    return "algo.entropy.low and high are rollout.temperature: it cannot move" if len(bounds) == 1 else ""


@idle_when(_cannot_move)
class Temperature(Saved):
    """No loss term: the sampling temperature T follows the entropy instead, in sampler and trainer.

    After each step T <- clip(T * exp(rate * (1 - H / target)), low, high), H = mean entropy of the step's tokens at T.
    The default target is H of the first step. A proportional controller; that the temperature should hold the entropy
    while training sharpens the policy is from POLARIS (Polaris-4B-Preview)."""

    saved = ("factor", "target")

    def __init__(self, target: Rate | None = None, rate: Rate = 0.05, low: Rate = 0.5,
                 high: Rate = 1.5):
        if low > high:
            raise ValueError(f"low={low:g} is above high={high:g}")
        self.target, self.rate, self.low, self.high = target, rate, low, high
        self.factor = 1.0

    def moved(self, temperature: float, entropy: float, target: float, choices: int) -> float:
        """The next temperature, before its bounds."""
        return temperature * math.exp(self.rate * (1 - entropy / target))

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        return torch.zeros_like(x.mask), {}

    def temperature(self, base: float) -> float:
        """Temperature of the next step, from rollout.temperature."""
        return base * self.factor

    def observe_step(self, entropy: float, base: float, choices: int) -> None:
        """Updates the temperature with the mean entropy of a step's tokens over all processes; `choices` tokens can be
        sampled."""
        self.target = self.target or entropy
        moved = self.moved(base * self.factor, max(entropy, _LEAST), max(self.target, _LEAST), choices)
        self.factor = min(max(moved, self.low), self.high) / base

    def metrics(self) -> dict[str, float]:
        return {}


class E3(Temperature):
    """As temperature, with T <- clip(T (1 + T ln(target / H) / (ln V + ln ln V)), low, high), V = the number of tokens
    that can be sampled: no rate to choose. The temperature rule of E3 (arXiv 2505.18573); its group sizes by difficulty
    are not included, and the bounds are this project's."""

    def __init__(self, target: Rate | None = None, low: Rate = 0.5, high: Rate = 1.5):
        Temperature.__init__(self, target, low=low, high=high)

    def moved(self, temperature: float, entropy: float, target: float, choices: int) -> float:
        scale = math.log(choices) + math.log(math.log(choices))
        return temperature * (1 + temperature * math.log(target / entropy) / scale)
