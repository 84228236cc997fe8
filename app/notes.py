"""Flags and comments on rollouts, tags of runs, kept in `notes.sqlite` beside the runs. Imports no Gradio.

    notes = Notes("runs")
    notes.put(RolloutKey("quickstart", "train", "train", 12, "00000384", 0), flag="good", comment="counts aloud")
    notes.all(flag="good")
    notes.label("quickstart", tags=("baseline",), archived=True)

A rollout has one comment and a flag of each annotator; somebody without a name is one, too. The note says the flag that
was set last.

The file appears with the first note. Every call opens and closes it, so threads, tabs and other programs may use it at
once: it is in WAL mode, and who finds it locked waits up to five seconds.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from vlrl.store import utf8

from . import AppError
from .queries import RolloutKey

FILE = "notes.sqlite"
FLAGS = ("good", "bad", "unsure")
"""What a rollout may be flagged as; the empty text is no flag."""
MOST_TEXT = 10_000
"""Characters of a comment."""
MOST_NAME = 60
"""Characters of an annotator's name and of a tag."""
MOST_TAGS = 20
VERSION = 2
_OLD_NAME = "look"  # of the flag unsure, in files of earlier versions
_WAIT_S = 5.0
_CHANGING_S = 1.0
_COLUMNS = ("run", "source", "split", "step", "group_id", "rollout", "flag", "comment", "sample", "reward", "changed")
_KEYS = _COLUMNS[:6]
"""As the fields of RolloutKey; `group` and `index` are words of SQL."""
_TABLE = f"""CREATE TABLE IF NOT EXISTS notes (
    run TEXT NOT NULL, source TEXT NOT NULL, split TEXT NOT NULL, step INTEGER NOT NULL, group_id TEXT NOT NULL,
    rollout INTEGER NOT NULL, flag TEXT NOT NULL, comment TEXT NOT NULL, sample TEXT NOT NULL, reward REAL,
    changed REAL NOT NULL, PRIMARY KEY ({', '.join(_KEYS)})) WITHOUT ROWID"""
_THIS = " AND ".join(f"{name} = ?" for name in _KEYS)
_NEW_TABLES = (f"""CREATE TABLE verdicts (
    run TEXT NOT NULL, source TEXT NOT NULL, split TEXT NOT NULL, step INTEGER NOT NULL, group_id TEXT NOT NULL,
    rollout INTEGER NOT NULL, author TEXT NOT NULL, flag TEXT NOT NULL, changed REAL NOT NULL,
    PRIMARY KEY ({', '.join(_KEYS)}, author)) WITHOUT ROWID""",
    """CREATE TABLE runs (run TEXT NOT NULL PRIMARY KEY, tags TEXT NOT NULL, archived INTEGER NOT NULL)
    WITHOUT ROWID""",
    f"INSERT INTO verdicts SELECT {', '.join(_KEYS)}, '', replace(flag, '{_OLD_NAME}', 'unsure'), changed FROM notes "
    "WHERE flag != ''")
"""What version 2 adds to version 1."""
_TABLES = {"notes": _COLUMNS, "verdicts": (*_KEYS, "author", "flag", "changed"), "runs": ("run", "tags", "archived")}


@dataclass(frozen=True)
class Note:
    """What someone remarked on one rollout."""

    key: RolloutKey
    flag: str = ""
    """One of FLAGS, or empty."""
    comment: str = ""
    sample: str = ""
    """Id of the sample, for the list."""
    reward: float | None = None
    changed: float = 0.0
    """Seconds since 1970."""


@dataclass(frozen=True)
class Label:
    """What someone says of a run."""

    tags: tuple[str, ...] = ()
    archived: bool = False


