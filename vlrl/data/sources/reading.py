"""Rows of a file in any format of FORMATS, made canonical.

    rows_in(Path("screenspot_v2.json"))         # [("screenspot_v2.json, row 1", {"id": ..., "instruction": ..., ...})]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.config.registry import Table
from vlrl.data.sources.answer_types import AnswerTrend, TypeTable, settle_type
from vlrl.data.sources.box_forms import boxes_to_pixels
from vlrl.data.sources.fields import RecordSource
from vlrl.data.sources.records import records
from vlrl.data.sources.unread import forget_shapes, unread_columns
from vlrl.data.sources.whole import unique_ids
from vlrl.data.turns import are_tools, tools_of
from vlrl.data.values import short, unpacked
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.types import Row

Placed = list[tuple[int, str, Row | DataError]]
"""Rows of a file: number, place, and the row or why there is none. Rows of one record have the same number."""
_CONTENT = frozenset(("image", "images", "video", "question"))
"""Canonical fields of which a line of a table has at least one."""


@dataclass(frozen=True)
class Format:
    """A way in which annotations are written. A record is one line of a .jsonl file, or one entry of a .json list."""

    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a record has the fields of this format."""
    rows: Callable[[Mapping[str, Any], RecordSource], Sequence[Row]]
    """The canonical rows that a record stands for. Raises DataError."""
    together: Callable[[Placed], Placed] | None = None
    """Looks at all rows of a file: joins those of one image, tells each what all ask for."""
    several: bool = False
    """Whether one record may stand for several rows."""
    refuse: Callable[[Mapping[str, Any]], None] | None = None
    """Of a format that reads whatever asks and answers, also where a more particular one would know the words of an
    answer: raises DataError where a record can be read in two ways."""

    @property
    def alone(self) -> bool:
        """Whether every record is one row, whatever the others say."""
        return not self.several and self.together is None


def _is_canonical(record: Mapping[str, Any]) -> bool:
    """Returns whether a record says what to find in the canonical words, whatever else it has."""
    boxes = record.get("boxes")
    return "id" in record and (
        (isinstance(boxes, list) and all(isinstance(b, dict) and "box" in b for b in boxes))
        or isinstance(record.get("box"), list)
        or ("instruction" in record and "type" in (record.get("action") or ()))
        or any(name in record for name in ("answer_type", "plan", "responses")))


CANONICAL = Format(_is_canonical, lambda record, source: [dict(record)])
"""The format of vlrl's own rows, for which no other is looked at."""
_TABLES = Table({
    "formats": "vlrl.data.formats.known:FORMATS",
    "rivals": "vlrl.data.formats.known:RIVALS",
    "unanswered": "vlrl.data.formats.qa:missing_answer",
    "shape_of": "vlrl.data.formats.shapes:shape_of",
})


def format_named(name: str) -> Format:
    return CANONICAL if name == "canonical" else formats()[name]


def formats() -> Mapping[str, Format]:
    """Returns all formats by name, the most particular first: a record is of the first that recognises it, and
    canonical if none does; `auto` takes the one that most records of a file are of.
    """
    return _TABLES["formats"]


def rows_in(path: Path, format: str = "auto", root: Path | None = None,
            columns: Mapping[str, str] | None = None,
            roots: tuple[Path, ...] = (), taken: set[str] | None = None,
            shapes: Counter[str] | None = None, cache: str = "", answer_type: str | None = None,
            types: TypeTable | None = None, boxes: str = "auto") -> list[tuple[str, Row | DataError]]:
    """(place, canonical row) of every row of a file; what is no row of a known format gives its DataError instead.

    Ids that other people's records repeat become unique, among those `taken` by files before too; canonical rows keep
    theirs.

    Media lie under `root` (default: the file's folder) or `roots`; sizes that a format leaves out are read from their
    headers. `columns` says which field of the records stands for a canonical one. `shapes` counts what each record is
    recognised as. Types of answers that no field says are settled over the file, see answer_types; `answer_type` comes
    before, and `types` counts them. `boxes` says what boxes and points are, as data.boxes.

    Raises DataError when the file as a whole cannot be read, ConfigError for an unknown format.
    """
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
            shapes[_TABLES["shape_of"](record, name if format != "auto" else recognised_format(record) or name)] += 1
        if name == "canonical" and path.suffix.lower() in (".csv", ".tsv") and not isinstance(record, DataError):
            record = {"id": id, **record} if record.keys() & _CONTENT else _unknown(record)
        record_rows = rows_as(record, name, RecordSource(id, root or path.parent, roots, boxes), sure=format != "auto")
        placed += [(len(placed) + n, where, row) for n, row in enumerate(record_rows)]
    placed = sorted((format_named(name).together or list)(placed), key=lambda entry: entry[0])
    if name != "canonical":
        unique_ids(path, [row for *_, row in placed], set() if taken is None else taken)
    tendency = AnswerTrend.of(row for *_, row in placed)
    return [(where, settle_type(row, tendency, answer_type, types)) for _, where, row in placed]


def format_of(records: Sequence[Mapping[str, Any] | DataError]) -> str:
    """Returns the format of a file: the one that most of its records are recognised as; canonical where most are of
    none.
    """
    names = Counter(recognised_format(record) for record in records if not isinstance(record, DataError))
    known = [(name, count) for name, count in names.most_common() if name]
    return known[0][0] if known and known[0][1] >= names[None] else "canonical"


