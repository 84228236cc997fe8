"""Samples by place, some of them made when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

from vlrl.types import Sample


class SampleSequence(Sequence[Sample]):
    """Samples by place; a subclass says how many there are, and makes the one at a place."""

    parts: Mapping[str, Sequence[Sample]] = MappingProxyType({})
    """Of a mixture, the samples of each task by its label; {} of one task's."""

    def _at(self, place: int) -> Sample:
        raise NotImplementedError

    def where(self, place: int) -> str | None:
        """Returns file and line of the row at a place; None where samples are made by code, which takes long."""
        return None

    def compared(self) -> Sequence[int]:
        """The places of the rows that tell whether a split is still the same; () where samples are made by code."""
        return ()

    def unmade(self, place: int) -> tuple[str, Any] | None:
        """The id of a row and what its file holds of it, before a sample is made of it; None where that is not known.
        Raises DataError for a row that cannot be read."""
        return None

    @property
    def tasks(self) -> Sequence[str]:
        """[N] of a mixture, the label of every place, for which no sample is made; () of one task's."""
        return ()

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        places = range(len(self))[index]
        return [self._at(i) for i in places] if isinstance(places, range) else self._at(places)


def where(samples: Sequence[Sample], place: int) -> str | None:
    """Returns file and line of a row, "" for a sample that is at hand; None where samples are made when asked for."""
    if isinstance(samples, SampleSequence):
        return samples.where(place)
    return "" if isinstance(samples, (list, tuple)) else None
