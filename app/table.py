"""The rollout files of many runs as one duckdb table without token lists, which is updated file by file.

Texts are kept for the search, up to SEARCHED characters each."""

import contextlib
import math
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from vlrl.rewards.text import scored_text
from vlrl.store import ROLLOUT_FILE, SCHEMA, as_schema, read_rollouts

from . import AppError
from .details import decoded
from .forms import TAGS
from .library import Library, inside, inside_folder
from .queries import SOURCES, pattern_error
from .textfiles import first_line
from .turns import calls_of

pc: Any = pyarrow.compute  # its functions are made when it is imported, where no type checker sees them
SEARCHED = {"completion": 20_000, "prompt": 4_000, "error": 1_000}
"""Column -> number of characters of each text that can be searched and listed.

After the first _LONG_FILE bytes of a file, only _OF_LONG_FILE characters of each text are kept."""
_COLUMNS = ("schema", "group_id", "sample_id", "task", "index", "step", "policy_step", "split", "prompt", "completion",
            "loss_mask", "parts", "reward", "advantage", "category", "difficulty", "error", "truncated", "variant",
            "media", "correct", "target", "finish_reason", "episode_id", "opened")
_FIELDS = [SCHEMA.field(name) for name in _COLUMNS]
_OF_TURNS = [pa.field("turns", pa.int32()), pa.field("tool_errors", pa.int32())]
_TURN_PATHS = [f"turns.list.{item}.{name}" for item in ("element", "item") for name in ("role", "info")]
"""Paths of the columns read from turns; in older files the list element is named "item"."""
_TABLE = {"run": "VARCHAR", "source": "VARCHAR", "split": "VARCHAR", "step": "BIGINT", "group_id": "VARCHAR",
          "idx": "INTEGER", "file": "BIGINT", "task": "VARCHAR", "sample_id": "VARCHAR", "policy_step": "INTEGER",
          "reward": "DOUBLE", "advantage": "DOUBLE", "length": "INTEGER", "truncated": "BOOLEAN", "error": "VARCHAR",
          "category": "VARCHAR", "difficulty": "DOUBLE", "aside": "BOOLEAN", "part_names": "VARCHAR[]",
          "part_values": "DOUBLE[]", "media": "VARCHAR", "shown": "VARCHAR", "completion": "VARCHAR",
          "prompt": "VARCHAR", "correct": "BOOLEAN", "target": "BIGINT", "finish_reason": "VARCHAR", "turns": "INTEGER",
          "tool_errors": "INTEGER", "malformed": "BOOLEAN"}
_SETTINGS: dict[str, Any] = {
    "memory_limit": "448MB", "threads": 2, "enable_external_access": False, "autoinstall_known_extensions": False,
    "autoload_known_extensions": False, "preserve_insertion_order": False}
_BATCH, _BATCH_BYTES = 8192, 24 << 20  # rows and bytes inserted at a time
_TOGETHER = 8  # files read between two looks at the clock
_MOST_ROWS = 400_000  # in the table; beyond, runs not requested lately are removed
_MOST_IN_FILE = 2_000_000
_ROWS_AT_ONCE, _DECODED_ROWS = 1024, 16  # processed at a time; decoded before their size is checked
_LONG_FILE = 128 << 20  # bytes of a file; in the rows after these,
_OF_LONG_FILE = 240  # only this many characters of each text are kept
_PATIENCE_S = 20.0  # a query that takes longer is stopped
_NOTES = 20
_SLOW_S = 0.05  # a folder that takes longer to list is not listed at every call


class _Place(NamedTuple):
    run: str
    source: str
    name: str
    path: Path

    @property
    def step(self) -> int:
        match = self._match
        return int(match[1] or match[3])

    @property
    def split(self) -> str:
        return self._match[2] or ("train" if self.source == "train" else "")

    @property
    def _match(self) -> re.Match[str]:
        match = ROLLOUT_FILE.fullmatch(self.name)
        assert match
        return match


@dataclass
class _File:
    number: int
    signature: tuple[int, int, int]
    rows: int = 0
    note: str = ""


@dataclass
class _Run:
    files: dict[tuple[str, str], _File] = field(default_factory=dict)
    waiting: dict[tuple[str, str], tuple[_Place, tuple[int, int, int]]] = field(default_factory=dict)
    """Files still to be read: (source, file name) -> (file, its time of last change, size and inode)."""
    requested: float = 0.0
    listed: float = -math.inf
    listing_s: float = 0.0


