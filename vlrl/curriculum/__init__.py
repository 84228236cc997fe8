"""Which prompts to train on: samplers with one interface, and group filters apart from them.

A sampler decides from its own state and what it observed; every process holds the same one and sees the same groups,
so nothing needs to be sent. `next(n)` gives draws, `observe(groups)` tells how they went. A sampler that can tell what
it will draw has `upcoming(n)` too; its prompts are made ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vlrl.plugins import resolve


@dataclass(frozen=True)
class Draw:
    """One visit to one sample."""

    index: int
    """Place in the training split."""
    visit: int
    """How often the sample was drawn before."""


@dataclass(frozen=True)
class Outcome:
    """What became of a draw: the rewards of its group, None = unscorable; empty = the prompt was rejected."""

    draw: Draw
    rewards: tuple[float | None, ...]


class Sampler(Protocol):
    def next(self, count: int) -> list[Draw]: ...

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


@runtime_checkable
class Foreseeing(Protocol):
    """A sampler that knows its next draws."""

    def upcoming(self, count: int) -> list[Draw]:
        """What `next(count)` would give, if nothing observed until then changes it; draws nothing."""
        ...


class Sequential:
    """In the order of the data, over and over."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed, self.drawn = size, seed, 0

    def next(self, count: int) -> list[Draw]:
        draws = self.upcoming(count)
        self.drawn += count
        return draws

    def upcoming(self, count: int) -> list[Draw]:
        """The next `count` draws, without drawing them."""
        return [Draw(self.order(i // self.size)[i % self.size], i // self.size)
                for i in range(self.drawn, self.drawn + count)]

    def order(self, epoch: int) -> Sequence[int]:
        """The sample indices of an epoch."""
        return range(self.size)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing is learned."""

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        return {"curriculum/epoch": self.drawn / self.size}


class Uniform(Sequential):
    """Every sample once per epoch, in an order of (seed, epoch)."""

    def __init__(self, size: int, seed: int):
        super().__init__(size, seed)
        self._epoch: tuple[int, Sequence[int]] = (-1, ())

    def order(self, epoch: int) -> Sequence[int]:
        if self._epoch[0] != epoch:
            stream = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, 2, epoch])))
            self._epoch = (epoch, stream.permutation(self.size).tolist())
        return self._epoch[1]


SAMPLERS = {"uniform": Uniform, "sequential": Sequential}


def make(name: str, size: int, seed: int) -> Sampler:
    """The sampler of `curriculum.name` over `size` training samples."""
    return resolve("curriculum.name", name, SAMPLERS)(size, seed)
