"""A sampler for a mixture of tasks: each task gets a fixed share of the draws, and a separate sampler for its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlrl.curriculum.base import ForeseeingSampler, MeasuringSampler, ProbingSampler, Prompts, Sampler
from vlrl.curriculum.types import Draw, Outcome
from vlrl.errors import ConfigError


class Shares:
    """The sampler of a mixture, which draws from each task in proportion to the task's weight. Each draw goes to the
    task whose number of draws so far is furthest below its share; on ties to the first of these tasks.

    weights: relative share of each task label (prompts.field("task")). make(prompts): creates the sampler of one task,
    which only sees that task's samples. `upcoming`, `probes` and the measuring methods exist if the samplers of the
    tasks, which are of one class, have them."""

    def __init__(self, prompts: Prompts, weights: Mapping[str, float], make: Callable[[Prompts], Sampler]):
        tasks = prompts.categories("task")
        self.labels = tuple(weights)
        at = [tasks.names.index(label) for label in self.labels]
        self.shares = np.array([*weights.values()], dtype=np.float64) / sum(weights.values())
        self.members = [tasks.members[k] for k in at]
        self._of = np.argsort(np.array(at, dtype=np.int32)).astype(np.int32)[tasks.indices]
        self.prompts = [prompts.subset(label, places, float(share)) for label, places, share in
                        zip(self.labels, self.members, self.shares, strict=True)]
        self.samplers = [_build(label, make, part) for label, part in zip(self.labels, self.prompts, strict=True)]
        self.drawn = np.zeros(len(self.labels), dtype=np.int64)
        first: Any = self.samplers[0]
        if isinstance(first, ForeseeingSampler):  # one class makes all samplers, so what one can, all can
            self.upcoming = self._upcoming
        if isinstance(first, ProbingSampler):
            self.probes = self._probes
        if isinstance(first, MeasuringSampler):
            self.measures, self.missing, self.measured = first.measures, self._missing, self._measured

    def next(self, count: int, step: int) -> list[Draw]:
        turns = self._turns(count)
        self.drawn += np.bincount(turns, minlength=len(self.labels))
        return self._dealt(turns, lambda sampler, wanted: sampler.next(wanted, step))

    def _upcoming(self, count: int, step: int) -> list[Draw]:
        return self._dealt(self._turns(count), lambda sampler, wanted: sampler.upcoming(wanted, step))

    def _turns(self, count: int) -> np.ndarray:
        """[count] for each of the next `count` draws, the index of the task that it goes to."""
        drawn, turns = self.drawn.astype(np.float64), np.zeros(count, dtype=np.int64)
        for i in range(count):
            turns[i] = np.argmax(self.shares * (drawn.sum() + 1) - drawn)
            drawn[turns[i]] += 1
        return turns

    def _dealt(self, turns: np.ndarray, ask: Callable[[Any, int], list[Draw]]) -> list[Draw]:
        iterators = [iter(ask(sampler, int(n)) if n else ()) for sampler, n in
                     zip(self.samplers, np.bincount(turns, minlength=len(self.labels)), strict=True)]
        return [self._whole(k, draw) for k in turns.tolist() for draw in [next(iterators[k], None)] if draw is not None]

    def _whole(self, k: int, draw: Draw) -> Draw:
        knobs = tuple((f"{self.labels[k]}/{name}", value) for name, value in draw.knobs)
        return replace(draw, index=int(self.members[k][draw.index]), knobs=knobs)

    def _part(self, k: int, number: int, draw: Draw) -> Draw:
        knobs = tuple((name.removeprefix(f"{self.labels[k]}/"), value) for name, value in draw.knobs)
        return replace(draw, index=number, knobs=knobs)

    def _own(self, indices: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Groups indices of the full split by task. Returns one tuple per task that occurs: (task index, positions in
        `indices` of this task's entries, their indices in the task's own samples)."""
        of = self._of[indices]
        which = [np.flatnonzero(of == k) for k in range(len(self.labels))]
        return [(k, own, np.searchsorted(self.members[k], indices[own])) for k, own in enumerate(which) if len(own)]

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        for k, which, numbers in self._own(np.array([o.draw.index for o in outcomes], dtype=np.int64)):
            mine = [replace(outcomes[i], draw=self._part(k, n, outcomes[i].draw))
                    for i, n in zip(which.tolist(), numbers.tolist(), strict=True)]
            self.prompts[k].history.note(mine, step)
            self.samplers[k].observe(mine, step)

    def _probes(self, step: int) -> list[Draw]:
        samplers: list[Any] = self.samplers
        return [self._whole(k, draw) for k, sampler in enumerate(samplers) for draw in sampler.probes(step)]

    def _missing(self) -> np.ndarray:
        samplers: list[Any] = self.samplers
        return np.concatenate([own[s.missing()] for own, s in zip(self.members, samplers, strict=True)])

    def _measured(self, indices: np.ndarray, values: np.ndarray) -> None:
        samplers: list[Any] = self.samplers
        for k, which, numbers in self._own(np.asarray(indices)):
            samplers[k].measured(numbers, values[which])

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": {label: int(n) for label, n in zip(self.labels, self.drawn, strict=True)},
                "samplers": {label: s.state_dict() for label, s in zip(self.labels, self.samplers, strict=True)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = np.array([int(state["drawn"][label]) for label in self.labels], dtype=np.int64)
        for label, sampler in zip(self.labels, self.samplers, strict=True):
            sampler.load_state_dict(state["samplers"][label])

    def metrics(self) -> dict[str, float]:
        """The metrics of every task's sampler, as `curriculum/<label>/...`."""
        return {f"curriculum/{label}/{name.removeprefix('curriculum/')}": value
                for label, sampler in zip(self.labels, self.samplers, strict=True)
                for name, value in sampler.metrics().items()}


def _build(label: str, make: Callable[[Prompts], Sampler], prompts: Prompts) -> Sampler:
    try:
        return make(prompts)
    except ConfigError as error:
        raise ConfigError(f"task '{label}' of the mixture: {error}") from None