_Batch = list[tuple[_Place, _File, pa.Table]]


class Table:
    """The duckdb table `rollouts` with the columns of _TABLE, filled from the runs that were requested. Thread-safe."""

    def __init__(self, library: Library, budget_s: float = 0.8):
        self.library, self.budget_s = library, budget_s
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._number = 0
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="vlrl-app-reader")
        spill = tempfile.mkdtemp(prefix="vlrl-app-")
        self._clean = weakref.finalize(self, shutil.rmtree, spill, ignore_errors=True)
        self._duckdb = duckdb.connect(":memory:", config={**_SETTINGS, "temp_directory": spill})
        self._duckdb.execute(f"CREATE TABLE rollouts ({', '.join(f'{k} {v}' for k, v in _TABLE.items())})")
        self._duckdb.execute("SET lock_configuration = true")

    def close(self) -> None:
        """Frees memory and temporary files."""
        with self._lock:
            self._duckdb.close()
            self._readers.shutdown()
        self._readers.shutdown()
        self._clean()

    def fetch(self, sql: str, values: Sequence[Any] = (), tables: Mapping[str, pa.Table] | None = None,
              pattern: str | None = None) -> list[dict[str, Any]]:
        """Runs a query and returns its rows as dictionaries. `tables` are Arrow tables that the query may use, by name.
        Raises AppError if the query takes too long or needs too much memory, or if the search `pattern` is invalid."""
        with self._lock:
            cursor = self._duckdb.cursor()
        timer = threading.Timer(_PATIENCE_S, cursor.interrupt)
        timer.daemon = True
        try:
            if pattern:
                _try_pattern(cursor, pattern)
            for name, table in (tables or {}).items():
                cursor.register(name, table)
            timer.start()
            cursor.execute(sql, list(values))
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        except duckdb.InterruptException:
            raise AppError(f"the search took longer than {_PATIENCE_S:g} s and was stopped: choose fewer runs or a "
                           "simpler pattern") from None
        except duckdb.OutOfMemoryException:
            raise AppError("the search exceeds the inspector's memory limit: choose fewer runs") from None
        finally:
            timer.cancel()
            cursor.close()

    def refresh(self, runs: Iterable[str], budget_s: float | None = None) -> tuple[int, tuple[str, ...]]:
        """Reads new files of the given runs; returns the number of files left to read, and notes on skipped files.
        Files with the newest steps are read first. Reading stops after `budget_s` seconds; the next call continues."""
        runs = list(dict.fromkeys(runs))
        paths = {run: self.library.path(run) for run in runs}
        end = time.monotonic() + (self.budget_s if budget_s is None else budget_s)
        with self._lock:
            for run, path in paths.items():
                self._list(run, path)
            todo = [item for run in runs for item in self._runs[run].waiting.values()]
            self._read(sorted(todo, key=lambda item: (item[0].step, item[0].name), reverse=True), end)
            self._forget(runs)
            left = sum(len(self._runs[run].waiting) for run in runs)
            notes = [f.note for run in runs for f in self._runs[run].files.values() if f.note]
        more = [f"and {len(notes) - _NOTES} more files were skipped"] if len(notes) > _NOTES else []
        return left, (*notes[:_NOTES], *more)

    def _list(self, run: str, path: Path) -> None:
        known = self._runs.setdefault(run, _Run())
        known.requested = began = time.monotonic()
        if known.listing_s > _SLOW_S and began - known.listed < 5 * known.listing_s:
            return
        present = {(source, name): (file, signature) for source, folder in SOURCES.items()
                   for name, file, signature in _listing(path / folder, self.library.root)}
        gone = [key for key, file in known.files.items() if key not in present or present[key][1] != file.signature]
        if gone and any(name.startswith("steps-") for _, name in known.files):
            gone = list(known.files)  # _drop_doubles may have removed copies of their rows
        self._remove(known, gone)
        known.waiting = {(source, name): (_Place(run, source, name, file), signature)
                         for (source, name), (file, signature) in present.items() if (source, name) not in known.files}
        known.listed = time.monotonic()
        known.listing_s = known.listed - began

    def _remove(self, known: _Run, keys: Sequence[tuple[str, str]]) -> None:
        numbers = [known.files.pop(key).number for key in keys]
        if numbers:
            self._duckdb.execute("DELETE FROM rollouts WHERE file IN (SELECT unnest(?::BIGINT[]))", [numbers])

    def _read(self, todo: Sequence[tuple[_Place, tuple[int, int, int]]], end: float) -> None:
        batch, touched = _Batch(), set[str]()
        for first in range(0, len(todo), _TOGETHER):
            some = todo[first:first + _TOGETHER]
            for (place, signature), table in zip(some, self._readers.map(_raw, [p.path for p, _ in some]), strict=True):
                self._number += 1
                file, known, key = _File(self._number, signature), self._runs[place.run], (place.source, place.name)
                known.files[key] = file
                known.waiting.pop(key, None)
                touched.add(place.run)
                if isinstance(table, Exception):
                    file.note = _skipped(place, table)
                else:
                    batch.append((place, file, table))
                if _is_full(batch):
                    self._insert(batch)
                    batch = _Batch()
            if time.monotonic() > end:
                break
        self._insert(batch)
        del batch
        pa.default_memory_pool().release_unused()
        for run in touched:
            if any(name.startswith("steps-") for _, name in self._runs[run].files):
                self._drop_doubles(run)

    def _insert(self, batch: _Batch) -> None:
        """Inserts the rows of some files. If that fails, inserts the files one by one, so that a bad file does not
        block the others."""
        if not batch:
            return
        try:
            self._duckdb.register("batch", _light(batch))
            self._duckdb.execute(f"INSERT INTO rollouts SELECT {', '.join(_TABLE)} FROM batch")
            for _, file, table in batch:
                file.rows = table.num_rows
        except Exception as error:
            for item in batch if len(batch) > 1 else ():
                self._insert([item])
            if len(batch) == 1:
                batch[0][1].note = _skipped(batch[0][0], error)
        finally:
            with contextlib.suppress(duckdb.Error):
                self._duckdb.unregister("batch")

    def _drop_doubles(self, run: str) -> None:
        """Removes the second copy of rollouts that are in two files, as happens while files are being compacted."""
        self._duckdb.execute("""
            DELETE FROM rollouts USING (SELECT source, split, step, group_id, idx, min(file) AS first FROM rollouts
                                        WHERE run = ? GROUP BY ALL HAVING min(file) < max(file)) AS twice
            WHERE run = ? AND rollouts.source = twice.source AND rollouts.split = twice.split
              AND rollouts.step = twice.step AND rollouts.group_id = twice.group_id AND rollouts.idx = twice.idx
              AND rollouts.file > twice.first""", [run, run])

    def _forget(self, runs: Sequence[str]) -> None:
        rows = {run: sum(f.rows for f in known.files.values()) for run, known in self._runs.items()}
        for run in sorted(self._runs.keys() - set(runs), key=lambda run: self._runs[run].requested):
            if sum(rows.values()) > _MOST_ROWS:
                self._remove(self._runs[run], list(self._runs[run].files))
                del self._runs[run], rows[run]


