"""Random access to the records of large files without reading them into memory. Imports no torch.

    records = open_records([Path("rows.jsonl")], cache_folder())     # None for a kind of file that is read as a whole
    len(records), records[123_456].record

A fast scan finds the byte offset of each line of a .jsonl file or of each row of a .tar shard; the offsets are cached
and memory-mapped. Arrow files are memory-mapped. Parquet files are read by row group; a file with large row groups is
unpacked once into an arrow file. Several files, and the shards of a folder, are concatenated.

The library `datasets` (5.2) is not used. To open a file of a million rows for the first time, it needs 2 to 16 times
the CPU time (1.7 s against 0.4 s for .jsonl, 68 s against 20 s for .tar) and up to 16 times the memory. If one line is
bad, it cannot read the file, and does not name the line. It converts strings that look like dates to dates. Only its
random reads of parquet are faster."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import threading
import weakref
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vlrl.data.samples import train_or_heldout
from vlrl.data.sources.derived_cache import check_room, derived_file
from vlrl.data.sources.files import FileRecord, class_names, named_classes, parquet_batches, record_of
from vlrl.data.sources.folders import shards_of, split_of
from vlrl.data.sources.json_rows import MOST_LINE, parse_line
from vlrl.data.sources.tar_shards import row_at, row_spans
from vlrl.errors import DataError, RunError

log = logging.getLogger(__name__)

_CHUNK = 4 << 20
_GROUP_BYTES = 16 << 20
"""Maximum decoded size of a parquet row group. A file with larger groups is unpacked once, since reading a single row
decodes the whole group."""
_HUGE = 512 << 20
"""Decoded size of a row group from which a warning is logged."""
_KEPT_BYTES = 64 << 20
"""Maximum size of decoded row groups held in memory."""
_LINES = (".jsonl", ".ndjson")
_SPLIT_CODES = {None: 0, "train": 1, "heldout": 2}


class IndexedRecords(Protocol):
    """Random access to the records of a file by index."""

    @property
    def splits(self) -> np.ndarray | None:
        """[N] int8 split of each record: 1 = train, 2 = heldout, 0 = no or another split. None if no record states a
        split."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> FileRecord: ...


def open_records(files: Sequence[Path], cache: Path) -> IndexedRecords | None:
    """Opens files, or folders of shards, for random access. Returns the records of all `files` as one sequence, or None
    if a file can only be read as a whole. Raises DataError if a file cannot be read."""
    parts: list[IndexedRecords] = []
    for path in files:
        file_rows = [
            ShardRecords(shard, rows) for shard in shards_of(path) for rows in _of_file(path / shard, cache) or ()
        ] if os.path.isdir(path) else _of_file(path, cache)
        if not file_rows:
            return None
        parts += file_rows
    return ChainedRecords(parts)


def size_in_bytes(path: Path) -> int:
    """Returns the size of a file, or of the shards of a folder; compressed files count ten times their size."""
    files = [path / shard for shard in shards_of(path)] if os.path.isdir(path) else [path]
    return sum(os.stat(f).st_size * (10 if f.suffix.lower() in (".parquet", ".gz") else 1) for f in files)


def _of_file(path: Path, cache: Path) -> list[IndexedRecords] | None:
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix == ".gz" else suffix
    try:
        if inner in _LINES:
            lines = LineRecords(path, cache)
            return None if lines.is_list else [lines]
        if suffix in (".arrow", ".feather"):
            return [ArrowRecords(path, path)]
        if suffix == ".parquet":
            return [_parquet(path, cache)]
        if suffix == ".tar":
            return [TarRecords(path, cache)]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, NotImplementedError, EOFError) as error:  # pyarrow's errors are of these
        raise error if isinstance(error, DataError) else DataError(f"{path} cannot be read: {error}") from None
    return None


class ChainedRecords:
    """The concatenated records of several files."""

    def __init__(self, parts: Sequence[IndexedRecords]):
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))
        known = any(part.splits is not None for part in parts)
        self.splits = np.concatenate([part.splits if part.splits is not None else np.zeros(len(part), np.int8)
                                     for part in parts]) if known else None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> FileRecord:
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]


class ShardRecords:
    """The records of one file of a folder. The path of the file gives the split of the records, and also their default
    ids except in .tar files."""

    def __init__(self, shard: str, rows: IndexedRecords):
        self._rows, self._split, self._stem = rows, split_of(shard), os.path.splitext(shard)[0]
        side = _SPLIT_CODES[train_or_heldout(self._split.get("split"))]
        self._keyed = isinstance(rows, TarRecords)
        own = rows.splits
        self.splits = own if own is not None else np.full(len(rows), side, np.int8) if side else None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> FileRecord:
        where, id, record = self._rows[index]
        return FileRecord(where, id if self._keyed else f"{self._stem}-{index + 1}",
                      record if isinstance(record, DataError) else {**self._split, **record})


