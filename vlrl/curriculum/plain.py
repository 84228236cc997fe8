"""Samplers that do not learn: `sequential` (the order of the data) and `uniform` (shuffled)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlrl.algo.state import Saved
from vlrl.curriculum.base import Prompts, stream
from vlrl.curriculum.types import Draw, Outcome

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
        """Returns the next `count` draws without drawing them."""
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


def _streamed(draw: np.random.Generator, size: int, buffer: int) -> np.ndarray:
    """A permutation of `size` indices, shuffled so that neighbouring rows stay close. Blocks of _RUN consecutive
    indices are put in random order, then each `buffer` consecutive entries are shuffled again."""
    runs = draw.permutation(-(-size // _RUN))
    places = np.concatenate([np.arange(run * _RUN, min((run + 1) * _RUN, size)) for run in runs.tolist()])
    return places if buffer == 1 else places[np.argsort(np.arange(size) // buffer + draw.random(size))]
