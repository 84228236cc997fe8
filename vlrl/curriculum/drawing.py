"""Functions that draw prompts, weighted without repetition or in shuffled passes; samplers that do not learn,
`sequential` (the order of the data) and `uniform` (shuffled); and the base class of samplers that learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from vlrl.algo.state import Saved, restore, state_of
from vlrl.curriculum.base import Prompts, stream
from vlrl.curriculum.types import Draw, Outcome

_ROUNDS = 8
_BLOCK = 64
"""Block size of partial sums of the weights: a draw first finds its block, then the index inside the block."""


def softmax(values: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities [C] proportional to exp(value / temperature)."""
    weights = np.exp((values - values.max()) / temperature)
    return weights / weights.sum()


def weighted(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws [count] indices one after another, each with a probability proportional to its weight among the indices not
    drawn yet.

    Once all indices with a positive weight are drawn, each of them can be drawn again. Raises ValueError if a weight is
    negative or none is positive."""
    below = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64))
    positive = int(np.count_nonzero(weights))
    if not positive or not np.isfinite(below[-1]) or weights.min() < 0:
        raise ValueError("the weights must be finite and not negative, and at least one must be above 0")
    passes, rest = divmod(count, positive)
    return np.concatenate([_without_repetition(weights, below, n, rng) for n in (*[positive] * passes, rest)])


def _without_repetition(weights: np.ndarray, below: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws [count] distinct indices by rejecting repeated ones, or, if that takes too long, by exponential keys
    (Efraimidis and Spirakis, 2006), which has the same distribution. below: running sum at each block end."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    chosen: dict[int, None] = {}
    for _ in range(_ROUNDS):
        targets = rng.random(2 * (count - len(chosen))) * below[-1]
        for place in _found(weights, below, targets).tolist():
            if weights[place] > 0 and len(chosen) < count:
                chosen[place] = None
        if len(chosen) == count:
            return np.fromiter(chosen, dtype=np.int64, count=count)
    taken = np.fromiter(chosen, dtype=np.int64, count=len(chosen))
    left = weights.astype(np.float64, copy=True)
    left[taken] = 0
    with np.errstate(divide="ignore"):
        keys = np.where(left > 0, rng.exponential(size=len(left)) / left, np.inf)
    rest = np.argpartition(keys, count - len(chosen) - 1)[:count - len(chosen)]
    return np.concatenate([taken, rest[np.argsort(keys[rest])]])


def _found(weights: np.ndarray, below: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """For each of the `targets` [n], returns the index of the first weight at which the running sum of the weights [N]
    exceeds the target, up to rounding. `below` [B] is the running sum at the end of each block of _BLOCK weights."""
    block = np.minimum(np.searchsorted(below, targets, side="right"), len(below) - 1)
    inside = np.minimum(block[:, None] * _BLOCK + np.arange(_BLOCK), len(weights) - 1)
    sums = np.cumsum(weights[inside], axis=1, dtype=np.float64)
    wanted = targets - np.where(block > 0, below[block - 1], 0.0)
    place = np.minimum((sums <= wanted[:, None]).sum(axis=1), _BLOCK - 1)
    return inside[np.arange(len(targets)), place]


class Cycle:
    """Draws the prompts `members` in repeated passes. Each pass has a different shuffled order, which depends only on
    (key, number of the pass)."""

    def __init__(self, members: np.ndarray, *key: int):
        self.members, self.key, self.drawn = members, key, 0
        self._order: tuple[int, np.ndarray] = (-1, members)

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` prompts."""
        places = np.arange(self.drawn, self.drawn + count)
        self.drawn += count
        parts = [self._pass(int(k))[places[places // len(self.members) == k] % len(self.members)]
                 for k in np.unique(places // len(self.members))]
        return np.concatenate(parts) if parts else self.members[:0]

    def _pass(self, number: int) -> np.ndarray:
        if self._order[0] != number:
            self._order = (number, stream(*self.key, number).permutation(self.members))
        return self._order[1]


def next_distinct(cycle: Cycle, count: int, taken: set[int]) -> np.ndarray:
    """The next `count` prompts of a cycle that are not in `taken`. No prompt is repeated while others remain."""
    fresh: list[int] = []
    while len(fresh) < count:
        if len(taken) >= len(cycle.members) and taken >= {*cycle.members.tolist()}:
            taken = set()
        for index in cycle.take(count - len(fresh)).tolist():
            if index not in taken:
                taken.add(index)
                fresh.append(index)
    return np.array(fresh, dtype=np.int64)


class Adaptive:
    """Base class of samplers that learn: `pick` chooses prompts, `learn` receives their outcomes.

    Every call of `next` has its own random stream, keyed by the seed and the number of the call. The methods `state`
    and `restore` save and load what `pick` and `learn` change, by default the attributes named in `saved`. The
    GroupSource saves `prompts.history`."""

    saved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, prompts: Prompts):
        self.prompts, self.calls = prompts, 0

    @property
    def history(self):
        return self.prompts.history

    def next(self, count: int, step: int) -> list[Draw]:
        self.calls += 1
        return self.draws(self.pick(count, step, stream(self.prompts.seed, 3, self.calls)))

    def draws(self, indices: np.ndarray | Sequence[int], **more: Any) -> list[Draw]:
        """Makes Draws of the prompts `indices` and counts them in the history; `more`: further fields of the Draws."""
        indices = np.asarray(indices).tolist()
        return [Draw(i, v, **more) for i, v in zip(indices, self.history.visit(indices), strict=True)]

    def pick(self, count: int, step: int, rng: np.random.Generator) -> np.ndarray:
        """Returns the indices [count] of the prompts to draw. `rng` is the random generator of this call of `next`."""
        raise NotImplementedError

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        self.learn([o for o in outcomes if len(o.scored)], step)

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        """Updates the sampler with the outcomes that have at least one reward."""

    def state(self) -> dict[str, Any]:
        return state_of(self, self.saved)

    def restore(self, state: dict[str, Any]) -> None:
        restore(self, state, self.saved)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, **self.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = int(state["calls"])
        self.restore(state)

    def metrics(self) -> dict[str, float]:
        """The sampler's metrics for metrics.jsonl, with names that begin with "curriculum/"."""
        return {}


_RUN = 1000
"""Number of consecutive rows that are read together; about a row group of a parquet file."""


class Sequential(Saved):
    """Draws the samples in the order of the data, and begins again after the last sample."""

    saved = ("drawn",)

    def __init__(self, prompts: Prompts):
        self.prompts, self.drawn = prompts, 0

    def next(self, count: int, step: int) -> list[Draw]:
        draws = self.upcoming(count, step)
        self.drawn += count
        self.prompts.history.visit([d.index for d in draws])
        return draws

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """Returns the next `count` draws, without counting them as drawn."""
        size, draws, at = self.prompts.size, [], self.drawn
        while len(draws) < count:
            epoch, begin = divmod(at, size)
            places = self.order(epoch)[begin:begin + count - len(draws)]
            draws += [Draw(index, epoch) for index in np.asarray(places).tolist()]
            at += len(places)
        return draws

    def order(self, epoch: int) -> Sequence[int] | np.ndarray:
        """The sample indices of an epoch, in the order in which they are drawn."""
        return range(self.prompts.size)

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        """Does nothing: this sampler does not learn."""

    def metrics(self) -> dict[str, float]:
        return {"curriculum/epoch": self.drawn / self.prompts.size}


class Uniform(Sequential):
    """Draws every sample once per epoch, in an order shuffled by (seed, epoch).

    With data.stream (`prompts.buffer`) rows that are neighbours in the file are drawn close to each other. The only
    state is the number of draws."""

    def __init__(self, prompts: Prompts):
        super().__init__(prompts)
        self._epoch: tuple[int, np.ndarray] = (-1, np.zeros(0))

    def order(self, epoch: int) -> np.ndarray:
        if self._epoch[0] != epoch:
            draw, size, buffer = stream(self.prompts.seed, 2, epoch), self.prompts.size, self.prompts.buffer
            order = draw.permutation(size) if buffer is None else _streamed(draw, size, buffer)
            self._epoch = (epoch, order.astype(np.int32))
        return self._epoch[1]


def _streamed(rng: np.random.Generator, size: int, buffer: int) -> np.ndarray:
    """Returns a permutation of `size` indices in which neighbouring rows stay close. Blocks of _RUN consecutive indices
    are put in random order, then every `buffer` consecutive entries are shuffled among themselves."""
    runs = rng.permutation(-(-size // _RUN))
    places = np.concatenate([np.arange(run * _RUN, min((run + 1) * _RUN, size)) for run in runs.tolist()])
    return places if buffer == 1 else places[np.argsort(np.arange(size) // buffer + rng.random(size))]
