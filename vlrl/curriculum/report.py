"""Metrics of a step's draws: pass rates, and completions that were generated but not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlrl.algo.state import Saved
from vlrl.curriculum.filters import Intake
from vlrl.curriculum.types import Outcome

BINS = ("0", "0-25", "25-50", "50-75", "75-100", "100")
"""Metric names of the ranges of pass rates in percent; 25, 50 and 75 are the lower bounds of their ranges."""


class Tally(Saved):
    """Metrics of the last step over all processes, and the number of completions generated since the run began."""

    saved = ("answers",)

    def __init__(self) -> None:
        self.answers = 0
        self._last: dict[str, float] = {}

    def note(self, intake: Intake, chosen: Sequence[int], probes: Sequence[Outcome] = ()) -> None:
        """Adds a completed step. chosen: numbers of the groups that are trained on. probes: outcomes of the sampler's
        probes."""
        outcomes = list(intake.outcomes.values())
        trained = [intake.outcomes[number] for number in chosen]
        drawn, used = (sum(len(o.rewards) for o in of) for of in ((*outcomes, *probes), trained))
        self.answers += drawn
        self._last = {"rollouts/wasted": float(drawn - used), "curriculum/refills": float(intake.refills),
                      "curriculum/oversampling": len(outcomes) / intake.count if intake.count else 0.0}
        rates = np.array([o.pass_rate for o in outcomes])
        rates = rates[~np.isnan(rates)]
        if len(rates):
            self._last["curriculum/pass_rate/mean"] = float(rates.mean())
            shares = np.bincount(bins(rates), minlength=len(BINS)) / len(rates)
            self._last |= {f"curriculum/pass_rate/{name}": float(v) for name, v in zip(BINS, shares, strict=True)}
        if trained:
            self._last["groups/trained_zero_variance_frac"] = float(np.mean([not o.mixed for o in trained]))

    def metrics(self) -> dict[str, float]:
        return {**self._last, "rollouts/total": float(self.answers)}


def bins(rates: np.ndarray) -> np.ndarray:
    """The index in BINS of the range of each pass rate."""
    return np.where(rates <= 0, 0, np.where(rates >= 1, len(BINS) - 1, 1 + np.minimum(rates * 4, 3).astype(int)))
