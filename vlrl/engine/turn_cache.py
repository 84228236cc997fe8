"""KV caches that are kept between the turns of an episode.

A finished row leaves its KV cache in the `CacheSlot` of its request, and a later request whose prompt extends it
prefills only the new tokens. How much is kept is bounded by the device's total memory and decided in the order of the
rows, never by the memory that happens to be free: which prompts are prefilled again affects the last bits of the
logits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vlrl.engine.base import CacheSlot
from vlrl.engine.cache import Pair
from vlrl.types import Prompt

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RowCache:
    """The KV cache of one row; n tokens."""

    layers: list[Pair]
    """Keys and values [1, H_kv, n, d] of each layer."""
    ids: np.ndarray
    """[n]"""
    media: tuple[str, ...]
    """Hashes of the media among them."""

    def rest(self, prompt: Prompt, observed: Prompt | None) -> Prompt | None:
        """The part of a prompt after these tokens; None if the prompt does not extend them by `observed`."""
        n, hashes = len(self.ids), _hashes(prompt)
        if not (n < len(prompt) and np.array_equal(prompt.ids[:n], self.ids)
                and hashes == self.media + (_hashes(observed) if observed else ())):
            return None
        return replace(prompt, ids=prompt.ids[n:], raw_ids=prompt.ids[n:], positions=prompt.positions[:, n:],
                       aligned={name: values[n:] for name, values in prompt.aligned.items()},
                       mm=observed.mm if observed else {}, visuals=observed.visuals if observed else (),
                       media=observed.media if observed else ())


class TurnCaches:
    """The caches that are kept, of at most `most` tokens together."""

    def __init__(self, most: float):
        self.most = most
        self._living: weakref.WeakSet[CacheSlot] = weakref.WeakSet()
        self._reported = False

    def take(self, continued: CacheSlot, prompt: Prompt) -> tuple[Prompt, RowCache] | None:
        """The part of a prompt that is still to be prefilled, and the cache before it, which leaves its slot; None if
        the whole prompt must be prefilled."""
        cached, continued.cache = continued.cache, None
        rest = cached.rest(prompt, continued.observed) if cached else None
        return (rest, cached) if rest and cached else None

    def keep(self, continued: CacheSlot, prompt: Prompt, written: np.ndarray, layers: Callable[[], list[Pair]]) -> None:
        """Keeps the cache of a prompt and the first tokens written after it, if there is room."""
        continued.cache = None
        ids = np.concatenate([prompt.ids, written])
        if sum(len(one.cache.ids) for one in self._living if one.cache) + len(ids) <= self.most:
            continued.cache = RowCache(layers(), ids, _hashes(prompt))
            self._living.add(continued)
        elif not self._reported:
            self._reported = True
            _log.info("the KV caches of all episodes would exceed %d tokens: further episodes prefill their whole "
                      "prompt in every turn", self.most)

    def clear(self) -> None:
        """Drops all caches: they belong to old weights."""
        for continued in self._living:
            continued.cache = None


def _hashes(prompt: Prompt) -> tuple[str, ...]:
    return tuple(m.sha256 for m in prompt.media)
