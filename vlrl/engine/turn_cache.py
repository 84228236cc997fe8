"""Keeps KV caches between the turns of an episode.

The KV cache of a finished row is stored in the `CacheSlot` of its request. A later request whose prompt extends the
cached tokens prefills only the new tokens. The device's total memory limits how much is kept, and rows are kept in
order. The memory that happens to be free has no influence, because prefilling a prompt again changes the last bits of
the logits."""

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
    """The KV cache of one row of n tokens."""

    layers: list[Pair]  # keys and values [1, H_kv, n, d] of each layer
    ids: np.ndarray  # [n] token ids
    media: tuple[str, ...]  # hashes of the media among the tokens

    def rest(self, prompt: Prompt, observed: Prompt | None) -> Prompt | None:
        """The part of a prompt after the cached tokens, which has the media of `observed`. None if the prompt does not
        start with the cached tokens and media, or has no new tokens."""
        n, hashes = len(self.ids), _hashes(prompt)
        if not (n < len(prompt) and np.array_equal(prompt.ids[:n], self.ids)
                and hashes == self.media + (_hashes(observed) if observed else ())):
            return None
        return replace(prompt, ids=prompt.ids[n:], raw_ids=prompt.ids[n:], positions=prompt.positions[:, n:],
                       aligned={name: values[n:] for name, values in prompt.aligned.items()},
                       mm=observed.mm if observed else {}, visuals=observed.visuals if observed else (),
                       media=observed.media if observed else ())


class TurnCaches:
    """All stored caches; they hold at most `most` tokens in total."""

    def __init__(self, most: float):
        self.most = most
        self._living: weakref.WeakSet[CacheSlot] = weakref.WeakSet()
        self._reported = False

    def take(self, continued: CacheSlot, prompt: Prompt) -> tuple[Prompt, RowCache] | None:
        """Removes the cache from the slot `continued`. Returns the part of the prompt that must still be prefilled, and
        the cache. None if the complete prompt must be prefilled."""
        cached, continued.cache = continued.cache, None
        rest = cached.rest(prompt, continued.observed) if cached else None
        return (rest, cached) if rest and cached else None

    def keep(self, continued: CacheSlot, prompt: Prompt, written: np.ndarray, layers: Callable[[], list[Pair]]) -> None:
        """Stores the cache of a prompt and the tokens `written` after it in the slot `continued`, if there is room."""
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
        """Drops all caches, when they were computed with old weights."""
        for continued in self._living:
            continued.cache = None


def _hashes(prompt: Prompt) -> tuple[str, ...]:
    return tuple(m.sha256 for m in prompt.media)
