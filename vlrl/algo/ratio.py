"""Declares policy terms that act only through the ratio p / p(old), and finds their options that have no effect.

With one optimizer step per batch of rollouts the ratio is always 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vlrl.algo.effect import FunctionUse, Inert
from vlrl.config.algo import CLIPS
from vlrl.monitoring.mismatch import samples_as_it_trains

LARGEST_LOG = 20.0  # Log-ratios are clamped to +- this value; see LossInputs.log_ratio
MOST = math.exp(LARGEST_LOG)
_FARTHEST = {"clip_low": 1.0, "clip_high": MOST - 1, "delta": MOST, "dual_clip": MOST, "cap": MOST, "pre_clip": MOST,
             "delta_low": 1.0, "delta_high": 1.0}
"""Option -> the smallest value that no ratio can reach, so that the option never applies."""


@dataclass(frozen=True)
class Ratio:
    """Declares how a policy term depends on the ratio p / p(old), and which options act only through the ratio."""

    options: tuple[str, ...]  # options that act only through the ratio
    alone: bool
    """Whether at a ratio of 1 the term's gradient is that of algo.loss=reinforce, or a multiple of it (see `like`)."""
    like: str  # how a message relates the gradient at a ratio of 1 to that of reinforce: "that", "a multiple of that"
    farthest: Mapping[str, float]  # option -> the smallest value that no ratio can reach, if it differs from _FARTHEST
    hidden: Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]]
    """A function that takes the options that are set, and yields (option, reason) for each option that has no effect
    because of another option."""


def acts_through_ratio(
        *options: str, alone: bool = True, like: str = "that", farthest: Mapping[str, float] | None = None,
        hidden: Callable[[Mapping[str, Any]], Iterator[tuple[str, str]]] = lambda given: iter(())
) -> Callable[[Any], Any]:
    """Decorator that declares that a policy term acts only through the ratio. The arguments are the fields of Ratio."""
    def mark(function: Any) -> Any:
        function.ratio = Ratio(options, alone, like, farthest or {}, hidden)
        return function
    return mark


def inert(use: FunctionUse) -> Iterator[Inert]:
    """Yields an Inert for each setting of the policy term that has no effect: options that act only through p / p(old)
    although the ratio is always 1, and bounds that no ratio reaches or that another bound overrides."""
    config, options = use.config, use.named.options
    said: Ratio | None = getattr(use.function, "ratio", None)
    if said is None:
        return
    given = {option: (f"algo.loss.{option}", value) for option, value in options.items()} | {
        option: (f"algo.{option}", value) for option in CLIPS
        if option not in options and (value := getattr(config.algo, option)) is not None}
    by_ratio = {option: given[option] for option in said.options if option in given}
    if config.rollout.one_update and (options.get("from_sampler") is not True or samples_as_it_trains(config)):
        why = "there is one optimizer step per batch, so p / p(old) is 1"
        more = "raise rollout.minibatches or rollout.updates"
        yield from (Inert(setting, value, f"{why}; {more}") for setting, value in by_ratio.values())
        if said.alone:
            yield Inert("algo.loss", use.named.name, f"{why} and its gradient is {said.like} of algo.loss=reinforce; "
                        f"{more}", usual=not config.algo.chosen("loss"))
    for option, (setting, value) in by_ratio.items():
        if value is not None and value >= {**_FARTHEST, **said.farthest}.get(option, math.inf):
            yield Inert(setting, value, "no ratio is that far from 1" if "delta_" not in option else
                        "no two probabilities differ by more than 1")
    for option, why in said.hidden({option: value for option, (_, value) in given.items()}):
        yield Inert(*given[option], why)