class LineRecords:
    """The records of a .jsonl file; a gzipped file (.jsonl.gz) is unpacked once into the cache."""

    def __init__(self, path: Path, cache: Path):
        self._path = path
        plain = derived_file(path, cache, "rows.jsonl", _gunzip) if path.suffix.lower() == ".gz" else path
        self._file = os.open(plain, os.O_RDONLY)  # kept open: a file that is replaced meanwhile stays readable
        weakref.finalize(self, os.close, self._file)
        self._size = os.fstat(self._file).st_size
        self._places = np.zeros((0, 3), np.int64) if self.is_list else _cached_places(
            plain, cache, "places.npy", _line_places, 3)
        own = self._places[:, 2]
        self.splits = own.astype(np.int8) if len(own) and own.any() else None

    @property
    def is_list(self) -> bool:
        """Whether the file is a JSON list in spite of its name."""
        head = os.pread(self._file, 4096, 0)
        return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> FileRecord:
        at, line = map(int, self._places[index, :2])
        end = int(self._places[index + 1, 0]) if index + 1 < len(self) else self._size
        return FileRecord(f"{self._path}:{line}", f"{self._path.stem}-{line}", self._record(at, end))

    def _record(self, at: int, end: int) -> Any:
        if end - at > 4 * MOST_LINE:
            return DataError(f"the line has {end - at} bytes, too many for one row")
        try:
            before = min(at, 1)
            data = os.pread(self._file, end - at + before, at - before)
            begins = data[:before] in (b"", b"\n") or (at == 3 and data[:1] == b"\xbf")  # after a byte order mark
            ends = len(data) == end - at + before and (end == self._size or data.endswith(b"\n"))
            text = data[before:].decode().strip() if begins and ends else "\n"
            if "\n" in text:
                raise RunError(f"{self._path} has changed since the run began: its rows have moved. During a "
                               "run, data files may be replaced by new files, but must not be written to. The same "
                               "command resumes the run from the last checkpoint.")
            return record_of(parse_line(text))
        except UnicodeDecodeError as error:
            return DataError(f"the row is not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8.")
        except OSError as error:
            return DataError(f"{self._path} cannot be read: {error.strerror or error}")


def _cached_places(path: Path, cache: Path, name: str, scan: Callable[[Path], np.ndarray], width: int) -> np.ndarray:
    def write(source: Path, target: Path) -> None:
        with open(target, "wb") as file:
            np.save(file, scan(source), allow_pickle=False)

    try:
        for _ in range(2):
            place = derived_file(path, cache, name, write)
            with contextlib.suppress(ValueError, EOFError, FileNotFoundError):  # damaged, or deleted meanwhile
                places = np.load(place, mmap_mode="r", allow_pickle=False)
                if places.dtype == np.int64 and places.ndim == 2 and places.shape[1] == width:
                    return places
            place.unlink(missing_ok=True)
    except (RunError, OSError) as error:
        log.warning("%s is indexed at each start, because the index cannot be cached: %s", path,
                    error)
    return scan(path)


def _line_places(path: Path) -> np.ndarray:
    """[N, 3] int64: byte offset, line number and split (see IndexedRecords.splits) of each non-blank line."""
    starts, odd, base, begins, names_split, tail = [], [], 0, True, False, b""
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            data = np.frombuffer(chunk, np.uint8)
            ends = np.flatnonzero(data == 10)
            first = np.concatenate([[0] if begins else [], ends[ends < len(data) - 1] + 1]).astype(np.int64)
            begins = chunk.endswith(b"\n")
            starts.append(first + base)
            odd.append(data[first] != ord("{"))
            names_split = names_split or b'"split"' in chunk or b'"split"' in tail + chunk[:8]
            base, tail = base + len(chunk), (tail + chunk[-8:])[-8:]
        if not starts:
            return np.zeros((0, 3), np.int64)
        at, doubtful = np.concatenate(starts), np.concatenate(odd)
        full = ~doubtful
        for i in np.flatnonzero(doubtful).tolist():
            file.seek(int(at[i]))
            full[i] = file.readline(4 * MOST_LINE).decode("utf-8", "replace").strip() not in ("", "\ufeff")
        number = np.flatnonzero(full) + 1
        at = at[full]
        if len(at) and number[0] == 1 and os.pread(file.fileno(), 3, 0) == b"\xef\xbb\xbf":
            at[0] = 3
        side = np.fromiter(_split_sides(file, at), np.int64, len(at)) if names_split else np.zeros(len(at), np.int64)
    return np.stack([at, number, side], axis=1)


def _split_sides(file: Any, at: np.ndarray) -> Iterator[int]:
    for start in at.tolist():
        file.seek(start)
        line = file.readline(4 * MOST_LINE)
        try:
            record = json.loads(line) if b'"split"' in line else {}
        except (ValueError, RecursionError):
            record = {}
        yield _SPLIT_CODES[train_or_heldout(record["split"])] if isinstance(record, dict) and "split" in record else 0


