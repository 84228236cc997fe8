"""Reads files into records: JSON lines, JSON, CSV and TSV, parquet and arrow, text files of Charades-STA and GOT-10k.

A record is one line, or one entry of a list. A document about many images (COCO) gives one record per image. Malformed
or malicious files are rejected with a message. folders.py reads folders."""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from vlrl.data.sources.fields import PLACES
from vlrl.data.sources.json_rows import parse_line
from vlrl.data.sources.tar_shards import row_at, row_spans
from vlrl.data.values import number, short, unpacked
from vlrl.errors import DataError

MOST_BYTES = 2 << 30
"""Maximum size of a text file that is read into memory as a whole."""
MOST_DEPTH = 64
"""Maximum nesting depth of lists and objects."""
_LISTS = ("data", "samples", "rows", "records", "examples", "items", "annotations", "train", "val", "test")
_ASKED = ("questions", "qa_pairs", "videos", "images")  # CLEVR, FigureQA, Ego4D, Visual7W
"""Fields of a JSON document that may hold the list of records; the entries of this list must be objects."""
_PIECE = 4 << 20
"""Bytes of a table that are read at once."""
_FEW, _MANY = 32, 1024
"""Maximum numbers of table rows that are read at once, with and without embedded media."""
_SPLITS = ("train", "val", "test")
_BARE = ("image", "x1", "y1", "x2", "y2", "label")  # columns of a CSV without a header line
_NUMBERS = frozenset(("width", "height", "difficulty", "weight", "count", "tolerance", "precision", "duration", "fps",
                      "speed_mps", "video_start", "video_end"))  # canonical fields that are numbers
_ROW_SUFFIXES = (".jsonl or .jsonl.gz (one object a line), .json (a list of objects), .csv, .tsv, .parquet, .arrow or "
                 ".tar (WebDataset)")



IsRecord = Callable[[Mapping[str, Any]], Any]


class FileRecord(NamedTuple):
    """A record of a file with its location and default id. If the record is invalid, a DataError takes its place."""

    where: str
    """File and line of the record, or file and row number."""
    id: str
    """Default id for the rows of a record without an id."""
    record: dict[str, Any] | DataError


def file_records(path: Path, is_record: IsRecord) -> Iterable[FileRecord]:
    """Returns the records of a file. `is_record(document)` decides whether a .json document that is one object is
    itself a record. Raises DataError if the file cannot be read as a whole."""
    packed = path.suffix.lower() == ".gz" and Path(path.stem).suffix.lower() in (".jsonl", ".ndjson")
    read = _lines if packed else READERS.get(path.suffix.lower())
    if read is None:
        raise DataError(f"{path}: unknown kind of file. The name of a file of rows ends with {_ROW_SUFFIXES}")
    return _document(path, is_record) if read is _document else read(path)


def _text(path: Path) -> str:
    return "".join(_text_lines(path))


def _text_lines(path: Path) -> Iterator[str]:
    packed, at = path.suffix.lower() == ".gz", 0
    too_much = f"more than the {MOST_BYTES} bytes allowed for a file that is read as a whole; split the file"
    try:
        if (size := os.stat(path).st_size) > MOST_BYTES:
            raise DataError(f"{path} has {size} bytes, {too_much}")
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            for line in file:
                yield _decoded(path, line, at)
                if (at := at + len(line)) > MOST_BYTES:
                    raise DataError(f"{path} unpacks to {too_much}, or set data.index=lazy")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _decoded(path: Path, line: bytes, at: int) -> str:
    try:
        return line.decode("utf-8" if at else "utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read: it is not UTF-8 text ({error.reason} at byte {at + error.start}). "
                        "Save it as UTF-8.") from None


def _lines(path: Path) -> Iterator[FileRecord]:
    """Returns the records of a .jsonl file; if the file is a JSON list in spite of its name, reads it as a whole."""
    first = next((line for line in _text_lines(path) if line.strip()), "")
    if first.lstrip()[:1] == "[":
        text = _text(path)
        if isinstance(whole := parse_line(text), list) and not _is_one_line(text):
            return _listed(path, whole)
    return _each_line(path, _text_lines(path))


