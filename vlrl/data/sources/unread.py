"""Finds columns of a record that its format does not use. They are stored in the row's `meta`, where a check reports
them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vlrl.data.values import short
from vlrl.errors import DataError
from vlrl.types import Record

Make = Callable[[Record], Sequence[Mapping[str, Any]]]
_KEPT: dict[tuple[Any, ...], tuple[str, ...]] = {}
"""Maps (format, columns) to the unused columns, so that they are determined only once for all records with the same
columns."""
_USED: set[tuple[str, str]] = set()
"""Pairs (format, column) of columns that are used in some record."""
_NOTHING = ("none", "null", "nan", "n/a", "no input text")
_MOST_SHAPES = 256
_BOOKKEEPING = re.compile(
    r"(?:^|[_.])(?:ids?|idx|index|u?uid|pid|qid|source|dataset|split|urls?|link|license|date\w*|time\w*|version|hash|"
    r"sha\d*|md5|types?|kind|format|lang\w*|paths?|file\w*|size|width|height|w|h|area|iscrowd|segmentation|mask|author|"
    r"users?|worker\w*|annotator\w*|score|rating|grade|level|tokens?|len\w*|count|num\w*|episode\w*|step|status|"
    r"embedding\w*|logits?|rela_box|__key__)$|^(?:coco|flickr)_", re.IGNORECASE)


def is_bookkeeping(name: str, value: Any) -> bool:
    """Whether a column is not worth reporting as unused: its value is a number or flag, or its name means an id, a
    path, a date or the like."""
    return isinstance(value, (int, float)) or bool(_BOOKKEEPING.search(name))


def forget_shapes() -> None:
    """Clears the caches before the next file, because a column that is unused in one file may be used in the next."""
    _KEPT.clear()
    _USED.clear()


def unread_columns(format: str, record: Record, rows: Sequence[Mapping[str, Any]], make: Make) -> dict[str, Any]:
    """Returns {column: value} for the columns of a record that its `rows` neither contain nor depend on.

    `make` converts a record to rows; rows do not depend on a column if they are the same without it. A column inside a
    list of objects is named like `annotations.caption`, with the value of the first object. Columns whose value the
    rows contain anyway (an answer that occurs twice) are left out."""
    key = (format, *_shape(record))
    if not rows:
        return {}
    if key not in _KEPT:
        if len(_KEPT) >= _MOST_SHAPES:
            forget_shapes()
        known = {*rows[0], *(rows[0].get("meta") or {})}
        names = [k for k, v in _filled_columns(record).items() if k not in known and not is_bookkeeping(k, v)]
        _KEPT[key] = _without_effect(record, names, rows, make)
        _USED.update((format, name) for name in names if name not in _KEPT[key])
    names = [name for name in _KEPT[key] if (format, name) not in _USED]
    flat, said = (_filled_columns(record), " ".join(_in_words(_bare(rows)).split())) if names else ({}, "")
    return {name: _shortened(flat[name]) for name in names if name in flat and _in_words(flat[name]) not in said}


def _shape(record: Record) -> Iterator[Any]:
    """Yields the names of the columns that have a value; for a list of objects, (column, keys of the first object)."""
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield (name, *value[0])
        elif value is not None and value != "" and value != []:
            yield name


def _without_effect(record: Record, names: Sequence[str], rows: Sequence[Record], make: Make) -> tuple[str, ...]:
    gone: list[str] = []
    for name in names:
        less = _without_column(record, [*gone, name])
        try:
            if _bare(make(less)) == _bare(rows):
                gone.append(name)
        except (DataError, LookupError, TypeError, ValueError, AttributeError, RecursionError):  # it is needed
            continue
    return tuple(gone)


def _filled_columns(record: Record) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if value in (None, "", [], {}) or (isinstance(value, str) and value.strip().lower() in _NOTHING):
            continue
        first = value[0] if isinstance(value, list) and value and isinstance(value[0], Mapping) else None
        flat |= {f"{name}.{k}": v for k, v in first.items() if isinstance(v, str) and v} if first else {name: value}
    return flat


def _without_column(record: Record, names: Sequence[str]) -> Record:
    outer, inner = {n for n in names if "." not in n}, [n.partition(".")[::2] for n in names if "." in n]
    less = {k: v for k, v in record.items() if k not in outer}
    for name, field in inner:
        less[name] = [{k: v for k, v in entry.items() if k != field} if isinstance(entry, Mapping) else entry
                      for entry in less[name]]
    return less


def _bare(rows: Sequence[Record]) -> list[Any]:
    return [{k: v for k, v in row.items() if k != "meta"} if isinstance(row, Mapping) else str(row) for row in rows]


def _in_words(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return " ".join(text.split()).replace("\\n", " ")


def _shortened(value: Any) -> Any:
    try:
        return value if len(json.dumps(value, allow_nan=False)) < 1 << 12 else short(value)
    except (TypeError, ValueError, RecursionError):
        return short(value)
