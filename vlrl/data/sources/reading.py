"""Reads the rows of a file in any format of FORMATS as canonical rows.

    rows_in(Path("screenspot_v2.json"))         # [("screenspot_v2.json, row 1", {"id": ..., "instruction": ..., ...})]
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.config.registry import Table
from vlrl.data.sources.answer_types import AnswerTrend, TypeTable, settle_type
from vlrl.data.sources.box_forms import boxes_to_pixels
from vlrl.data.sources.fields import RecordSource
from vlrl.data.sources.folders import records
from vlrl.data.sources.misspelt import column_hint
from vlrl.data.sources.unread import forget_shapes, unread_columns
from vlrl.data.turns import are_tools, tools_of
from vlrl.data.values import short, unpacked
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.types import Row

log = logging.getLogger(__name__)

Placed = list[tuple[int, str, Row | DataError]]
"""Rows of a file as (index of the row, location, row or error). All rows of one record have the same location."""
_CONTENT = frozenset(("image", "images", "video", "question"))
"""A line of a table must have at least one of these canonical fields."""


@dataclass(frozen=True)
class Format:
    """An annotation format. A record is one line of a .jsonl file, or one entry of a .json list."""

    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a record has the fields of this format."""
    rows: Callable[[Mapping[str, Any], RecordSource], Sequence[Row]]
    """Converts a record to canonical rows. Raises DataError."""
    together: Callable[[Placed], Placed] | None = None
    """Function that processes all rows of a file, to join the rows of one image or to give each row the labels of all
    rows. None if rows do not depend on each other."""
    several: bool = False
    """Whether one record may give more than one row."""
    refuse: Callable[[Mapping[str, Any]], None] | None = None
    """Function that raises DataError for a record that can be read in two ways; None for most formats.

    Only general formats for questions and answers have this function. They also accept records that a more specific
    format would recognise."""

    @property
    def alone(self) -> bool:
        """Whether each record gives exactly one row, independent of the other records."""
        return not self.several and self.together is None


def _is_canonical(record: Mapping[str, Any]) -> bool:
    boxes = record.get("boxes")
    return "id" in record and (
        (isinstance(boxes, list) and all(isinstance(b, dict) and "box" in b for b in boxes))
        or isinstance(record.get("box"), list)
        or ("instruction" in record and "type" in (record.get("action") or ()))
        or any(name in record for name in ("answer_type", "plan", "responses")))


CANONICAL = Format(_is_canonical, lambda record, source: [dict(record)])
"""The format of vlrl's own rows, tried before all others except MathVista's."""
_TABLES = Table({
    "formats": "vlrl.data.formats.known:FORMATS",
    "rivals": "vlrl.data.formats.known:FIELD_COLUMNS",
    "unanswered": "vlrl.data.formats.qa:missing_answer",
    "said_answer": "vlrl.data.formats.qa:said_answer",
    "shape_of": "vlrl.data.formats.known:shape_of",
    "own_units": "vlrl.data.formats.known:OWN_UNITS",
})


def format_named(name: str) -> Format:
    return CANONICAL if name == "canonical" else formats()[name]


def formats() -> Mapping[str, Format]:
    """Returns all formats by name, the most specific first.

    A record belongs to the first format that recognises it, else it is canonical. With data.format=auto, a file is read
    in the format to which most of its records belong."""
    return _TABLES["formats"]


def rows_in(path: Path, format: str = "auto", root: Path | None = None,
            columns: Mapping[str, str] | None = None,
            roots: tuple[Path, ...] = (), taken: set[str] | None = None,
            shapes: Counter[str] | None = None, cache: str = "", answer_type: str | None = None,
            types: TypeTable | None = None, boxes: str = "auto") -> list[tuple[str, Row | DataError]]:
    """Returns (location, canonical row) for every row of a file. If a record cannot be converted, its row is a
    DataError.

    Repeated ids of other formats are made unique, also with respect to the ids `taken` by earlier files; ids of
    canonical rows are unchanged.

    Media lie under `root` (default: the file's folder) or `roots`; missing image sizes are read from image headers.
    `columns` maps canonical fields to columns of the records. `shapes` counts the recognised formats. Guessed answer
    types are corrected with regard to the entire file (see answer_types). `answer_type` overrides the guesses; `types`
    counts the final types. `boxes` is the format of boxes and points, as in data.boxes.

    Raises DataError if the file cannot be read as a whole, and ConfigError for an unknown format."""
    check_format(format)
    forget_shapes()
    path = Path(path)
    entries = records(path, recognised_format, cache)
    if columns:
        check_columns([f.record for f in entries], columns, path)
        entries = [f._replace(record=rename_columns(f.record, columns)) for f in entries]
    name = format if format != "auto" else format_of([f.record for f in entries])
    placed: Placed = []
    for where, id, record in entries:
        if shapes is not None and not isinstance(record, DataError):
            known = name if format != "auto" else recognised_format(record)
            unknown = known is None and name == "canonical" and "id" not in record
            shapes["no known format" if unknown else _TABLES["shape_of"](record, known or name)] += 1
        if name == "canonical" and path.suffix.lower() in (".csv", ".tsv") and not isinstance(record, DataError):
            record = {"id": id, **record} if record.keys() & _CONTENT else _unknown_columns(record)
        record_rows = rows_as(record, name, RecordSource(id, root or path.parent, roots, boxes), sure=format != "auto")
        placed += [(len(placed) + n, where, row) for n, row in enumerate(record_rows)]
    placed = sorted((format_named(name).together or list)(placed), key=lambda entry: entry[0])
    if name != "canonical":
        unique_ids(path, [row for *_, row in placed], set() if taken is None else taken)
    tendency = AnswerTrend.of(row for *_, row in placed)
    return [(where, settle_type(row, tendency, answer_type, types)) for _, where, row in placed]


