"""The expected mismatch between sampler and trainer on the same tokens, by dtype and engine: the limit for alerts.

`mismatch/kl` is the mean over tokens of exp(g) - g - 1, where g = trainer log-probability - sampler log-probability.
`mismatch/gap_max` is the largest |g|. Differences from rounding stay below the limits in this module. Different
weights, images, positions or temperatures exceed the limits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from vlrl.config.schema import Config
from vlrl.config.sections import active
from vlrl.errors import TrainingError

_FLOAT32 = {"kl": 1e-4, "gap": 0.1}  # limits for float32, where only the order of sums differs
_ROUNDED = {"kl": 0.02, "gap": 5.0}
"""Limits for 16-bit or 4-bit weights. Log-probabilities usually differ by 0.02; with a mixture of experts, by more."""


def expected_mismatch(config: Config, what: str) -> float | None:
    """The largest `mismatch/kl` (`what`="kl") or `mismatch/gap_max` (`what`="gap") that rounding can cause. None if
    sampler and trainer differ on purpose: rollouts of older or other weights, dropout, or log-probabilities that are
    normalized over a subset of the tokens."""
    on_purpose = (samples_with_other_weights(config), uses_dropout(config), config.engine.renormalises)
    return None if any(on_purpose) else (_FLOAT32 if computes_in_float32(config) else _ROUNDED)[what]


def computes_in_float32(config: Config) -> bool:
    """Whether the sampler and the trainer both compute in float32."""
    own, engine = config.model.dtype, config.engine.dtype
    exact = own == "float32" or (own == "auto" and not torch.cuda.is_available())
    merged = config.engine.name != "hf" and config.model.lora.quantize != "none"
    return exact and engine in (None, "float32") and not merged


def samples_with_other_weights(config: Config) -> bool:
    """Whether rollouts, or parts of them, may be sampled with weights other than those at the start of the update."""
    return bool(config.asynchronous.max_staleness or config.rollout.step_tokens
                or any(settings.other_weights for _, settings in active(config)))


def uses_dropout(config: Config) -> bool:
    """Whether the update computes with dropout."""
    return bool(config.model.lora.rank and config.model.lora.dropout)


def same_logprobs_without_dropout(config: Config) -> bool:
    """Whether engine and trainer would compute the same log-probabilities at the start of the update, up to float32
    rounding, if dropout were off."""
    return computes_in_float32(config) and config.engine.name == "hf" and not samples_with_other_weights(config)


def samples_as_it_trains(config: Config) -> bool:
    """Whether engine and trainer compute the same log-probabilities at the start of the update, up to float32 rounding.
    False if the update uses dropout."""
    return same_logprobs_without_dropout(config) and not uses_dropout(config)


def check_mismatch(metrics: Mapping[str, float], config: Config, step: int) -> None:
    """Raises TrainingError if a step's `mismatch/kl` exceeds limits.mismatch."""
    limit, value = config.limits.mismatch, metrics.get("mismatch/kl", math.nan)
    if limit is not None and value > limit:
        raise TrainingError(
            f"step {step}: mismatch/kl is {value:.3g} per token, above limits.mismatch={limit:g}: engine.name="
            f"{config.engine.name} and the trainer do not compute the same log-probabilities "
            "(docs/troubleshooting.md). The same command resumes from the last checkpoint; limits.mismatch=null "
            "removes the limit.")
