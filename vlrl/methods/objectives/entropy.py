"""Control of the policy entropy. Each function maps `LossInputs` to (loss per token [N], metrics). The token mean of
this loss is added to the objective.

The mean is always over the trained tokens of the optimizer step, whatever algo.aggregation is, so a coefficient has the
same meaning everywhere. A class keeps state between steps: after each optimizer step its `observe(entropy)` receives
the mean entropy of the step's tokens over all processes."""

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
"""Smallest entropy, in nats, that is used in a division. Smaller values are raised to it."""


@idle("algo.entropy.coef=0", coef=0)
@requires("stat:entropy")
def bonus(x: LossInputs, coef: float = 0.001) -> tuple[torch.Tensor, Metrics]:
    """An entropy bonus: -coef * H per token [N], with the gradient of H.

    The default 0.001 is that of RL for Reasoning with One Training Example (arXiv 2504.20571); TRL's `entropy_coef`."""
    return -coef * x.stats["entropy"], {}


@idle("algo.entropy.most=0", most=0)
@requires("stat:entropy")
class Adaptive(Saved):
    """An entropy bonus that is active only while the entropy is at or below `target` (nats per token). After each
    optimizer step the coefficient of the bonus changes, within 0 .. `most`: it rises by `delta` if the entropy was
    at or below the target, and falls by `delta` otherwise.

    Skywork Open Reasoner 1 (arXiv 2505.22312) section 3.2, adaptive entropy control. The entropy of the previous
    optimizer step decides whether the bonus is active."""

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
    """An entropy loss coef * (H - anchor)^2. H is the mean nucleus entropy of the tokens with the highest nucleus
    entropy, a fraction `share` of all tokens.

    The nucleus of a token is the smallest set of most probable tokens whose total probability is at least `top_p`. The
    threshold for the highest entropies is a quantile over the whole optimizer step. The anchor is H in the first
    optimizer step, so the entropy is held at its initial value instead of being maximised. Selective entropy
    regularization (SIREN, arXiv 2509.25133), as described in the paper; the coefficient and the shares are this
    project's."""

    saved = ("anchor",)

    def __init__(self, coef: float = 0.01, top_p: Share = 0.8, share: Share = 0.2):
        self.coef, self.top_p, self.share = coef, top_p, share
        self.anchor = math.nan

    def prepare(self, x: LossInputs) -> dict[str, torch.Tensor]:
        """Returns "selected", [N]: 1 on the tokens with the highest nucleus entropy, and "count" and "mean": number and
        mean entropy of the selected tokens of the whole optimizer step."""
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
    if len(bounds) > 1:
        return ""
    return "algo.entropy.low and high equal rollout.temperature, so the temperature cannot change"


@idle_when(_cannot_move)
class Temperature(Saved):
    """Controls the entropy by the sampling temperature T, in the engine and in the trainer, and adds no loss term.

    After each step T <- clip(T * exp(rate * (1 - H / target)), low, high), where H is the mean entropy of the step's
    tokens at temperature T. The default target is H of the first step. This is a proportional controller; the idea to
    hold the entropy by the temperature while training sharpens the policy is from POLARIS (Polaris-4B-Preview)."""

    saved = ("factor", "target")

    def __init__(self, target: Rate | None = None, rate: Rate = 0.05, low: Rate = 0.5,
                 high: Rate = 1.5):
        if low > high:
            raise ValueError(f"low={low:g} is above high={high:g}: lower low, or raise high")
        self.target, self.rate, self.low, self.high = target, rate, low, high
        self.factor = 1.0

    def next_value(self, temperature: float, entropy: float, target: float, choices: int) -> float:
        """The next temperature before it is clipped to [low, high]. `temperature` and `entropy` are those of the step,
        and `choices` is the number of tokens that can be sampled."""
        return temperature * math.exp(self.rate * (1 - entropy / target))

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, Metrics]:
        return torch.zeros_like(x.mask), {}

    def temperature(self, base: float) -> float:
        """The temperature of the next step; `base` is rollout.temperature."""
        return base * self.factor

    def observe_step(self, entropy: float, base: float, choices: int) -> None:
        """Updates the temperature after a step. `entropy` is the mean entropy of the step's tokens over all processes,
        `base` is rollout.temperature, and `choices` is the number of tokens that can be sampled."""
        self.target = self.target or entropy
        moved = self.next_value(base * self.factor, max(entropy, _LEAST), max(self.target, _LEAST), choices)
        self.factor = min(max(moved, self.low), self.high) / base

    def metrics(self) -> dict[str, float]:
        return {}


class E3(Temperature):
    """Controls the entropy as `Temperature` does, but without a rate to choose: T <- clip(T (1 + T ln(target / H) / (ln
    V + ln ln V)), low, high), where V is the number of tokens that can be sampled. The temperature rule of E3 (arXiv
    2505.18573). The paper's group sizes by difficulty are not included, and the bounds are this project's."""

    def __init__(self, target: Rate | None = None, low: Rate = 0.5, high: Rate = 1.5):
        Temperature.__init__(self, target, low=low, high=high)

    def next_value(self, temperature: float, entropy: float, target: float, choices: int) -> float:
        scale = math.log(choices) + math.log(math.log(choices))
        return temperature * (1 + temperature * math.log(target / entropy) / scale)
