"""Sequences of samples, some of which are made on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

from vlrl.types import Sample


class SampleSequence(Sequence[Sample]):
    """Samples by index; a subclass defines `__len__` and `_at`."""

    parts: Mapping[str, Sequence[Sample]] = MappingProxyType({})
    """The samples of each task of a mixture by label; {} for a single task."""

    def _at(self, place: int) -> Sample:
        raise NotImplementedError

    def where(self, place: int) -> str | None:
        """File and line of the row at an index; None if samples are made by code, which can be slow."""
        return None

    def fingerprint_rows(self) -> Sequence[int]:
        """Indices of the rows that identify the split when a run is resumed; () if samples are made by code."""
        return ()

    def raw_record(self, place: int) -> tuple[str, Any] | None:
        """Id and raw record of a row, before a sample is made of it; None if unknown. Raises DataError for an
        unreadable row."""
        return None

    @property
    def tasks(self) -> Sequence[str]:
        """[N] task labels of a mixture, known without making samples; () for a single task."""
        return ()

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        places = range(len(self))[index]
        return [self._at(i) for i in places] if isinstance(places, range) else self._at(places)


def where(samples: Sequence[Sample], place: int) -> str | None:
    """File and line of a row, "" for a sample in memory; None if samples are made on demand."""
    if isinstance(samples, SampleSequence):
        return samples.where(place)
    return "" if isinstance(samples, (list, tuple)) else None
