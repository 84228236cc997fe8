"""KV caches that stay alive between the turns of an episode.

A row that has been written leaves its cache in the `Continued` of its request, and a later request whose prompt goes on
from there reads what is new alone. How much is kept is bounded by the device's whole memory and decided in the order of
the rows, never by what is free at the moment: which prompts are read anew decides the last bits of the logits.
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
        """Returns what a prompt has behind these tokens; None where it does not go on from them by `observed`."""
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
        """Returns what is to be read of a prompt, and the cache before it, which is kept no more; None where all of
        it is to be read.
        """
        cached, continued.cache = continued.cache, None
        rest = cached.rest(prompt, continued.observed) if cached else None
        return (rest, cached) if rest and cached else None

    def keep(self, continued: CacheSlot, prompt: Prompt, written: np.ndarray, layers: Callable[[], list[Pair]]) -> None:
        """Keeps the cache of a prompt and the first tokens written to it, where there is room for it."""
        continued.cache = None
        ids = np.concatenate([prompt.ids, written])
        if sum(len(one.cache.ids) for one in self._living if one.cache) + len(ids) <= self.most:
            continued.cache = RowCache(layers(), ids, _hashes(prompt))
            self._living.add(continued)
        elif not self._reported:
            self._reported = True
            _log.info("the KV caches of episodes would hold more than %d tokens: those of further episodes are "
                      "computed again in every turn", self.most)

    def clear(self) -> None:
        """Drops all, which are of weights that are no more."""
        for continued in self._living:
            continued.cache = None


def _hashes(prompt: Prompt) -> tuple[str, ...]:
    return tuple(m.sha256 for m in prompt.media)