def _each_line(path: Path, lines: Iterable[str]) -> Iterator[FileRecord]:
    for n, line in enumerate(lines, 1):
        if line.strip():
            yield FileRecord(f"{path}:{n}", f"{path.stem}-{n}", record_of(parse_line(line.rstrip("\n"))))


def _document(path: Path, is_record: IsRecord = lambda document: False) -> Iterable[FileRecord]:
    text = _text(path)
    document = parse_line(text, MOST_BYTES)
    if isinstance(document, DataError):
        if "Extra data" in str(document) and not _is_one_line(text):  # lines under the name of a document
            return _each_line(path, text.split("\n"))
        raise DataError(f"{path}: {document}")
    if isinstance(document, list):
        return _listed(path, document)
    return _records_of_object(path, document, is_record)


def _records_of_object(path: Path, document: Any, is_record: IsRecord) -> Iterable[FileRecord]:
    """Returns the records of a JSON document that is one object.

    The object is a COCO file, CoOp's splits, an object with a list of records in one of its fields, an object of
    records by id, or a single record."""
    if isinstance(document, dict):
        if isinstance(document.get("images"), list) and isinstance(document.get("annotations"), list):
            return _images(path, document)
        if any(_is_coop(document.get(split)) for split in _SPLITS):
            return _coop(path, document)
        if is_record(document):
            return [FileRecord(str(path), path.stem, document)]
        for name in (*_LISTS, *_ASKED):
            if _holds_records(name, document.get(name)):
                return _listed(path, document[name])
        if document and all(isinstance(value, dict) for value in document.values()):
            return [FileRecord(f"{path}, {key!r}", key, value) for key, value in document.items()]
    raise DataError(f"{path} must hold a list of rows, not a {type(document).__name__}")


def _holds_records(name: str, listed: Any) -> bool:
    return isinstance(listed, list) and (name in _LISTS or all(isinstance(entry, dict) for entry in listed))


def _is_coop(entries: Any) -> bool:
    return isinstance(entries, list) and bool(entries) and all(
        isinstance(e, list) and len(e) == 3 and isinstance(e[0], str) and isinstance(e[2], str) for e in entries)


def _coop(path: Path, splits: Mapping[str, Any]) -> Iterator[FileRecord]:
    """Yields the records of CoOp's splits (2109.01134): train, val and test are lists of [image, class number, class
    name]."""
    for split in _SPLITS:
        entries = splits.get(split) or []
        if not _is_coop(entries) and entries:
            raise DataError(f"{path}: {split!r} must be a list of [image, class number, class name]")
        for n, (image, number_, name) in enumerate(entries, 1):
            yield FileRecord(f"{path}, {split} {n}", f"{split}-{n}", {
                "image": image, "label": name, "class_id": number_, "split": split})


def _listed(path: Path, rows: Sequence[Any]) -> Iterator[FileRecord]:
    for n, row in enumerate(rows, 1):
        yield FileRecord(f"{path}, row {n}", f"{path.stem}-{n}", record_of(row))


def _images(path: Path, document: Mapping[str, Any]) -> Iterator[FileRecord]:
    """Yields one small COCO document per image, in the order of `images`. After that, yields an error for each unknown
    image to which annotations refer."""
    by_image: dict[Any, list[Any]] = {}
    for entry in document["annotations"]:
        key = entry.get("image_id") if isinstance(entry, dict) else None
        by_image.setdefault(str(key) if isinstance(key, (str, int)) else None, []).append(entry)
    shared = {"categories": document.get("categories") or []}
    files: dict[str, set[str]] = {}
    for image in filter(lambda image: isinstance(image, dict), document["images"]):
        files.setdefault(str(image.get("id")), set()).add(str(image.get("file_name")))
    for n, image in enumerate(document["images"], 1):
        key = image.get("id") if isinstance(image, dict) else None
        where = f"{path}, image {short(key)}" if isinstance(key, (str, int)) else f"{path}, image number {n}"
        if not isinstance(key, (str, int)):
            yield FileRecord(where, str(n), DataError("an entry of 'images' has no id"))
            continue
        if len(files[str(key)]) > 1:
            yield FileRecord(where, str(n), DataError(
                f"{len(files[str(key)])} files in 'images' have the id {short(key)}, so their annotations "
                "are ambiguous"))
            continue
        yield FileRecord(where, str(key), {"images": [image], "annotations": by_image.get(str(key), []), **shared})
    for key, entries in ((key, entries) for key, entries in by_image.items() if key not in files):
        first = entries[0].get("id") if isinstance(entries[0], dict) else entries[0]
        yield FileRecord(f"{path}, annotation {short(first)}", str(first), DataError(
            f"image_id={key} of {len(entries)} annotations is not the id of any entry of 'images'"))


