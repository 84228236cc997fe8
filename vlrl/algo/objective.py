"""The loss of one micro-batch, composed of functions that the settings name.

    loss = aggregate(term * weights * correction + kl_coef * kl * kl_weights) + token mean of the entropy term

Every share is divided by counts over the whole optimizer step, so the gradient does not depend on micro-batches,
accumulation, packing or the number of processes. A function that needs more than one rollout (a quantile, a sum over a
group) first computes it for the whole step, in its `prepare`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlrl.algo.aggregation import AGGREGATIONS
from vlrl.algo.inputs import LossInputs, Metrics
from vlrl.algo.named import Bound, bind, options_of, parameters
from vlrl.algo.tables import CORRECTIONS, ENTROPIES, KLS, TERMS, WEIGHTS
from vlrl.config.algo import CLIPS, AlgoSettings
from vlrl.config.base import Named
from vlrl.config.registry import Table
from vlrl.errors import ConfigError

Prepared = dict[str, Mapping[str, torch.Tensor]]
"""Results of the functions' `prepare` for the whole optimizer step, by the key in `Objective.functions`."""


@dataclass(frozen=True, eq=False)
class Objective:
    """The functions that make up the loss, with their options bound."""

    term: Bound
    aggregation: Bound
    weights: Sequence[Bound] = ()
    correction: Bound | None = None
    kl: Bound | None = None  # None if the loss has no KL term
    kl_weights: Sequence[Bound] = ()
    entropy: Bound | None = None

    @classmethod
    def of(cls, algo: AlgoSettings) -> Objective:
        """The objective of the settings `algo.*`. Raises ConfigError, which names the setting; see named.bind."""
        clips: dict[str, Any] = {name: value for name in CLIPS if (value := getattr(algo, name)) is not None}
        _refuse_lost_clip(algo, clips)
        correction = optional("algo.correction", algo.correction, CORRECTIONS)
        _refuse_empty(correction)
        kl = bind("algo.kl", algo.kl, KLS) if algo.kl_coef or algo.chosen("kl") else None
        kl_weights = [bind(f"algo.kl_weights.{i}", w, WEIGHTS) for i, w in enumerate(algo.kl_weights)]
        in_loss = algo.kl_coef > 0 and algo.kl_in == "loss"
        return cls(
            term=bind("algo.loss", algo.loss, TERMS, **clips),
            aggregation=bind("algo.aggregation", algo.aggregation, AGGREGATIONS, skip=2),
            weights=[bind(f"algo.weights.{i}", w, WEIGHTS) for i, w in enumerate(algo.weights)],
            correction=correction, kl=kl if in_loss else None, kl_weights=kl_weights if in_loss else (),
            entropy=optional("algo.entropy", algo.entropy, ENTROPIES))

    @property
    def functions(self) -> dict[str, Bound]:
        """The functions in use by key: "loss", "weights.0", ..."""
        many = {**{f"weights.{i}": w for i, w in enumerate(self.weights)},
                **{f"kl_weights.{i}": w for i, w in enumerate(self.kl_weights)}}
        one = {"loss": self.term, "aggregation": self.aggregation, "correction": self.correction, "kl": self.kl,
               "entropy": self.entropy}
        return {**{k: v for k, v in one.items() if v is not None}, **many}

    @property
    def requires(self) -> frozenset[str]:
        """Names of the inputs that all functions require; also "reference" with a KL term."""
        own = frozenset[str]().union(*(f.requires for f in self.functions.values()))
        return own | ({"reference"} if self.kl else set())

    @property
    def prepares(self) -> bool:
        """Whether any function has a `prepare`, which must run on the whole optimizer step before the micro-batches."""
        return any(f.prepare for f in self.functions.values())

    def prepare(self, x: LossInputs) -> Prepared:
        """Runs the functions' `prepare` on a whole optimizer step, without gradient. A collective call."""
        with torch.no_grad():
            return {place: function(x) for place, f in self.functions.items() if (function := f.prepare)}

    def __call__(self, x: LossInputs, kl_coef: float = 0.0) -> tuple[torch.Tensor, Metrics]:
        """Returns this micro-batch's share of the loss, and metrics. The loss is the sum of the shares over
        micro-batches and processes. Metrics are sums over the trained tokens; only "clipped" and "ratio" of the
        policy term are per token [N]."""
        per_token, metrics = self.term(_of(x, "loss"))
        factors = [w(_of(x, f"weights.{i}")) for i, w in enumerate(self.weights)]
        if self.correction:
            factor, more = self.correction(_of(x, "correction"))
            factors, metrics = [*factors, factor], {**metrics, **more}
        for factor in factors:
            per_token = per_token * factor
        if self.kl and kl_coef:
            from vlrl.algo.kl import clamped

            kl = self.kl(_of(x, "kl"))
            metrics = {**metrics, "kl": (kl.detach() * x.mask).sum()}
            if (far := clamped(self.kl, x)) is not None:
                metrics["kl/clamped"] = (far * x.mask).sum()
            for i, weight in enumerate(self.kl_weights):
                kl = kl * weight(_of(x, f"kl_weights.{i}"))
            per_token = per_token + kl_coef * kl
        loss = self.aggregation(per_token, _of(x, "aggregation"))
        if self.entropy:
            term, more = self.entropy(_of(x, "entropy"))
            loss, metrics = loss + (term * x.mask).sum() / max(x.total_tokens, 1.0), {**metrics, **more}
        return loss, metrics


def optional(setting: str, named: Named, table: Mapping[str, object]) -> Bound | None:
    """Binds the function that a setting names (see named.bind). Returns None for "none", which has no options."""
    if named.name != "none":
        return bind(setting, named, Table({"none": None}) | table)
    for option, value in named.options.items():
        raise ConfigError(f"{setting}.{option}={value!r}: 'none' has no options. Remove the option, or set {setting} "
                          f"to one of {', '.join(table)}")
    return None


def _refuse_lost_clip(algo: AlgoSettings, clips: Mapping[str, float]) -> None:
    name, given = algo.loss.name, algo.loss.options
    for clip, value in clips.items():
        if clip not in options_of("algo.loss", name, TERMS):
            clipping = ", ".join(other for other in TERMS if clip in options_of("algo.loss", other, TERMS))
            own = ", ".join(f"algo.loss.{option}" for option in options_of("algo.loss", name, TERMS)) or "none"
            raise ConfigError(f"algo.{clip}={value:g} would have no effect, because algo.loss={name!r} does not clip. "
                              f"Leave algo.{clip} out (options of this loss: {own}), or choose a loss that clips: "
                              f"{clipping}")
        if given.get(clip, value) != value:
            raise ConfigError(f"algo.{clip}={value:g} and algo.loss.{clip}={given[clip]} set the same bound: leave "
                              "one of the two settings out")


def _refuse_empty(correction: Bound | None) -> None:
    if correction is not None and not inspect.isclass(correction.function):
        known = {k: default for k, (_, default) in parameters(correction.function).items()} | {**correction.options}
        low, high = known.get("low"), known.get("high")
        if isinstance(low, float) and isinstance(high, float) and low > high:
            raise ConfigError(f"algo.correction.low={low:g} is above algo.correction.high={high:g}, so no weight is "
                              "within the bounds: raise algo.correction.high, or lower algo.correction.low")


def _of(x: LossInputs, place: str) -> LossInputs:
    return replace(x, prepared=x.prepared.get(place, {})) if x.prepared else x
