"""The interface of samplers, and what they know about the training split.

A sampler runs on the main process, which sends the draws to all processes. `next(count, step)` returns draws, and
`observe(outcomes, step)` receives their results. Optional methods: `upcoming` returns the next draws in advance, so
that their prompts can be encoded early. `probes` returns prompts that are answered but not trained on. `missing` and
`measured` have the policy measure every prompt."""

from __future__ import annotations

import copy
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vlrl.algo.effect import idle
from vlrl.config.schema import RolloutSettings
from vlrl.curriculum.columns import Columns
from vlrl.curriculum.history import History
from vlrl.curriculum.types import Draw, Outcome
from vlrl.data.samples import SampleSequence, readable
from vlrl.rewards.boxes import is_number
from vlrl.types import Sample


def stream(*key: int) -> np.random.Generator:
    """Creates a random generator from a key of several integers. Equal keys give the same numbers on every machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([abs(k) for k in key])))


AS_UNIFORM = ": it draws as uniform does"

_LARGEST = 1e30
"""Field values with a larger absolute value are ignored, because ranges are computed in float32."""
_LONGEST = 200
"""Maximum length of a category's name in characters."""
_BAD = Sample(id="")
"""A sample without fields, in place of a row that cannot be read. The read error is raised when the row is drawn."""


@dataclass(frozen=True, eq=False)
class Categories:
    """A partition of the prompts into named categories."""

    names: tuple[str, ...]
    indices: np.ndarray
    """[N] int32: for each prompt, the index of its category in `names`."""

    @cached_property
    def members(self) -> tuple[np.ndarray, ...]:
        """The indices of each category's prompts, ascending."""
        order = np.argsort(self.indices, kind="stable").astype(np.int32)
        return tuple(np.split(order, np.cumsum(np.bincount(self.indices, minlength=len(self.names)))[:-1]))


class Prompts:
    """The training split as samplers see it: its size, the fields of its rows, and the results so far. `read(name)`
    returns the values of a field for all rows, None where a row lacks the field."""

    def __init__(self, size: int, seed: int, read: Callable[[str], Sequence[Any]] | None = None,
                 rollout: RolloutSettings | None = None, knobs: Mapping[str, tuple[float, float]] | None = None,
                 stage_fields: Collection[str] = ()):
        self.size, self.seed = size, seed
        rollout = rollout or RolloutSettings()
        self.per_step, self.group_size = rollout.prompts_per_step, rollout.group_size
        self.buffer: int | None = None
        """data.shuffle_buffer if data.stream is set, else None."""
        self.knobs = dict(knobs or {})
        """For a task that generates samples: the range (lowest, highest) of each knob (difficulty setting)."""
        self.stage_fields = tuple(stage_fields)
        """Fields of samples that stages of the curriculum may override."""
        self._read = read or (lambda name: [None] * size)
        self._fields: dict[str, Sequence[Any]] = {}
        self.history = History(size)
        """How often each prompt was drawn, and its last result; updated by the GroupSource."""

    @classmethod
    def of(cls, samples: Sequence[Sample], seed: int, columns: str = "", rollout: RolloutSettings | None = None,
           knobs: Mapping[str, tuple[float, float]] | None = None, stage_fields: Collection[str] = ()) -> Prompts:
        """Creates the Prompts of a training split. Rows are read when a sampler first asks for a field. `columns` is a
        file (data.difficulty) whose columns take precedence over the rows' own fields, "" = none. `knobs` and
        `stage_fields` are stored in the attributes of these names."""
        beside = Columns(columns) if columns else None

        def read(name: str) -> Sequence[Any]:
            if name == "task" and isinstance(samples, SampleSequence) and samples.tasks:
                return samples.tasks
            drawn = (readable(samples, i) or _BAD for i in range(len(samples)))
            if beside is None:
                return [_field(sample, name) for sample in drawn]
            return beside.values_for(name, [(sample.id, _field(sample, name)) for sample in drawn])

        return cls(len(samples), seed, read, rollout, knobs, stage_fields)

    def subset(self, name: str, indices: np.ndarray, share: float) -> Prompts:
        """The subset of prompts with these `indices` [n], renumbered from 0. The random streams of the subset are
        derived from `name`, a task label. `share`: the subset's share of each step's draws."""
        seed = zlib.crc32(f"{self.seed}/{name}".encode())
        part = copy.copy(self)
        part.size, part.seed, part._fields, part.history = len(indices), seed, {}, self.history.subset(indices)
        part.per_step = max(1, round(share * self.per_step))
        part.knobs = {k.removeprefix(f"{name}/"): v for k, v in self.knobs.items() if k.startswith(f"{name}/")}
        part._read = lambda name: _taken(self.field(name), indices)
        return part

    def field(self, name: str) -> Sequence[Any]:
        """The values of a field for all rows; None where a row lacks the field. The field "task" is the label of a
        row's task in a mixture."""
        if name not in self._fields:
            self._fields[name] = self._read(name)
        return self._fields[name]

    def numbers(self, name: str) -> np.ndarray:
        """The values of a field as [N] float32; nan where a row lacks the field or the value is not a number."""
        values = self.field(name)
        if isinstance(values, np.ndarray) and values.dtype.kind in "fiu":
            return values.astype(np.float32)
        return np.array([v if is_number(v) and abs(v) <= _LARGEST else math.nan for v in values], dtype=np.float32)

    def categories(self, name: str, bins: int = 5) -> Categories:
        """The prompts grouped by the values of a field; rows without the field form the category "none". Numbers with
        more than `bins` distinct values are grouped into `bins` ranges of equal width."""
        values = self.field(name)
        numbers = self.numbers(name)
        known = numbers[~np.isnan(numbers)]
        if len(known) and len(np.unique(known)) > bins:
            return _ranges(numbers, bins)
        texts = ["none" if v is None or v != v else str(v)[:_LONGEST] for v in values]
        names = sorted({*texts})
        place = {name: i for i, name in enumerate(names)}
        return Categories(tuple(names), np.array([place[text] for text in texts], dtype=np.int32))