def record_of(row: Any) -> dict[str, Any] | DataError:
    """Returns the row unchanged if it is a JSON object or a DataError; else returns a DataError."""
    if isinstance(row, (dict, DataError)):
        return row
    return DataError(f"a row must be a JSON object, not a {type(row).__name__}")


def shallow(record: dict[str, Any] | DataError) -> dict[str, Any] | DataError:
    """Returns the record, or a DataError if its lists and objects are nested too deeply to be written."""
    level: list[Any] = [record]
    for _ in range(MOST_DEPTH):
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)
                 if isinstance(child, (dict, list))] if not isinstance(record, DataError) else []
        if not level:
            return record
    return DataError(f"lists and objects are nested more than {MOST_DEPTH} deep")


def _is_one_line(text: str) -> bool:
    return "\n" not in text.strip()


def _table(path: Path) -> Iterator[FileRecord]:
    """Yields each line of a CSV or TSV file as a record. Delimiter: the most frequent of , ; | and tab in line 1."""
    text = _text_lines(path)
    line_one = next(text, "")
    first = line_one.rstrip("\n")
    delimiter = max(",\t;|", key=first.count)
    bare = sum(number(cell.strip('" ')) is not None for cell in first[:10_000].split(delimiter)) >= 4
    if bare and first.count(delimiter) + 1 != len(_BARE):
        raise DataError(f"{path}: the first line has no column names: {short(first)}. Add a header line, e.g. "
                        f"{delimiter.join(_BARE)}")
    lines = csv.DictReader(chain([line_one], text), _BARE if bare else None, delimiter=delimiter, strict=True)
    while True:
        try:
            line = next(lines)
            twice = [name for name, count in Counter(lines.fieldnames or ()).items() if name and count > 1]
            if twice:
                raise DataError(f"{path}:1: the column {short(twice[0])} occurs twice; rename one of them")
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}:{lines.reader.line_num}: not CSV: {error}") from None
        where = f"{path}:{lines.line_num}"
        cells = {str(k).strip(): (v or "").strip() for k, v in line.items() if not isinstance(v, list)}
        record = {k: _cell(k, v) if v else None for k, v in cells.items() if v or k in PLACES}
        wide = DataError(f"the line has more values than the header has names: {short(line[None])}"  # pyright: ignore
                         ) if None in line else None
        yield FileRecord(where, f"{path.stem}-{lines.line_num}", wide or record)


def _cell(name: str, text: str) -> Any:
    """Parses a table cell: a number if the canonical field of this name is numeric, else JSON if it is a list or
    object."""
    value = number(text) if name in _NUMBERS else unpacked(text)
    return text if value is None else value


def _lines_of_text(path: Path) -> Iterator[FileRecord]:
    """Yields the records of a .txt file: lines "video start end##sentence" (Charades-STA), or a GOT-10k sequence.

    A GOT-10k file (groundtruth.txt) has one line x,y,width,height per frame and gives one record."""
    lines = [line.strip() for line in _text(path).split("\n")]
    if path.name == "groundtruth.txt":
        yield FileRecord(str(path), path.parent.name, {
            "path": path.parent.name, "object": _object_of(path), "boxes_xywh": [
                line.replace("\t", ",").split(",") for line in lines if line]})
        return
    for n, line in enumerate(lines, 1):
        place, _, sentence = line.partition("##")
        moment = place.split()
        if line and (len(moment) != 3 or not sentence.strip()):
            raise DataError(f"{path}:{n} is not a line of Charades-STA, 'video start end##sentence': {short(line)}. "
                            f"The name of a file of other rows ends with {_ROW_SUFFIXES}")
        if line:
            yield FileRecord(f"{path}:{n}", f"{path.stem}-{n}", {
                "video": moment[0], "timestamp": moment[1:], "sentence": sentence.strip()})