def rows_as(record: Mapping[str, Any] | DataError, name: str, source: RecordSource, sure: bool = False
            ) -> Sequence[Row | DataError]:
    """Returns the rows of a record of a file of format `name`; unless that is `sure`, a record of another format has
    none.
    """
    if sure or name == "canonical" or isinstance(record, DataError):
        return canonical_rows(record, name, source)
    known, own = format_named(name), recognised_format(record)
    plain = {k: v for k, v in record.items() if k != "id"}  # others have ids too
    asks = (own is None or known.refuse) and any(_recognises(known, r) for r in (record, plain))
    if own == name or asks:
        return canonical_rows(record, name, source)
    if own is None and (empty := _unanswered(record)):
        return [empty]
    of = f"format {own}" if own else f"no known format ({short(', '.join(record))})"  # an empty cell is no field
    return [DataError(f"its fields are those of {of}, and most of the file's rows are of format {name}. Mend it, move "
                      f"it to another file, or have all rows read in one way: data.format={name} (--format {name})")]


def canonical_rows(record: Mapping[str, Any] | DataError, format: str = "auto",
              source: RecordSource | None = None) -> Sequence[Row | DataError]:
    """Returns the rows of a record in the named format, or in the first that recognises it; or why it has none.

    Raises ConfigError for an unknown format.
    """
    check_format(format)
    if isinstance(record, DataError):
        return [record]
    name = format if format != "auto" else recognised_format(record) or "canonical"
    chosen, native = format_named(name), name == "canonical"
    if native and "id" not in record and (empty := _unanswered(record)):
        return [empty]
    try:
        beside = {} if native else tools_and_environment(record)
        if chosen.refuse:
            chosen.refuse(record)
        kept, source = {k: v for k, v in record.items() if k not in beside}, source or RecordSource()
        rows = chosen.rows(kept, source)
        if rows and not native:
            left = unread_columns(name, kept, rows, lambda less: chosen.rows(less, source))
            rows = [{**row, "meta": {**row.get("meta", {}), **left}} for row in rows] if left else rows
        return [boxes_to_pixels({**row, **beside}, source.boxes) for row in rows] or [DataError(
            f"it holds nothing to ask: one of its lists ({short([k for k, v in record.items() if v == []])}) is empty")]
    except DataError as error:
        return [error]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:  # shapes nobody thought of
        return [DataError(f"it looks like a record of format {name}, but is not shaped like one: "
                          f"{type(error).__name__}: {str(error)[:200]}")]


def tools_and_environment(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `tools` and the `environment` of a record in any format. Raises DataError for a tool without a name.

    Other things under these names (a list of words, a text) are none.
    """
    tools, settings = unpacked(record.get("tools")), unpacked(record.get("environment"))
    fields = {"tools": tools_of(tools)} if are_tools(tools) else {}
    extra = record.get("extra_info")
    if not isinstance(settings, Mapping) and isinstance(extra, Mapping):  # verl
        settings = {k: extra[k] for k in ("tools_kwargs", "interaction_kwargs") if extra.get(k)}
    return {**fields, **({"environment": dict(settings)} if isinstance(settings, Mapping) and settings else {})}


def recognised_format(record: Mapping[str, Any] | DataError) -> str | None:
    """Returns the name of the first format that recognises a record."""
    if isinstance(record, DataError):
        return None
    if "question_type" not in record and _recognises(CANONICAL, record):  # by which one format comes before
        return "canonical"
    return next((name for name, format in formats().items() if _recognises(format, record)), None)


def check_format(format: str) -> None:
    """Raises ConfigError unless this is `auto` or the name of a format."""
    if format not in ("auto", "canonical") and format not in formats():
        raise ConfigError(f"data.format={format!r} is not known.{did_you_mean(format, formats())} Known: auto, "
                          f"{', '.join(formats())}.")


def _unknown(record: Mapping[str, Any]) -> DataError:
    return DataError(f"its columns are those of no known format: {short(', '.join(record))}. Name them as docs/data.md "
                     "does, or say which stands for what, e.g. --columns image=photo --columns xmin=left_edge")


def _unanswered(record: Mapping[str, Any]) -> DataError | None:
    """Returns why a record of no known format that asks has no row: its answer is empty."""
    return _TABLES["unanswered"](record)


def _recognises(format: Format, record: Mapping[str, Any]) -> bool:
    try:
        return format.recognises(record)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return False


def check_columns(records: Sequence[Mapping[str, Any] | DataError], columns: Mapping[str, str], path: Path) -> None:
    """Raises DataError for a column that `columns` names and none of the records has."""
    there = list(dict.fromkeys(str(name) for record in records if not isinstance(record, DataError) for name in record))
    for name, column in sorted(columns.items()) if records else ():
        if column not in there:
            raise DataError(f"{path}: none of {len(records)} rows looked at has a column {column!r}, which "
                            f"data.columns (--columns) names for {name!r}.{did_you_mean(column, there)} There are: "
                            f"{short(', '.join(there))}")


def rename_columns(record: dict[str, Any] | DataError, columns: Mapping[str, str]) -> dict[str, Any] | DataError:
    """Returns the record with fields under the names that they stand for, without others that could stand for the
    same.
    """
    if isinstance(record, DataError) or not columns:
        return record
    given = {name: record[field] for name, field in columns.items() if field in record}
    rivals = {n for name in given for n in _TABLES["rivals"].get(name, (name,))} | set(columns.values())
    return {**{k: v for k, v in record.items() if k not in rivals}, **given}
