"""Filters that decide which of a step's groups are trained on, independently of the sampler, and metrics of the step's
draws.

    keep        outcome -> bool: a group that is not kept is replaced, in up to curriculum.max_refills further rounds
    oversample  number of groups to draw per group needed, in the first round of a step
    select      chooses among the kept groups, if there are more than needed"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from vlrl.algo.effect import idle
from vlrl.algo.named import bind
from vlrl.algo.state import Saved
from vlrl.config.base import Beta, Count, Fraction, NonNegative
from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum.types import Outcome
from vlrl.errors import ConfigError

Factor = Annotated[float, Field(ge=1)]


def keep_all(outcome: Outcome) -> bool:
    """Keeps every group."""
    return True


def mixed(outcome: Outcome) -> bool:
    """Keeps groups with a training signal: a nonzero advantage or, if that is not known from the group alone, unequal
    raw rewards."""
    return outcome.mixed


def some_right(outcome: Outcome) -> bool:
    """Keeps groups with both correct and wrong completions: dynamic sampling (DAPO, arXiv 2503.14476, eq. 11). Without
    known outcomes it keeps the same groups as `mixed`."""
    return outcome.mixed if math.isnan(outcome.pass_rate) else 0 < outcome.pass_rate < 1


@idle("every pass rate is from 0 to 1", low=0, high=1)
class PassRange:
    """Keeps groups with low <= pass rate <= high: online difficulty filtering (arXiv 2504.03380, with a range centred
    on 0.5)."""

    def __init__(self, low: Fraction = 0.25, high: Fraction = 0.75):
        if low > high:
            raise ValueError(f"low={low} is more than high={high}, so no group would be kept: lower low, or raise high")
        self.low, self.high = low, high

    def __call__(self, outcome: Outcome) -> bool:
        return self.low <= outcome.pass_rate <= self.high


class StdEma(Saved):
    """Keeps groups in which the standard deviation s of the rewards is at least `beta` times a moving average m.

    After each step m <- decay * m + (1 - decay) * mean of s over the step's groups; m begins with the first such mean.
    All groups of the first `start` steps are kept. RLPR (arXiv 2506.18254) section 3.3."""

    saved = ("mean", "steps")

    def __init__(self, beta: NonNegative = 0.5, decay: Beta = 0.99, start: Count = 5):
        self.beta, self.decay, self.start = beta, decay, start
        self.mean, self.steps = math.nan, 0

    def __call__(self, outcome: Outcome) -> bool:
        return self.steps < self.start or math.isnan(self.mean) or _spread(outcome) >= self.beta * self.mean

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Updates the moving average with all groups of a step, including groups that were dropped."""
        spreads = [_spread(o) for o in outcomes if o.scored]
        if spreads:
            now = float(np.mean(spreads))
            self.mean = now if math.isnan(self.mean) else self.decay * self.mean + (1 - self.decay) * now
        self.steps += 1


def _spread(outcome: Outcome) -> float:
    return float(np.std(outcome.scored)) if outcome.scored else -1.0


KEEP = {"all": keep_all, "mixed": mixed, "some_right": some_right, "pass_range": PassRange, "std_ema": StdEma}


def first(outcomes: Sequence[Outcome], count: int) -> list[int]:
    """Returns the indices of the `count` groups that were drawn first."""
    return list(range(min(count, len(outcomes))))


def nearest_half(outcomes: Sequence[Outcome], count: int) -> list[int]:
    """Returns the indices of the `count` groups whose pass rate is nearest to 0.5, ascending. On ties groups that were
    drawn earlier are preferred. GLM-4.1V-Thinking (arXiv 2507.01006)."""
    away = [abs(o.pass_rate - 0.5) if o.pass_rate == o.pass_rate else math.inf for o in outcomes]
    return sorted(sorted(range(len(outcomes)), key=lambda i: (away[i], i))[:count])


def most_varied(outcomes: Sequence[Outcome], count: int) -> list[int]:
    """Returns the indices of the `count` groups whose rewards have the largest standard deviation, ascending. On ties
    groups that were drawn earlier are preferred."""
    spread = [_spread(o) for o in outcomes]
    return sorted(sorted(range(len(outcomes)), key=lambda i: (-spread[i], i))[:count])


SELECT = {"first": first, "nearest_half": nearest_half, "most_varied": most_varied}


class FixedOversampling(Saved):
    """The number of groups to draw per group needed, as a constant `factor`."""

    def __init__(self, factor: Factor = 1.0):
        self.factor = factor


