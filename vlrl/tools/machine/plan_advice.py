"""Finds changes of settings that make a plan fit on the GPUs, by planning again with each change.

    for change in changes("config.yaml", words, result):      # words: the settings; result: the plan that does not fit
        print(change.words, change.plan.peak)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl import config as configs
from vlrl.config.schema import Config
from vlrl.errors import ConfigError
from vlrl.tools.machine import memory
from vlrl.tools.machine.memory import GIB
from vlrl.tools.machine.plan import Plan, plan

Try = Callable[[Sequence[str]], Plan | None]
"""Function of additional overrides that returns the new plan, or None if a run would refuse the settings."""


@dataclass(frozen=True)
class Change:
    """A change of settings that makes a plan fit: its overrides, and the resulting plan."""

    words: tuple[str, ...]
    plan: Plan


def changes(path: str, words: Sequence[str], before: Plan, **keywords: Any) -> list[Change]:
    """Returns each change of settings that makes the plan fit by itself; if there is none, one combination of changes
    that makes the plan fit; else [].

    path, words: config file and overrides. before: the plan that does not fit. keywords: more arguments of `plan`."""
    def tried(more: Sequence[str]) -> Plan | None:
        try:
            return plan(configs.load(path, [*words, *more]), before.gpus, before.card, before.gib, **keywords)
        except ConfigError:
            return None

    candidates = list(_candidates(configs.load(path, words), before.gpus))
    alone: list[Change] = []
    for candidate in candidates:
        known = any(set(change.words) < set(candidate) for change in alone)
        if not known and (attempt := tried(candidate)) and attempt.fits:
            alone.append(Change(tuple(candidate), attempt))
    return alone or _combined(candidates, tried)


def _combined(candidates: Sequence[Sequence[str]], tried: Try) -> list[Change]:
    """Returns a list with one combination of `candidates` that makes the plan fit, or []. The candidates are added one
    by one until `tried` returns a plan that fits. Then the overrides that are not needed are removed."""
    words: list[str] = []
    for candidate in candidates:
        taken = {word.split("=")[0] for word in words}
        fresh = [word for word in candidate if word.split("=")[0] not in taken]
        # another engine has other settings
        kept = [word for word in words if not any(word.startswith(f"{new.split('=')[0]}.") for new in fresh)]
        attempt = tried([*kept, *fresh])
        if attempt is None or not fresh:
            continue
        words = [*kept, *fresh]
        if attempt.fits:
            return [_minimal(words, attempt, tried)]
    return []


def _minimal(words: list[str], best: Plan, tried: Try) -> Change:
    for word in list(words):
        fewer = [other for other in words if other != word]
        without = tried(fewer)
        if without and without.fits:
            words, best = fewer, without
    return Change(tuple(words), best)


def _candidates(config: Config, gpus: int) -> Iterator[list[str]]:
    """Yields lists of overrides to try, the least costly change first."""
    engine, model = config.engine, config.model
    if engine.name == "vllm" and not engine.sleep:
        yield ["engine.sleep=true"]
    if engine.name != "hf":
        yield from ([f"engine.memory={share}"] for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
                    if not math.isclose(share, engine.memory))
        yield [f"engine.tensor_parallel={2 * engine.tensor_parallel}"]
    if model.gradient_checkpointing is False:
        yield ["model.gradient_checkpointing=true"]
    if config.train.tokens_per_batch > 4096:
        yield ["train.tokens_per_batch=4096"]
    if engine.name == "hf" and engine.batch_rollouts not in range(1, 33):
        yield ["engine.batch_rollouts=32"]
    if gpus > 1 and config.train.sharding != "fsdp2" and model.lora.quantize == "none":
        yield ["train.sharding=fsdp2"]
        yield ["train.sharding=fsdp2", "train.gather=compute"]
    if not model.lora.rank:
        yield ["model.lora.rank=32"]
        yield ["model.lora.rank=32", "model.lora.quantize=nf4"]
    elif model.lora.quantize == "none":
        yield ["model.lora.quantize=nf4"]
    if engine.name != "vllm_server":
        yield ["engine=vllm_server"]
        yield ["engine=vllm_server", "engine.memory=0.9"]  # a server's GPU does nothing else
    if (model.max_pixels or memory.IMAGE_PIXELS) > 401408:
        yield ["model.max_pixels=401408"]


def render_changes(advice: Sequence[Change]) -> list[str]:
    """The changes as lines of text."""
    if not advice:
        return ["no change that was tried makes the plan fit: use more or larger GPUs, or a smaller model"]
    head = ("each of these changes alone makes the plan fit:" if len(advice) > 1 or len(advice[0].words) == 1 else
            "these changes together make the plan fit:")
    return [head, *(f"  {' '.join(c.words):<56}{c.plan.peak / GIB:>8.2f} GiB" for c in advice)]
