"""Names the columns of an unreadable record that are probably misspelt or have an unknown name.

    column_hint({"images": ["a.png"], "problem": "<image>Find the mug.", "answr": "[1, 2, 30, 40]"})
    # "the column 'answr' may be the field 'answer': rename it, or set data.columns={answer: answr} (...)" """

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from vlrl.config.registry import Table
from vlrl.data.row_media import column_setting, media_field, media_names
from vlrl.data.sources.fields import CORNERS, IMAGE, SIDES, VIDEO, RecordSource
from vlrl.errors import DataError

_TABLES = Table({"recognised_format": "vlrl.data.sources.reading:recognised_format",
                 "canonical_rows": "vlrl.data.sources.reading:canonical_rows",
                 "rename_columns": "vlrl.data.sources.reading:rename_columns",
                 "field_columns": "vlrl.data.formats.known:FIELD_COLUMNS"})
_ALIKE = 0.75
"""Similarity of names, by difflib, from which a column is taken for a misspelt name of a field."""


def column_hint(record: Mapping[str, Any], source: RecordSource | None = None) -> str:
    """Returns which columns of a record to rename so that one of the known formats can read it, with the settings that
    do so; "" if there are no such columns."""
    for columns in _renamings(record):
        renamed = _TABLES["rename_columns"]({**record}, columns)
        if _is_readable(renamed, source or RecordSource()):
            said = " and ".join(f"the column {column!r} may be the field {field!r}" for field, column in
                                columns.items())
            return f"{said}: rename {'it' if len(columns) == 1 else 'them'}, or set {column_setting(columns)}"
    return ""


def _is_readable(record: Any, source: RecordSource) -> bool:
    if isinstance(record, DataError) or _TABLES["recognised_format"](record) is None:
        return False
    return not any(isinstance(row, DataError) for row in _TABLES["canonical_rows"](record, "auto", source))


def _renamings(record: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields {field: column} for columns with unknown names: each of them alone, then all together."""
    tables = _TABLES["field_columns"]
    known = dict.fromkeys([*tables, *(name for names in (*tables.values(), IMAGE, VIDEO, *CORNERS, *SIDES)
                                      for name in names)])
    absent = tuple(name for name in known if name not in record)
    fields = {str(column): _fields(str(column), value, absent)
              for column, value in record.items() if column not in known and value not in (None, "", [])}
    yield from ({field: column} for column, names in fields.items() for field in names)
    together = {names[0]: column for column, names in fields.items() if names}
    if len(together) > 1:
        yield together


def _fields(column: str, value: Any, absent: tuple[str, ...]) -> list[str]:
    """The fields that a column may be: those with a similar name, and the field of a picture or video that it names."""
    near = _similar(column, absent)
    return near or ([media_field(value)] if any(media_names(column, value)) else [])


@lru_cache(1000)
def _similar(column: str, names: tuple[str, ...]) -> list[str]:
    return get_close_matches(column, names, n=2, cutoff=_ALIKE)