class EmaOversampling(Saved):
    """The number of groups to draw per group needed, as a moving average: the ratio EMA of GLM-4.1V-Thinking (arXiv
    2507.01006).

    After each step factor <- (1 - decay) * e + decay * factor. Here e = 1 / (1 - share of groups that are all correct
    or all wrong), but at most `most`. The factor begins at 1."""

    saved = ("factor",)

    def __init__(self, decay: Beta = 0.9, most: Factor = 4.0):
        self.decay, self.most, self.factor = decay, most, 1.0

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        rates = [o.pass_rate for o in outcomes if o.pass_rate == o.pass_rate]
        if rates:
            valid = sum(0 < rate < 1 for rate in rates) / len(rates)
            wanted = min(self.most, 1 / valid) if valid else self.most
            self.factor = (1 - self.decay) * wanted + self.decay * self.factor


OVERSAMPLE = {"fixed": FixedOversampling, "ema": EmaOversampling}


class Filters:
    """The filters that curriculum.keep, curriculum.oversample and curriculum.select name. Raises ConfigError for an
    unknown name or option."""

    def __init__(self, settings: CurriculumSettings):
        self.keep = bind("curriculum.keep", settings.keep, KEEP)
        self.select = bind("curriculum.select", settings.select, SELECT, skip=2)
        self.oversample: Any = bind("curriculum.oversample", settings.oversample, OVERSAMPLE).function
        self.max_refills = settings.max_refills

    def oversampled(self, count: int) -> int:
        """Number of groups to draw in the first round of a step if `count` groups are needed."""
        return math.ceil(round(count * self.oversample.factor, 9))  # 100 * 1.1 is a little above 110

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Updates the filters with all groups of a step, after the selection."""
        for filter in (self.oversample, self.keep.function):
            if hasattr(filter, "observe"):
                filter.observe(outcomes)

    def state_dict(self) -> dict[str, Any]:
        keep = self.keep.state_dict()
        return {**self.oversample.state_dict(), **({"keep": keep} if keep else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = {name: value for name, value in state.items() if name != "keep"}
        if own:
            self.oversample.load_state_dict(own)
        self.keep.load_state_dict(state.get("keep", {}))


class Intake:
    """Collects the groups of a step until `count` groups are kept or no refill is left. Call `take` after each round of
    generation while `wanted` is above 0, then call `chosen`."""

    def __init__(self, filters: Filters, count: int):
        self.filters, self.count = filters, count
        self.outcomes: dict[int, Outcome] = {}
        """Outcome of every completed group, by group number."""
        self.selected: list[int] = []
        self.rounds = 0
        """Number of rounds of generation, not counting rounds in which every prompt was rejected."""
        self.requested = 0
        self.underway = 0
        """Number of groups whose completions are not finished; these groups are returned in a later step."""

    @property
    def wanted(self) -> int:
        """Number of prompts to draw in the next round; 0 = no further round."""
        missing = self.count - len(self.selected) - self.underway
        if missing <= 0 or self.rounds > self.filters.max_refills:
            return 0
        return missing if self.requested else self.filters.oversampled(missing)

    @property
    def refills(self) -> int:
        """Number of rounds of generation after the first."""
        return max(0, self.rounds - 1)

    def take(self, outcomes: Mapping[int, Outcome], underway: int = 0) -> None:
        """Adds the outcomes of a round, by group number. `underway` is the number of the step's unfinished groups."""
        self.underway = underway
        self.requested += len(outcomes)
        usable = {number: o for number, o in outcomes.items() if o.rewards}
        self.outcomes |= usable
        self.rounds += bool(usable)
        self.selected += [number for number, o in usable.items() if self.filters.keep(o)]

    def chosen(self) -> list[int]:
        """Numbers of the groups to train on, at most `count`, ascending."""
        places = self.filters.select([self.outcomes[n] for n in self.selected], self.count)
        if not {*places} <= {*range(len(self.selected))} or len({*places}) != len(places) or len(places) > self.count:
            raise ConfigError(f"curriculum.select={self.filters.select.name!r} returned {places!r:.200} for "
                              f"{len(self.selected)} groups: return distinct indices, counted from 0, of at most "
                              f"{self.count} of these groups")
        return [self.selected[i] for i in places]


BINS = ("0", "0-25", "25-50", "50-75", "75-100", "100")
"""Metric names of the ranges of pass rates, in percent: 0, above 0 and below 25, and so on; 25, 50 and 75 are lower
bounds."""


class Tally(Saved):
    """Metrics of the last step over all processes, and the number of completions generated since the run began."""

    saved = ("answers",)

    def __init__(self) -> None:
        self.answers = 0
        self._last: dict[str, float] = {}

    def note(self, intake: Intake, chosen: Sequence[int], probes: Sequence[Outcome] = ()) -> None:
        """Adds the groups of a completed step. `chosen` holds the numbers of the groups that are trained on, `probes`
        the outcomes of the sampler's probes."""
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