def _listing(folder: Path, root: Path) -> list[tuple[str, Path, tuple[int, int, int]]]:
    files = []
    try:
        if not inside_folder(folder, root):
            return []
        with os.scandir(folder) as entries:
            for entry in entries:
                if not ROLLOUT_FILE.fullmatch(entry.name):
                    continue
                file = Path(entry.path)
                if not entry.is_file(follow_symlinks=False) and inside(file, root) is None:
                    continue
                stat = entry.stat()
                files.append((entry.name, file, (stat.st_mtime_ns, stat.st_size, stat.st_ino)))
    except OSError:  # the folder does not exist, or a file was deleted meanwhile
        pass
    return files


def _raw(path: Path) -> pa.Table | Exception:
    try:
        return _read_light(path)
    except Exception as error:  # pyarrow may raise anything for a damaged or hostile file
        return error


def _read_light(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as reader:
        if reader.metadata.num_rows > _MOST_IN_FILE:
            raise ValueError(f"the file has {reader.metadata.num_rows} rows, more than {_MOST_IN_FILE}")
        names = [name for name in reader.schema_arrow.names if name in _COLUMNS] + _TURN_PATHS
        tables, size = list[pa.Table](), 0
        for some in _pieces(reader.iter_batches(_DECODED_ROWS, columns=names, use_threads=False)):
            long = size > _LONG_FILE
            tables.append(_searchable(pa.Table.from_batches(some), _OF_LONG_FILE if long else None))
            size += tables[-1].nbytes
            if size > 4 * _LONG_FILE:  # a few compressed kilobytes may decode to any amount
                raise ValueError(f"the columns of the file have more than {4 * _LONG_FILE >> 20} MiB")
    return pa.concat_tables(tables) if tables else pa.schema([*_FIELDS, *_OF_TURNS]).empty_table()


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yields lists of successive batches, each up to a limit of rows and bytes. The size is limited because texts are
    not truncated yet, and even a small file may hold long texts."""
    some, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        some, rows, size = [*some, batch], rows + batch.num_rows, size + batch.nbytes
        if rows >= _ROWS_AT_ONCE or size >= _BATCH_BYTES:
            yield some
            some, rows, size = [], 0, 0
    if some:
        yield some


def _searchable(table: pa.Table, most: int | None = None) -> pa.Table:
    turns = _of_turns(table)
    table = as_schema(table, _FIELDS)
    table.validate(full=True)  # e.g. that texts are UTF-8
    for column, values in zip(_OF_TURNS, turns, strict=True):
        table = table.append_column(column, values)
    for name, length in SEARCHED.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.field(place), pc.utf8_slice_codeunits(table[name], 0, most or length))
    return table


def _of_turns(table: pa.Table) -> tuple[Any, Any]:
    """[N] numbers of actions, and of failed tool calls, of each episode; null for answers that are not episodes."""
    if not {"turns", "episode_id"} <= set(table.column_names):
        return pa.nulls(len(table), pa.int32()), pa.nulls(len(table), pa.int32())
    counts, errors = [], []
    for episode, turns in zip(table["episode_id"].to_pylist(), table["turns"].to_pylist(), strict=True):
        acted = [turn for turn in turns or () if turn and turn.get("role") != "observation"] if episode else []
        counts.append(len(acted) if acted else None)
        errors.append(sum(map(_failed_calls, acted)) if acted else None)
    return pa.array(counts, pa.int32()), pa.array(errors, pa.int32())


def _failed_calls(turn: Mapping[str, Any]) -> int:
    info = turn.get("info")
    return sum(bool(call.error) for call in calls_of(decoded(info))) if info and '"calls"' in info else 0


def _is_full(batch: _Batch) -> bool:
    return (sum(table.num_rows for _, _, table in batch) >= _BATCH
            or sum(table.nbytes for _, _, table in batch) >= _BATCH_BYTES)


def _light(batch: _Batch) -> pa.Table:
    table = pa.concat_tables([table for _, _, table in batch]).combine_chunks()
    sizes = [table.num_rows for _, _, table in batch]

    def column(name: str) -> Any:
        return table[name].combine_chunks()

    def of_files(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(batch)), sizes)))

    places = [place for place, _, _ in batch]
    names, values = _parts(column("parts"))
    rows = pa.array(np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]))
    return pa.table({
        "run": of_files([place.run for place in places], pa.string()),
        "source": of_files([place.source for place in places], pa.string()),
        "split": pc.coalesce(column("split"), of_files([place.split for place in places], pa.string())),
        "step": pc.coalesce(column("step").cast(pa.int64()), of_files([place.step for place in places], pa.int64())),
        "group_id": pc.fill_null(column("group_id"), ""), "idx": pc.coalesce(column("index"), rows),
        "file": of_files([file.number for _, file, _ in batch], pa.int64()), "task": column("task"),
        "sample_id": pc.fill_null(column("sample_id"), ""), "policy_step": column("policy_step"),
        "reward": _finite(column("reward")), "advantage": _finite(column("advantage")),
        "length": _lengths(batch, column("loss_mask")), "truncated": pc.fill_null(column("truncated"), False),
        "error": column("error"), "category": column("category"), "difficulty": _finite(column("difficulty")),
        "aside": pc.and_(pc.is_valid(column("variant")), pc.is_null(column("advantage"))),
        "part_names": names, "part_values": values, "media": _first_path(column("media")),
        "shown": _hashes(column("media")), "completion": pc.fill_null(column("completion"), ""),
        "prompt": pc.fill_null(column("prompt"), ""),
        "correct": column("correct"), "target": _digests(column("target")),
        "finish_reason": column("finish_reason"), "turns": column("turns"), "tool_errors": column("tool_errors"),
        "malformed": is_malformed(column("completion"), column("prompt"), column("episode_id"), column("opened"))})


def is_malformed(answers: Any, prompts: Any, episodes: Any, opened: Any) -> Any:
    """Returns [N] bool: whether the tags of each answer are malformed, that is missing, unpaired, repeated, or with
    text outside of them. A fast version of forms.read for the stored beginnings of the texts. It expects those tags
    that occur in the answer or its prompt. `opened` are the ends of the prompts that count as part of the answers.
    The tags of `episodes` (not null) are never malformed."""
    if opened.null_count < len(opened):
        rows = [[text or "" for text in row] for row in zip(*map(pa.Array.to_pylist, (answers, prompts, opened)),
                                                            strict=True)]
        answers = pa.array([scored_text(text, begun) for text, _, begun in rows], pa.string())
        prompts = pa.array([prompt.removesuffix(begun) for _, prompt, begun in rows], pa.string())
    texts, prompt_texts = pc.fill_null(answers, ""), pc.fill_null(prompts, "")
    wrong = tagged = pa.array(np.zeros(len(texts), bool))
    for name in TAGS:
        starts, ends = (pc.count_substring(texts, f"<{slash}{name}>") for slash in ("", "/"))
        here = pc.or_(pc.greater(pc.add(starts, ends), 0), pc.match_substring(prompt_texts, f"<{name}>"))
        tagged = pc.or_(tagged, pc.greater(pc.add(starts, ends), 0))
        wrong = pc.or_(wrong, pc.and_(here, pc.or_(pc.not_equal(starts, 1), pc.not_equal(ends, 1))))
    before = pc.match_substring_regex(texts, r"^\s*[^<\s]")
    after = pc.match_substring_regex(texts, r"</(answer|glue)>\s*[^<\s]")
    return pc.and_(pc.or_(wrong, pc.and_(tagged, pc.or_(before, after))), pc.is_null(episodes))


def _finite(values: Any) -> Any:
    return pc.if_else(pc.is_finite(values), values, None)


def _parts(parts: Any) -> tuple[Any, Any]:
    """Names and values of the reward parts as two list columns, since duckdb rejects a map with a repeated name."""
    return (pa.ListArray.from_arrays(parts.offsets, parts.keys),
            pa.ListArray.from_arrays(parts.offsets, _finite(parts.items)))


def _lengths(batch: _Batch, masks: Any) -> Any:
    """Number of tokens of each answer: the length of its loss mask, which is cheap to read. If a loss mask is missing,
    the token ids are counted instead."""
    if masks.null_count:
        ids = [read_rollouts(place.path, [SCHEMA.field("token_ids")])["token_ids"].combine_chunks()
               for place, _, _ in batch]
        masks = pa.concat_arrays(ids)
    return pc.fill_null(pc.list_value_length(masks), 0)


def _digests(texts: Any) -> Any:
    return pa.array([None if text is None else zlib.crc32(text) for text in texts.cast(pa.binary()).to_pylist()],
                    pa.int64())


def _first_path(media: Any) -> Any:
    """[N] path of the first image or video of each row, relative to the run folder; null if the row has none."""
    offsets = np.asarray(media.offsets)
    first = pa.array(offsets[:-1], mask=offsets[1:] == offsets[:-1])
    return pc.struct_field(media.values, "path").take(first)


def _hashes(media: Any) -> Any:
    """[N] the hashes of each row's media, joined by commas; null if it has no media, or if one hash is null."""
    offsets = np.asarray(media.offsets)
    hashes = pc.struct_field(media.values, "hash").cast(pa.string())
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), hashes), ",")
    return pc.if_else(pa.array(offsets[1:] > offsets[:-1]), joined, None)


def _skipped(place: _Place, error: Exception) -> str:
    return f"{place.run}: skipped {SOURCES[place.source]}/{place.name}: {first_line(error)}"


def _try_pattern(cursor: duckdb.DuckDBPyConnection, pattern: str) -> None:
    try:
        cursor.execute("SELECT regexp_matches('', ?, 'i')", [pattern]).fetchall()
    except duckdb.Error as error:
        raise pattern_error(pattern, str(error)) from None
