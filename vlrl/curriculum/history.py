"""What happened to every prompt so far, 16 bytes each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vlrl.curriculum.types import Outcome

_RANGE = np.finfo(np.float32).min, np.finfo(np.float32).max
_REJECTED = -2
_FIELDS = ("visits", "last", "pass_rate", "reward")


class History:
    """Of N prompts: how often and when each was drawn last, and how it went then."""

    def __init__(self, size: int):
        self.visits = np.zeros(size, dtype=np.int32)
        """[N] how often it was drawn."""
        self.last = np.full(size, -1, dtype=np.int32)
        """[N] the step in which it was last answered; below 0 = never."""
        self.pass_rate = np.full(size, np.nan, dtype=np.float32)
        """[N] of its last group; nan = never answered."""
        self.reward = np.full(size, np.nan, dtype=np.float32)
        """[N] mean of its last group; nan = never answered."""
        self._within: tuple[History, np.ndarray] | None = None
        self._parts: list[History] = []

    def part(self, places: np.ndarray) -> History:
        """Returns the history of some prompts [n] by themselves. Visits to them count here too; `note` is called on
        both.
        """
        subset = History(len(places))
        subset._within = self, places
        subset._take()
        self._parts.append(subset)
        return subset

    def _take(self) -> None:
        """Of a part: what the whole knows of its prompts."""
        if self._within:
            whole, places = self._within
            for name in _FIELDS:
                getattr(self, name)[:] = getattr(whole, name)[places]

    def visit(self, indices: np.ndarray | Sequence[int]) -> list[int]:
        """Counts one visit to each, also several to one; how often each was visited before."""
        places = np.asarray(indices, dtype=np.int64)
        order = np.argsort(places, kind="stable")
        first = np.searchsorted(places[order], places[order], side="left")
        earlier = np.empty(len(places), dtype=np.int64)
        earlier[order] = np.arange(len(places)) - first  # visits to the same prompt in this call
        out = (self.visits[places] + earlier).tolist()
        np.add.at(self.visits, places, 1)
        if self._within:
            whole, places = self._within
            whole.visit(places[np.asarray(indices, dtype=np.int64)])
        return out

    def note(self, outcomes: Iterable[Outcome], step: int) -> None:
        """Takes the outcomes of a step; of rejected prompts only that they were, and nothing of unscorable ones."""
        outcomes = [*outcomes]
        refused = np.array([o.draw.index for o in outcomes if not o.rewards], dtype=np.int64)
        self.last[refused[self.last[refused] < 0]] = _REJECTED
        known = [(o.draw.index, o.reward, o.pass_rate) for o in outcomes if o.scored]
        if known:  # of several to one prompt the last is kept
            index, reward, pass_rate = map(np.array, zip(*known, strict=True))
            self.last[index] = step
            self.reward[index] = np.clip(reward, *_RANGE)
            self.pass_rate[index] = pass_rate

    @property
    def visited(self) -> np.ndarray:
        """[N] bool: answered at least once."""
        return self.last >= 0

    @property
    def rejected(self) -> np.ndarray:
        """[N] bool: rejected whenever it was drawn."""
        return self.last == _REJECTED

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _FIELDS:
            getattr(self, name)[:] = np.asarray(state[name])
        for part in self._parts:
            part._take()