def _taken(values: Sequence[Any], indices: np.ndarray) -> Sequence[Any]:
    every: Any = values
    return every[indices] if isinstance(values, np.ndarray) else [values[i] for i in indices.tolist()]


def _field(sample: Sample, name: str) -> Any:
    return sample.task if name == "task" else sample.row.get(name)


def _ranges(numbers: np.ndarray, bins: int) -> Categories:
    edges = np.linspace(np.nanmin(numbers), np.nanmax(numbers), bins + 1)
    of = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, bins - 1)
    lacking = np.isnan(numbers)
    names = [f"{low:.3g}-{high:.3g}" for low, high in itertools.pairwise(edges)]
    of = np.where(lacking, bins, of).astype(np.int32)
    return Categories((*names, *(["none"] if lacking.any() else [])), of)


class Sampler(Protocol):
    """Decides which prompts are answered. Created with (prompts, **options); the options are `curriculum.*`."""

    def next(self, count: int, step: int) -> list[Draw]:
        """Returns `count` draws. Called again in the same step to replace groups that the filters dropped."""
        ...

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        """Receives the outcomes of all draws, trained on or not; `prompts.history` is already updated."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


@runtime_checkable
class ForeseeingSampler(Protocol):
    """A sampler that knows its next draws in advance."""

    def upcoming(self, count: int, step: int) -> list[Draw]:
        """Returns what `next(count, step)` would return if no further outcome were observed. The prompts do not count
        as drawn."""
        ...


@runtime_checkable
class ProbingSampler(Protocol):
    """A sampler that needs results of some prompts before it can draw."""

    def probes(self, step: int) -> list[Draw]:
        """Returns the prompts that must be answered and observed before the next draws of this step. Their completions
        are not trained on. Returns [] if no prompts are needed."""
        ...


@runtime_checkable
class MeasuringSampler(Protocol):
    """A sampler that needs a value of every prompt, which the policy measures before the first draw."""

    measures: str
    """Name of the measurement in GroupSource.measures, e.g. "angle"."""

    def missing(self) -> np.ndarray:
        """Indices [n] of the prompts whose value is unknown. A resumed sampler knows the values that were measured
        before the interruption."""
        ...

    def measured(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Receives the measured values [n] float32 of the prompts `indices`; nan where a prompt cannot be used."""
        ...


def as_uniform(**neutral: float) -> Callable[[Any], Any]:
    """Creates a class decorator which declares that a sampler with the given option value, such as `share=0`, draws
    exactly as `uniform` does."""
    (option, value), = neutral.items()
    return idle(f"curriculum.{option}={value}{AS_UNIFORM}", **neutral)