def _unknown_columns(record: Mapping[str, Any]) -> DataError:
    hint = column_hint(record)
    return DataError(f"the columns match no known format: {short(', '.join(record))}" + (f"; {hint}" if hint else (
        ". Name them as in docs/data.md, or map them, e.g. --columns image=photo --columns xmin=left_edge")))


def unique_ids(path: Any, rows: Sequence[dict[str, Any] | DataError], taken: set[str]) -> None:
    """Renames ids that are repeated in a file, or already `taken` by rows of another file ("7-2" is the second 7).

    The old id is stored as `original_id`. The ids of the rows are added to `taken`, and a warning about `path` is
    logged."""
    sound = [row for row in rows if not isinstance(row, DataError) and row.get("id") not in (None, "")]
    own, changed, count = {str(row["id"]) for row in sound}, [], dict[str, int]()
    for row in sound:
        id = str(row["id"])
        if id in taken:
            count.setdefault(id, 1)
            while (new := f"{id}-{count[id] + 1}") in taken or new in own:
                count[id] += 1
            row["original_id"], row["id"] = row["id"], new
            changed.append((id, new))
        taken.add(str(row["id"]))
    if changed:
        log.warning("%s: %d of %d rows had the id of another row. They got new ids, e.g. %r instead of %r; the old ids "
                    "are stored as original_id", path, len(changed), len(sound), *reversed(changed[0]))


def format_of(records: Sequence[Mapping[str, Any] | DataError]) -> str:
    """Returns the format of most records of a file; canonical if most of them belong to no format."""
    names = Counter(recognised_format(record) for record in records if not isinstance(record, DataError))
    known = [(name, count) for name, count in names.most_common() if name]
    return known[0][0] if known and known[0][1] >= names[None] else "canonical"


def rows_as(record: Mapping[str, Any] | DataError, name: str, source: RecordSource, sure: bool = False
            ) -> Sequence[Row | DataError]:
    """Converts a record to rows. `name` is the format in which the file is read. If the record belongs to another
    format, it is read in the format `name` with `sure`, and gives a DataError without `sure`."""
    if sure or name == "canonical" or isinstance(record, DataError):
        return _with_hint(canonical_rows(record, name, source), record, source)
    known, own = format_named(name), recognised_format(record)
    plain = {k: v for k, v in record.items() if k != "id"}  # others have ids too
    asks = (own is None or known.refuse) and any(_recognises(known, r) for r in (record, plain))
    if own == name or asks:
        return _with_hint(canonical_rows(record, name, source), record, source)
    if own is None and (empty := _TABLES["unanswered"](record)):
        return [empty]
    of = f"format {own}" if own else f"no known format ({short(', '.join(record))})"
    hint = column_hint(record, source) if own is None else ""
    return [DataError(f"the fields of the row are those of {of}, but most of the file's rows are of format "
                      f"{name}. Fix the row, move it to another file, or read all rows in one format: "
                      f"data.format={name} (--format {name})" + (f"; {hint}" if hint else ""))]


def _with_hint(rows: Sequence[Row | DataError], record: Mapping[str, Any] | DataError, source: RecordSource
               ) -> Sequence[Row | DataError]:
    """The rows of a record; if there is only an error, it also names the columns that are probably misspelt."""
    if len(rows) != 1 or isinstance(record, DataError) or not isinstance(rows[0], DataError):
        return rows
    hint = column_hint(record, source)
    return [DataError(f"{rows[0]}; {hint}")] if hint else rows