def _gunzip(source: Path, target: Path) -> None:
    def pieces() -> Iterator[bytes]:
        try:
            with gzip.open(source, "rb") as packed:
                while chunk := packed.read(_CHUNK):
                    yield chunk
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source} cannot be unpacked: {error}") from None

    with open(target, "wb") as file:
        for chunk in pieces():
            check_room(source, target)
            file.write(chunk)


class TarRecords:
    """The records of a WebDataset shard; the byte ranges of its rows are cached."""

    splits = None

    def __init__(self, path: Path, cache: Path):
        self._path = path
        self._places = _cached_places(path, cache, "members.npy", row_spans, 2)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> FileRecord:
        begin, end = map(int, self._places[index])
        key, record = row_at(self._path, self._file, begin, end)
        return FileRecord(f"{self._path}, row {index + 1}", key, record)


class ArrowRecords:
    """The records of a memory-mapped arrow file or stream. Messages name the path `named` instead of the file."""

    def __init__(self, path: Path, named: Path):
        import pyarrow as pa

        self._path, source = named, pa.memory_map(str(path))
        try:
            reader = pa.ipc.open_file(source)
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except pa.ArrowInvalid:  # `datasets` writes streams
            reader = pa.ipc.open_stream(pa.memory_map(str(path)))
            self._batches = list(reader)
        self._ends = list(accumulate(len(batch) for batch in self._batches))
        self._classes = class_names(reader.schema)
        split = [batch.column("split") for batch in self._batches] if "split" in reader.schema.names else []
        self.splits = _column_splits(split) if split else None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> FileRecord:
        k = bisect_right(self._ends, index)
        return _record_at(self._path, index, self._batches[k], index - (self._ends[k - 1] if k else 0), self._classes)


class ParquetRecords:
    """The records of a parquet file with small row groups; recently used groups stay decoded. Thread-safe."""

    def __init__(self, path: Path, file: Any):
        self._path, self._file, self._lock = path, file, threading.Lock()
        meta = file.metadata
        self._ends = list(accumulate(meta.row_group(i).num_rows for i in range(meta.num_row_groups)))
        self._classes = class_names(file.schema_arrow)
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._used = 0
        split = (batch.column(0) for batch in file.iter_batches(columns=["split"])
                 ) if "split" in file.schema_arrow.names else ()
        self.splits = _column_splits(split) if "split" in file.schema_arrow.names else None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> FileRecord:
        k = bisect_right(self._ends, index)
        try:
            with self._lock:
                group = self._group(k)
            return _record_at(self._path, index, group, index - (self._ends[k - 1] if k else 0), self._classes)
        except (OSError, ValueError, NotImplementedError) as error:
            return FileRecord(f"{self._path}, row {index + 1}", "", DataError(f"the row cannot be read: {error}"))

    def _group(self, k: int) -> Any:
        if k not in self._groups:
            self._groups[k] = self._file.read_row_group(k, use_threads=False)
            self._used += self._groups[k].nbytes
        self._groups.move_to_end(k)
        while len(self._groups) > 1 and self._used > _KEPT_BYTES:
            self._used -= self._groups.popitem(last=False)[1].nbytes
        return self._groups[k]


def _parquet(path: Path, cache: Path) -> IndexedRecords:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest <= _GROUP_BYTES:
        return ParquetRecords(path, file)
    rows = max(1, _GROUP_BYTES * file.metadata.num_rows // sum(group.total_byte_size for group in groups))
    if largest >= _HUGE:
        log.warning("%s has row groups of %d MiB: reading a group can take twice that much memory, because "
                    "whole pages are decoded. Rewrite the file with smaller groups (row_group_size=%d)", path,
                    largest >> 20, rows)
    try:
        return ArrowRecords(derived_file(path, cache, "rows.arrow", _unpack), path)
    except RunError as error:
        log.warning("%s has row groups of %d MiB, which are decoded for each row, since they cannot be unpacked "
                    "(%s). Rewrite the file with smaller groups (row_group_size=%d)", path, largest >> 20, error, rows)
        return ParquetRecords(path, file)


def _unpack(source: Path, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (pq.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False) as file, pa.OSFile(str(target), "wb") as out,
          pa.ipc.new_file(out, file.schema_arrow) as writer):
        for n, batch in enumerate(parquet_batches(file)):
            if n % 32 == 0:  # at most 128 MiB
                check_room(source, target)
            writer.write_batch(batch)


def _record_at(path: Path, index: int, table: Any, place: int, classes: dict[str, list[str]]) -> FileRecord:
    (record,) = table.slice(place, 1).to_pylist()
    return FileRecord(f"{path}, row {index + 1}", f"{path.stem}-{index + 1}", named_classes(record, classes))


def _column_splits(columns: Iterable[Any]) -> np.ndarray | None:
    codes = [np.array([_SPLIT_CODES[train_or_heldout(value)] for value in piece.to_pylist()], np.int8)
             for piece in columns]
    return np.concatenate(codes) if codes else None
