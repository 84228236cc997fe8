"""Joins the columns of a file, such as `vlrl data difficulty` writes, to the rows of the training split by id.

    {"id": "train-7", "pass_at_k": 0.25, "difficulty": 0.75, "reward_mean": 0.31, "answers_scored": 8}

Only samplers read these columns, through Prompts.field; the samples do not change."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlrl.config.paths import searched_in
from vlrl.errors import ConfigError, DataError

log = logging.getLogger(__name__)

_SINGLE = (str, int, float, bool)


class Columns:
    """The columns of the file data.difficulty, which is read on first use. Raises ConfigError if there is no file."""

    def __init__(self, name: str):
        self.path = Path(name)
        if not os.path.isfile(self.path):
            raise ConfigError(f"data.difficulty={name!r}: this file does not exist{searched_in(name)}; `vlrl data "
                              "difficulty` writes it")
        self._read: tuple[dict[str, int], dict[str, dict[int, Any]]] | None = None
        self._reported = False

    def values_for(self, name: str, ids_and_values: Sequence[tuple[str, Any]]) -> list[Any]:
        """The values of a field for all samples: the file's value where it has one, else the sample's own value.

        ids_and_values: (id, own value) of each sample. Warns once about samples without a line and lines without a
        sample. Raises ConfigError when no id matches."""
        places, columns = self._read = self._read or _columns(self.path)
        positions, column = [places.get(id) for id, _ in ids_and_values], columns.get(name, {})
        self._tell(positions, len(places))
        return [value if place is None else column.get(place, value)
                for place, (_, value) in zip(positions, ids_and_values, strict=True)]

    def _tell(self, positions: Sequence[int | None], lines: int) -> None:
        if self._reported:
            return
        self._reported, known = True, {place for place in positions if place is not None}
        lacking = sum(place is None for place in positions)
        if not known:
            raise ConfigError(f"data.difficulty={str(self.path)!r}: none of its {lines:,} ids is the id of a training "
                              "sample. Measure the training samples: vlrl data difficulty CONFIG")
        if lacking or len(known) < lines:
            log.warning("data.difficulty=%s: %d of %d training samples have no line in this file, and %d of its %d "
                        "lines match no sample", self.path, lacking, len(positions), lines - len(known), lines)


def _columns(path: Path) -> tuple[dict[str, int], dict[str, dict[int, Any]]]:
    from vlrl.data import check_suffix, records

    check_suffix(path)
    places: dict[str, int] = {}
    columns: dict[str, dict[int, Any]] = {}
    for place, (where, _, record) in enumerate(records(path)):
        if isinstance(record, DataError):
            raise DataError(f"{where}: {record}")
        id = _id(where, record)
        if places.setdefault(id, place) != place:
            raise DataError(f"{where}: the id {id[:100]!r} occurs in an earlier line; data.difficulty must have one "
                            "line per prompt")
        for name, value in record.items():
            if name != "id" and isinstance(value, _SINGLE):
                columns.setdefault(name, {})[place] = value
    return places, columns


def _id(where: str, record: Mapping[str, Any]) -> str:
    id = record.get("id")
    if isinstance(id, bool) or not isinstance(id, (str, int)):
        raise DataError(f"{where}: a line of data.difficulty needs the 'id' of its sample")
    return str(id)