def canonical_rows(record: Mapping[str, Any] | DataError, format: str = "auto",
              source: RecordSource | None = None) -> Sequence[Row | DataError]:
    """Converts a record to canonical rows, in the named format, or in the first format that recognises the record if
    `format` is "auto".

    If the record cannot be converted, the only row is a DataError. Raises ConfigError for an unknown format."""
    check_format(format)
    if isinstance(record, DataError):
        return [record]
    name = format if format != "auto" else recognised_format(record) or "canonical"
    chosen, native = format_named(name), name == "canonical"
    if native and "id" not in record and (empty := _TABLES["unanswered"](record)):
        return [empty]
    try:
        beside = {} if native else tools_and_environment(record)
        if chosen.refuse:
            chosen.refuse(record)
        kept, source = {k: v for k, v in record.items() if k not in beside}, source or RecordSource()
        if name in _TABLES["own_units"] and source.boxes not in ("auto", "pixels"):
            raise DataError(f"format {name} defines the form of its boxes: remove data.boxes={source.boxes} (--boxes)")
        rows = chosen.rows(kept, source)
        if rows and not native:
            left = unread_columns(name, kept, rows, lambda less: chosen.rows(less, source))
            rows = [{**row, "meta": {**row.get("meta", {}), **left}} for row in rows] if left else rows
        return [boxes_to_pixels({**row, **beside}, source.boxes) for row in rows] or [DataError(
            f"there is no question: one of the lists ({short([k for k, v in record.items() if v == []])}) is empty")]
    except DataError as error:
        return [error]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:  # unforeseen shapes
        return [DataError(f"the row looks like a record of format {name}, but is malformed: "
                          f"{type(error).__name__}: {str(error)[:200]}")]


def tools_and_environment(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields `tools` and `environment` of a row, from a record in any format; a field is left out if the
    record does not have it.

    Fields with these names whose values have another type (a list of words, a string) are ignored. Raises DataError for
    a tool without a name."""
    tools, settings = unpacked(record.get("tools")), unpacked(record.get("environment"))
    fields = {"tools": tools_of(tools)} if are_tools(tools) else {}
    extra = record.get("extra_info")
    if not isinstance(settings, Mapping) and isinstance(extra, Mapping):  # verl
        settings = {k: extra[k] for k in ("tools_kwargs", "interaction_kwargs") if extra.get(k)}
    return {**fields, **({"environment": dict(settings)} if isinstance(settings, Mapping) and settings else {})}


def recognised_format(record: Mapping[str, Any] | DataError) -> str | None:
    """Returns the name of the first format that recognises a record; None if no format does."""
    if isinstance(record, DataError):
        return None
    if "question_type" not in record and _recognises(CANONICAL, record):  # MathVista's format comes before canonical
        return "canonical"
    return next((name for name, format in formats().items() if _recognises(format, record)), None)


def check_format(format: str) -> None:
    """Raises ConfigError unless `format` is "auto" or the name of a format."""
    if format not in ("auto", "canonical") and format not in formats():
        raise ConfigError(f"data.format={format!r} is not known.{did_you_mean(format, formats())} Known: auto, "
                          f"{', '.join(formats())}.")


def _recognises(format: Format, record: Mapping[str, Any]) -> bool:
    try:
        return format.recognises(record)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return False


def check_columns(records: Sequence[Mapping[str, Any] | DataError], columns: Mapping[str, str], path: Path) -> None:
    """Raises DataError if `columns` maps a field to a column that none of the records has. `path` is the file of the
    records, for the message."""
    there = list(dict.fromkeys(str(name) for record in records if not isinstance(record, DataError) for name in record))
    for name, column in sorted(columns.items()) if records else ():
        if column not in there:
            raise DataError(f"{path}: none of {len(records)} rows has a column {column!r}, which "
                            f"data.columns (--columns) maps to {name!r}.{did_you_mean(column, there)} There are: "
                            f"{short(', '.join(there))}")


def rename_columns(record: dict[str, Any] | DataError, columns: Mapping[str, str]) -> dict[str, Any] | DataError:
    """Returns the record with its columns renamed; `columns` maps canonical fields to columns. For each renamed field,
    removes all other columns from which this field could be read. If the question is renamed, the assistant's answer in
    a removed conversation becomes the field `answer`, unless another column holds the answer."""
    if isinstance(record, DataError) or not columns:
        return record
    given = {name: record[field] for name, field in columns.items() if field in record}
    rivals = {n for name in given for n in _TABLES["rivals"].get(name, (name,))} | set(columns.values())
    kept = {**{k: v for k, v in record.items() if k not in rivals}, **given}
    try:
        return {**_TABLES["said_answer"](record, kept), **kept} if "question" in given else kept
    except DataError as error:
        return error
