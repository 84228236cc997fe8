"""How often every prompt was drawn, and its last results, in 16 bytes per prompt."""

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
    """For each of N prompts: how often it was drawn, the step in which it was last answered, and its last result."""

    def __init__(self, size: int):
        self.visits = np.zeros(size, dtype=np.int32)
        """[N] how often each prompt was drawn."""
        self.last = np.full(size, -1, dtype=np.int32)
        """[N] the step in which each prompt was last answered; below 0 = never."""
        self.pass_rate = np.full(size, np.nan, dtype=np.float32)
        """[N] pass rate of each prompt's last group; nan = never answered."""
        self.reward = np.full(size, np.nan, dtype=np.float32)
        """[N] mean reward of each prompt's last group; nan = never answered."""
        self._within: tuple[History, np.ndarray] | None = None
        self._parts: list[History] = []

    def subset(self, indices: np.ndarray) -> History:
        """The history of the prompts with these `indices` [n], renumbered from 0. A draw that is counted in the subset
        is also counted in the full history. Results are not: `note` must be called on both."""
        subset = History(len(indices))
        subset._within = self, indices
        subset._copy_from_whole()
        self._parts.append(subset)
        return subset

    def _copy_from_whole(self) -> None:
        if self._within:
            whole, places = self._within
            for name in _FIELDS:
                getattr(self, name)[:] = getattr(whole, name)[places]

    def visit(self, indices: np.ndarray | Sequence[int]) -> list[int]:
        """Counts a draw of each index; indices may repeat. Returns how often each prompt had been drawn before."""
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
        """Records the results of a step's prompts, or that a prompt was rejected. Ignores groups without any reward."""
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
        """[N] bool: whether each prompt was answered at least once."""
        return self.last >= 0

    @property
    def rejected(self) -> np.ndarray:
        """[N] bool: whether the prompt was rejected at every draw. False for a prompt that was never drawn."""
        return self.last == _REJECTED

    def state_dict(self) -> dict[str, Any]:
        return state_of(self, _FIELDS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _FIELDS:  # in place: samplers hold on to these arrays
            getattr(self, name)[:] = np.asarray(state[name])
        for part in self._parts:
            part._copy_from_whole()