def _object_of(path: Path) -> str:
    try:
        with open(path.with_name("meta_info.ini"), encoding="utf-8", errors="replace") as file:
            text = file.read(10_000)
    except OSError:
        return "object"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("object_class")]
    return names[0] if names and names[0] else "object"


def _parquet(path: Path) -> Iterator[FileRecord]:
    import pyarrow.parquet as pq

    return _batches(path, lambda: parquet_batches(pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)))


def parquet_batches(file: Any) -> Iterator[Any]:
    """Yields batches of rows of an open parquet file, each of about _PIECE bytes.

    If columns hold media, a batch has few rows, because the sizes of media vary."""
    most = _FEW if any(_holds_bytes(field.type) for field in file.schema_arrow) else _MANY
    for k in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(k)
        rows = _PIECE * group.num_rows // max(group.total_byte_size, 1)
        yield from file.iter_batches(batch_size=max(1, min(most, rows)), row_groups=[k], use_threads=False)


def _holds_bytes(kind: Any) -> bool:
    import pyarrow.types as of

    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return of.is_binary(kind) or of.is_large_binary(kind) or any(map(_holds_bytes, inner))


def _arrow(path: Path) -> Iterator[FileRecord]:
    import pyarrow as pa

    def read() -> Iterable[Any]:
        source = pa.memory_map(str(path))
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:  # `datasets` writes streams
            return pa.ipc.open_stream(source)
        return (reader.get_batch(i) for i in range(reader.num_record_batches))

    return _batches(path, read)


def _tar(path: Path) -> Iterator[FileRecord]:
    try:
        with open(path, "rb") as file:
            for n, (begin, end) in enumerate(row_spans(path).tolist(), 1):
                key, record = row_at(path, file.fileno(), begin, end)
                yield FileRecord(f"{path}, row {n}", key, record)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _batches(path: Path, read: Callable[[], Iterable[Any]]) -> Iterator[FileRecord]:
    n = 0
    try:
        for batch in read():
            classes = class_names(batch.schema)
            for record in batch.to_pylist():
                n += 1
                yield FileRecord(f"{path}, row {n}", f"{path.stem}-{n}", named_classes(record, classes))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, NotImplementedError, RecursionError) as error:  # pyarrow's errors are of these
        raise DataError(f"{path} cannot be read: {error}") from None


def _without_decimals(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {k: _without_decimals(v) for k, v in value.items()}
    return [_without_decimals(v) for v in value] if isinstance(value, list) else value


def class_names(schema: Any) -> dict[str, list[str]]:
    """Returns {column: class names} from the schema of a table, in which the library `datasets` stores the names; {} if
    the schema has no class names."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        inner = {k: f.get("feature", f) if isinstance(f, dict) else f[0] for k, f in features.items()}
        return {k: [str(name) for name in f["names"]] for k, f in inner.items() if "names" in f}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
        return {}


def named_classes(record: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns a table record with class names in place of class numbers, and with plain numbers in place of Decimal.

    The class number of `label` is also stored as `class_id`."""
    record = _without_decimals(record)
    number_ = record.get("label") if "label" in classes else None
    numbered = {"class_id": number_} if type(number_) is int and "class_id" not in record else {}
    return {**record, **numbered, **{k: _class_name(record.get(k), names) for k, names in classes.items()}}


def _class_name(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_class_name(v, names) for v in value]
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)
    return names[value] if known else value


READERS: dict[str, Callable[[Path], Iterable[FileRecord]]] = {
    ".jsonl": _lines, ".ndjson": _lines, ".json": _document, ".csv": _table, ".tsv": _table, ".txt": _lines_of_text,
    ".parquet": _parquet, ".arrow": _arrow, ".feather": _arrow, ".tar": _tar,
}
"""Reader functions by file suffix."""
