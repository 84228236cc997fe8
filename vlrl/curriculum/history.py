"""Visits and last results of every prompt, 16 bytes each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vlrl.algo.state import state_of
from vlrl.curriculum.types import Outcome

_RANGE = np.finfo(np.float32).min, np.finfo(np.float32).max
_REJECTED = -2
_FIELDS = ("visits", "last", "pass_rate", "reward")


class History:
    """For N prompts: how often each was drawn, when it was last answered, and with which result."""

    def __init__(self, size: int):
        self.visits = np.zeros(size, dtype=np.int32)
        """[N] number of draws."""
        self.last = np.full(size, -1, dtype=np.int32)
        """[N] the step in which it was last answered; below 0 = never."""
        self.pass_rate = np.full(size, np.nan, dtype=np.float32)
        """[N] of its last group; nan = never answered."""
        self.reward = np.full(size, np.nan, dtype=np.float32)
        """[N] mean reward of its last group; nan = never answered."""
        self._within: tuple[History, np.ndarray] | None = None
        self._parts: list[History] = []

    def part(self, places: np.ndarray) -> History:
        """The history of the prompts [n] at these indices, numbered from 0. Its visits count in the whole history too;
        `note` is called on both."""
        subset = History(len(places))
        subset._within = self, places
        subset._copy_from_whole()
        self._parts.append(subset)
        return subset

    def _copy_from_whole(self) -> None:
        if self._within:
            whole, places = self._within
            for name in _FIELDS:
                getattr(self, name)[:] = getattr(whole, name)[places]

    def visit(self, indices: np.ndarray | Sequence[int]) -> list[int]:
        """Counts a visit to each index, which may repeat; returns how often each had been visited before."""
        places = np.asarray(indices, dtype=np.int64)
        order = np.argsort(places, kind="stable")
        first = np.searchsorted(places[order], places[order], side="left")
        earlier = np.empty(len(places), dtype=np.int64)
        earlier[order] = np.arange(len(places)) - first  # visits to the same prompt in this call
        out = (self.visits[places] + earlier).tolist()
        np.add.at(self.visits, places, 1)
        if self._within:
            whole, members = self._within
            whole.visit(members[places])
        return out

    def note(self, outcomes: Iterable[Outcome], step: int) -> None:
        """Records the outcomes of a step: that a prompt was rejected, or its results; nothing of unscorable groups."""
        outcomes = [*outcomes]
        refused = np.array([o.draw.index for o in outcomes if not o.rewards], dtype=np.int64)
        self.last[refused[self.last[refused] < 0]] = _REJECTED
        known = [(o.draw.index, o.reward, o.pass_rate) for o in outcomes if o.scored]
        if known:  # of several groups of one prompt the last counts
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
        return state_of(self, _FIELDS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _FIELDS:  # in place: samplers hold on to these arrays
            getattr(self, name)[:] = np.asarray(state[name])
        for part in self._parts:
            part._copy_from_whole()