class Notes:
    """The notes of a folder of runs. Every method but `problem` raises AppError for a file that cannot be used."""

    def __init__(self, root: str | Path):
        self.path = Path(root).resolve() / FILE

    def get(self, key: RolloutKey) -> Note | None:
        """Returns the note on one rollout."""
        notes = self._select(f"WHERE {_THIS}", _values(key))
        return notes[0] if notes else None

    def all(self, run: str | None = None, flag: str | None = None, text: str = "", by: str = "") -> list[Note]:
        """Notes, the last changed first: of one run, with one flag, with a text in comment or sample id. With `by`
        those that this annotator flagged, with their own flags.
        """
        if by:
            own = self.verdicts(run)
            notes = [replace(note, flag=own[note.key][by]) for note in self.all(run, text=text)
                     if by in own.get(note.key, ())]
            return [note for note in notes if flag in (None, note.flag)]
        wanted = {"run = ?": run, f"replace(flag, '{_OLD_NAME}', 'unsure') = ?": flag,
                  "instr(lower(comment || ' ' || sample), ?)": text.lower() or None}
        tests = {test: utf8(value) for test, value in wanted.items() if value is not None}
        where = f"WHERE {' AND '.join(tests)}" if tests else ""
        return self._select(f"{where} ORDER BY changed DESC, {', '.join(_KEYS)}", tuple(tests.values()))

    def flagged(self, by: str = "") -> tuple[RolloutKey, ...]:
        """Returns the rollouts with a flag or a comment, with `by` those that this annotator flagged: `Query.flagged`.
        """
        return tuple(note.key for note in (self.all(by=by) if by else self._select("", ())))

    def verdicts(self, run: str | None = None) -> dict[RolloutKey, dict[str, str]]:
        """Returns the flags of one run or of all by rollout and annotator; "" is somebody without a name."""
        where, values = ("", ()) if run is None else ("WHERE run = ?", (utf8(run),))
        flags: dict[RolloutKey, dict[str, str]] = {}
        for *key, author, flag in self._rows(f"{', '.join(_KEYS)}, author, flag FROM verdicts {where}", values):
            run, source, split, step, group, index = key
            if isinstance(step, int) and isinstance(index, int) and flag in FLAGS:
                named = RolloutKey(str(run), str(source), str(split), step, str(group), index)
                flags.setdefault(named, {})[str(author)] = flag
        return flags

    def labels(self) -> dict[str, Label]:
        """Returns what is said of runs, by their ids."""
        rows = self._rows("run, tags, archived FROM runs", ())
        return {str(run): Label(tuple(str(tags).split("\n")) if tags else (), bool(archived))
                for run, tags, archived in rows}

    def label(self, run: str, *, tags: Sequence[str] | None = None, archived: bool | None = None) -> Label:
        """Sets the tags of a run, or whether it is archived, or both; what is None stays. Returns what is there.

        Raises AppError for a tag above MOST_NAME, more than MOST_TAGS, and a folder that cannot be written.
        """
        words = None if tags is None else list(dict.fromkeys(
            utf8(" ".join(tag.split())) for tag in tags if tag.strip()))
        if words and (len(words) > MOST_TAGS or max(map(len, words)) > MOST_NAME):
            raise AppError(f"{len(words)} tags, the longest of {max(map(len, words))} characters, are too many or too "
                           f"long: at most {MOST_TAGS} of {MOST_NAME} characters")
        text = None if words is None else "\n".join(words)
        with self._open(write=True) as base:
            base.execute("INSERT INTO runs VALUES (?, ?, ?) ON CONFLICT (run) DO UPDATE SET tags = coalesce(?, tags), "
                         "archived = coalesce(?, archived)",
                         (utf8(run), text or "", bool(archived), text, archived))
            base.execute("DELETE FROM runs WHERE tags = '' AND archived = 0")
        return self.labels().get(run, Label())

    def put(self, key: RolloutKey, *, flag: str | None = None, comment: str | None = None, sample: str = "",
            reward: float | None = None, by: str = "") -> Note | None:
        """Sets the flag of the annotator `by`, or the comment, or both; what is None stays. A note with neither goes;
        returns what is there.

        Raises AppError for an unknown flag, a comment above MOST_TEXT, a name above MOST_NAME, and a folder that cannot
        be written.
        """
        if len(by) > MOST_NAME:
            raise AppError(f"the annotator's name has {len(by)} characters; {MOST_NAME} is the most")
        if flag is not None and flag not in ("", *FLAGS):
            raise AppError(f"flag {flag!r} is not known; take one of {', '.join(FLAGS)}")
        if comment is not None and len(comment) > MOST_TEXT:
            raise AppError(f"the comment has {len(comment)} characters; {MOST_TEXT} is the most")
        text = None if comment is None else utf8(comment.strip())
        with self._open(write=True) as base:
            flag = None if flag is None else _verdict(base, _values(key), utf8(by), flag)
            base.execute(f"INSERT INTO notes VALUES ({', '.join('?' * len(_COLUMNS))}) "
                         f"ON CONFLICT ({', '.join(_KEYS)}) DO UPDATE SET flag = coalesce(?, flag), "
                         "comment = coalesce(?, comment), changed = excluded.changed",
                         (*_values(key), flag or "", text or "", utf8(sample), reward, time.time(), flag, text))
            base.execute(f"DELETE FROM notes WHERE {_THIS} AND flag = '' AND comment = ''", _values(key))
        return self.get(key)

    def problem(self) -> str:
        """Returns why no note can be written, in words for the page; empty when they can."""
        try:
            self._select("LIMIT 1", ())
        except AppError as error:
            return str(error)
        places = [self.path.parent, *([self.path] if self.path.exists() else [])]
        return "" if all(os.access(place, os.W_OK) for place in places) else _read_only(self.path)

    def _select(self, rest: str, values: tuple) -> list[Note]:
        rows = self._rows(f"{', '.join(_COLUMNS)} FROM notes {rest}", values, least=1)
        return [_note(row) for row in rows if isinstance(row[3], int) and isinstance(row[5], int)]

    def _rows(self, query: str, values: tuple, least: int = VERSION) -> list[tuple]:
        """Returns what SELECT finds; nothing in a file below version `least`, which has no such table."""
        if not os.path.lexists(self.path):
            return []
        with self._open(write=False) as base:
            return base.execute(f"SELECT {query}", values).fetchall() if _version(base, self.path) >= least else []

    @contextlib.contextmanager
    def _open(self, write: bool) -> Iterator[sqlite3.Connection]:
        """Yields the file, opened and checked; with `write` inside a transaction that ends with the block."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise AppError(f"{self.path} is a link or a folder; notes are kept in a file of their own: move it away")
        try:
            with contextlib.closing(self._connect("rwc" if write else "ro")) as base:
                if write:
                    with contextlib.suppress(sqlite3.OperationalError):  # where it is not possible, the old mode does
                        base.execute("PRAGMA journal_mode = WAL")
                    base.execute("BEGIN IMMEDIATE")
                    if _version(base, self.path) < VERSION:
                        for statement in (_TABLE, *_NEW_TABLES):
                            base.execute(statement)
                        base.execute(f"PRAGMA user_version = {VERSION}")
                else:
                    base.execute("BEGIN")  # what is read is of one moment
                with base:
                    yield base
        except (sqlite3.Error, OverflowError) as error:
            raise AppError(_reason(error, self.path)) from None

    def _connect(self, mode: str) -> sqlite3.Connection:
        """Returns the opened file. A folder that cannot be written has no room for WAL's own files: there the file is
        read as it lies.
        """
        end = time.monotonic() + _CHANGING_S
        while True:
            try:
                return self._connected(f"mode={mode}")
            except sqlite3.OperationalError as error:
                if mode != "ro" or not _is_read_only(error):
                    raise
            if time.monotonic() > end or not os.access(self.path.parent, os.W_OK):
                return self._connected("mode=ro&immutable=1")
            time.sleep(0.01)  # another program makes or removes WAL's files just now

    def _connected(self, options: str) -> sqlite3.Connection:
        base = sqlite3.connect(f"file:{quote(str(self.path))}?{options}", uri=True, timeout=_WAIT_S,
                               isolation_level=None)
        try:
            base.execute("PRAGMA trusted_schema = OFF")  # the file may come from anyone
            base.text_factory = lambda text: text.decode("utf-8", "replace")
            base.execute("BEGIN")  # another program may write the tables just now
            _version(base, self.path)
            base.execute("COMMIT")
        except BaseException:
            base.close()
            raise
        return base


def _version(base: sqlite3.Connection, path: Path) -> int:
    """Returns 0 for an empty file, else its version. Raises AppError for a file that holds anything but our tables."""
    version = base.execute("PRAGMA user_version").fetchone()[0]
    tables = base.execute("SELECT type, name FROM sqlite_master").fetchall()
    if not tables and version == 0:
        return 0
    if version > VERSION:
        raise AppError(f"{path} was written by a newer vlrl (version {version}, this one reads {VERSION})")
    wanted = {"notes": _COLUMNS} if version == 1 else _TABLES
    columns = {name: tuple(row[1] for row in base.execute(f"PRAGMA table_info({name})")) for name in wanted}
    if sorted(tables) != sorted(("table", name) for name in wanted) or columns != wanted or version < 1:
        raise AppError(f"{path} is no file of notes: move it away, and a fresh one is begun with the next note")
    return version


def _verdict(base: sqlite3.Connection, key: tuple, by: str, flag: str) -> str:
    """Writes or removes an annotator's flag; returns the flag that was set last, of those that are left."""
    if flag:
        base.execute(f"INSERT OR REPLACE INTO verdicts VALUES ({', '.join('?' * 9)})", (*key, by, flag, time.time()))
    else:
        base.execute(f"DELETE FROM verdicts WHERE {_THIS} AND author = ?", (*key, by))
    last = base.execute(f"SELECT flag FROM verdicts WHERE {_THIS} ORDER BY changed DESC LIMIT 1", key).fetchone()
    return str(last[0]) if last else ""


