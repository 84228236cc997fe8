"""What would make a plan that does not fit fit: settings to change, each tried by planning again.

    for change in changes("config.yaml", words, found):
        print(change.words, change.plan.peak)
"""

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


@dataclass(frozen=True)
class Change:
    """Settings that would make a plan fit."""

    words: tuple[str, ...]
    plan: Plan


def changes(path: str, words: Sequence[str], before: Plan, **keywords: Any) -> list[Change]:
    """Returns what would make a plan that does not fit fit: each change that does alone, else some that do together.

    path, words: those of the config. asked: the keywords of `plan`.
    """
    def tried(more: Sequence[str]) -> Plan | None:
        return _tried(path, [*words, *more], before, keywords)

    candidates = list(_candidates(configs.load(path, words), before.gpus))
    alone: list[Change] = []
    for candidate in candidates:
        known = any(set(change.words) < set(candidate) for change in alone)
        if not known and (attempt := tried(candidate)) and attempt.fits:
            alone.append(Change(tuple(candidate), attempt))
    if alone:
        return alone
    together: list[str] = []
    for candidate in candidates:
        taken = {word.split("=")[0] for word in together}
        fresh = [word for word in candidate if word.split("=")[0] not in taken]
        # another engine has other settings
        remaining = [word for word in together if not any(word.startswith(f"{new.split('=')[0]}.") for new in fresh)]
        attempt = tried([*remaining, *fresh])
        if attempt is None or not fresh:
            continue
        together = [*remaining, *fresh]
        if attempt.fits:
            return [_least(together, attempt, tried)]
    return []


def _least(words: list[str], best: Plan, tried: Callable[[Sequence[str]], Plan | None]) -> Change:
    """Returns the change without what is not needed."""
    for word in list(words):
        fewer = [other for other in words if other != word]
        without = tried(fewer)
        if without and without.fits:
            words, best = fewer, without
    return Change(tuple(words), best)


def _tried(path: str, words: Sequence[str], before: Plan, keywords: dict[str, Any]) -> Plan | None:
    try:
        return plan(configs.load(path, words), before.gpus, before.card, before.gib, **keywords)
    except ConfigError:
        return None


def _candidates(config: Config, gpus: int) -> Iterator[list[str]]:
    """Changes worth a look, those that cost least first."""
    engine, model = config.engine, config.model
    if engine.name == "vllm" and not engine.sleep:
        yield ["engine.sleep=true"]
    if engine.name != "hf":
        yield from ([f"engine.memory={share}"] for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
                    if not math.isclose(share, engine.memory))
        yield [f"engine.tensor_parallel={2 * engine.tensor_parallel}"]
    if not model.gradient_checkpointing:
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
        yield ["engine=vllm_server", "engine.memory=0.9"]  # its GPU is its own
    if (model.max_pixels or memory.IMAGE_PIXELS) > 401408:
        yield ["model.max_pixels=401408"]


def render_changes(advice: Sequence[Change]) -> list[str]:
    """Returns what would make it fit, in lines."""
    if not advice:
        return ["nothing that was tried makes it fit: more or larger GPUs, or a smaller model"]
    head = "each of these alone makes it fit:" if len(advice) > 1 or len(advice[0].words) == 1 else "together these do:"
    return [head, *(f"  {' '.join(c.words):<56}{c.plan.peak / GIB:>8.2f} GiB, {c.plan.step:,.1f} s a step"
                    for c in advice)]