def _is_read_only(error: Exception) -> bool:
    return "readonly" in str(error) or "unable to open" in str(error)


def _reason(error: Exception, path: Path) -> str:
    if "locked" in str(error) or "busy" in str(error):
        return f"another program has held {path.name} for {_WAIT_S:g} s; try again"
    if _is_read_only(error):
        return _read_only(path)
    return f"{path} cannot be used ({error}): move it away, and a fresh one is begun with the next note"


def _read_only(path: Path) -> str:
    return (f"No notes can be written, for {path.parent} is read-only to this program; those that are there are shown. "
            "Make the folder writable, or look at a copy of it.")


def _note(row: tuple) -> Note:
    """Returns a row whose values may be of any type."""
    texts = {name: str(row[i]) for i, name in enumerate(_COLUMNS)}
    reward, changed = (value if isinstance(value, float) else None for value in row[9:])
    key = RolloutKey(texts["run"], texts["source"], texts["split"], row[3], texts["group_id"], row[5])
    return Note(key, "unsure" if texts["flag"] == _OLD_NAME else texts["flag"], texts["comment"], texts["sample"],
                reward, changed or 0.0)


def _values(key: RolloutKey) -> tuple:
    return tuple(utf8(value) if isinstance(value, str) else int(value) for value in key)
