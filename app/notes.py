"""Stores flags and comments on rollouts, and tags of runs, in `notes.sqlite` next to the runs. Imports no Gradio.

    notes = Notes("runs")
    notes.put(RolloutKey("quickstart", "train", "train", 12, "00000384", 0), flag="good", comment="counts aloud")
    notes.all(flag="good")
    notes.label("quickstart", tags=("baseline",), archived=True)

A rollout has one comment, and one flag from each annotator, who may be anonymous. `Note.flag` is the latest flag.

The file is created with the first note. Every call opens and closes it, so threads, browser tabs and other programs may
share it. It is in WAL mode, and a call waits up to five seconds if the file is locked."""

import contextlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from urllib.parse import quote

from vlrl.store import utf8

from . import AppError
from .queries import RolloutKey

FILE = "notes.sqlite"
FLAGS = ("good", "bad", "unsure")
"""Possible flags of a rollout. A rollout without a flag has "" in place of a flag."""
MOST_TEXT = 10_000
"""Largest number of characters in a comment."""
MOST_NAME = 60
"""Largest number of characters in an annotator's name or a tag."""
MOST_TAGS = 20
VERSION = 2
_OLD_NAME = "look"  # name of the flag unsure in files of earlier versions
_WAIT_S = 5.0
_CHANGING_S = 1.0
_COLUMNS = ("run", "source", "split", "step", "group_id", "rollout", "flag", "comment", "sample", "reward", "changed")
_KEYS = _COLUMNS[:6]
"""The fields of RolloutKey as columns; `group` and `index` are SQL keywords."""
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
"""SQL of the tables added in version 2 of the file format."""
_TABLES = {"notes": _COLUMNS, "verdicts": (*_KEYS, "author", "flag", "changed"), "runs": ("run", "tags", "archived")}


@dataclass(frozen=True)
class Note:
    """The flag and the comment on one rollout."""

    key: RolloutKey
    flag: str = ""
    """One of FLAGS, or "" for no flag."""
    comment: str = ""
    sample: str = ""
    """Id of the sample, to show in the list."""
    reward: float | None = None
    changed: float = 0.0
    """Unix time of the last change."""


@dataclass(frozen=True)
class Label:
    """The tags of a run, and whether it is archived."""

    tags: tuple[str, ...] = ()
    archived: bool = False


class Notes:
    """The notes on a folder of runs. Every method except `problem` raises AppError if the notes file cannot be used."""

    def __init__(self, root: str | Path):
        self.path = Path(root).resolve() / FILE

    def get(self, key: RolloutKey) -> Note | None:
        """The note on one rollout; None if there is no such note."""
        notes = self._select(f"WHERE {_THIS}", _values(key))
        return notes[0] if notes else None

    def all(self, run: str | None = None, flag: str | None = None, text: str = "", by: str = "") -> list[Note]:
        """The notes, latest first. `run`, `flag` and `text` (part of the comment or sample id) select among them. With
        `by`, only the notes on rollouts that this annotator flagged, each with the flag of this annotator."""
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
        """Keys of the rollouts with a flag or comment, for `Query.flagged`; with `by` only those that `by` flagged."""
        return tuple(note.key for note in (self.all(by=by) if by else self._select("", ())))

    def verdicts(self, run: str | None = None) -> dict[RolloutKey, dict[str, str]]:
        """Flags as {rollout key: {annotator: flag}}, of one run or of all runs; "" is the anonymous annotator."""
        where, values = ("", ()) if run is None else ("WHERE run = ?", (utf8(run),))
        flags: dict[RolloutKey, dict[str, str]] = {}
        for *key, author, flag in self._rows(f"{', '.join(_KEYS)}, author, flag FROM verdicts {where}", values):
            run, source, split, step, group, index = key
            if isinstance(step, int) and isinstance(index, int) and flag in FLAGS:
                named = RolloutKey(str(run), str(source), str(split), step, str(group), index)
                flags.setdefault(named, {})[str(author)] = flag
        return flags

    def labels(self) -> dict[str, Label]:
        """Run id -> its Label, for every run that has tags or is archived."""
        rows = self._rows("run, tags, archived FROM runs", ())
        return {str(run): Label(tuple(str(tags).split("\n")) if tags else (), bool(archived))
                for run, tags, archived in rows}

    def label(self, run: str, *, tags: Sequence[str] | None = None, archived: bool | None = None) -> Label:
        """Sets the tags of a run, its archived state, or both; None leaves a value unchanged. Returns the resulting
        label. Raises AppError for a tag longer than MOST_NAME, more than MOST_TAGS tags, and a read-only folder."""
        words = None if tags is None else list(dict.fromkeys(
            utf8(" ".join(tag.split())) for tag in tags if tag.strip()))
        if words and (len(words) > MOST_TAGS or max(map(len, words)) > MOST_NAME):
            raise AppError(f"{len(words)} tags of up to {max(map(len, words))} characters: a run can have at most "
                           f"{MOST_TAGS} tags of at most {MOST_NAME} characters")
        text = None if words is None else "\n".join(words)
        with self._open(write=True) as base:
            base.execute("INSERT INTO runs VALUES (?, ?, ?) ON CONFLICT (run) DO UPDATE SET tags = coalesce(?, tags), "
                         "archived = coalesce(?, archived)",
                         (utf8(run), text or "", bool(archived), text, archived))
            base.execute("DELETE FROM runs WHERE tags = '' AND archived = 0")
        return self.labels().get(run, Label())

    def put(self, key: RolloutKey, *, flag: str | None = None, comment: str | None = None, sample: str = "",
            reward: float | None = None, by: str = "") -> Note | None:
        """Sets the flag by annotator `by`, the comment, or both; None leaves a value unchanged. `sample` (an id) and
        `reward` are stored for the list of notes. Returns the resulting note; None after deleting a note without
        flag and comment. Raises AppError for an unknown flag, a comment longer than MOST_TEXT, a name longer than
        MOST_NAME, and a read-only folder."""
        if len(by) > MOST_NAME:
            raise AppError(f"the annotator's name has {len(by)} characters; the limit is {MOST_NAME}")
        if flag is not None and flag not in ("", *FLAGS):
            raise AppError(f"unknown flag {flag!r}: choose one of {', '.join(FLAGS)}")
        if comment is not None and len(comment) > MOST_TEXT:
            raise AppError(f"the comment has {len(comment)} characters; the limit is {MOST_TEXT}")
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
        """The reason why notes cannot be read or written, as a text for the page; "" if there is no problem."""
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
        if not os.path.lexists(self.path):
            return []
        with self._open(write=False) as base:
            return base.execute(f"SELECT {query}", values).fetchall() if _version(base, self.path) >= least else []

    @contextlib.contextmanager
    def _open(self, write: bool) -> Iterator[sqlite3.Connection]:
        """Context manager that checks the notes file and yields a connection to it; with `write`, in a transaction."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise AppError(f"{self.path} is a link or a folder, but notes need a regular file: move the link or "
                           "folder away")
        try:
            with contextlib.closing(self._connect("rwc" if write else "ro")) as base:
                if write:
                    with contextlib.suppress(sqlite3.OperationalError):  # else the previous mode is kept
                        base.execute("PRAGMA journal_mode = WAL")
                    base.execute("BEGIN IMMEDIATE")
                    if _version(base, self.path) < VERSION:
                        for statement in (_TABLE, *_NEW_TABLES):
                            base.execute(statement)
                        base.execute(f"PRAGMA user_version = {VERSION}")
                else:
                    base.execute("BEGIN")  # read a consistent snapshot
                with base:
                    yield base
        except (sqlite3.Error, OverflowError) as error:
            raise AppError(_reason(error, self.path)) from None

    def _connect(self, mode: str) -> sqlite3.Connection:
        """Opens the notes file in the SQLite mode "ro" or "rwc". In a read-only folder, where WAL files cannot be
        created, the file is opened as immutable."""
        end = time.monotonic() + _CHANGING_S
        while True:
            try:
                return self._connected(f"mode={mode}")
            except sqlite3.OperationalError as error:
                if mode != "ro" or not _is_read_only(error):
                    raise
            if time.monotonic() > end or not os.access(self.path.parent, os.W_OK):
                return self._connected("mode=ro&immutable=1")
            time.sleep(0.01)  # another program is creating or removing the WAL files

    def _connected(self, options: str) -> sqlite3.Connection:
        base = sqlite3.connect(f"file:{quote(str(self.path))}?{options}", uri=True, timeout=_WAIT_S,
                               isolation_level=None)
        try:
            base.execute("PRAGMA trusted_schema = OFF")  # the file may come from anyone
            base.text_factory = lambda text: text.decode("utf-8", "replace")
            base.execute("BEGIN")  # another program may be creating the tables
            _version(base, self.path)
            base.execute("COMMIT")
        except BaseException:
            base.close()
            raise
        return base


def _version(base: sqlite3.Connection, path: Path) -> int:
    """The format version of the open notes file; 0 if it is empty. Raises AppError if it is not a notes file."""
    version = base.execute("PRAGMA user_version").fetchone()[0]
    tables = base.execute("SELECT type, name FROM sqlite_master").fetchall()
    if not tables and version == 0:
        return 0
    if version > VERSION:
        raise AppError(f"{path} was written by a newer vlrl (format version {version}; this vlrl reads up to "
                       f"{VERSION}): upgrade vlrl")
    wanted = {"notes": _COLUMNS} if version == 1 else _TABLES
    columns = {name: tuple(row[1] for row in base.execute(f"PRAGMA table_info({name})")) for name in wanted}
    if sorted(tables) != sorted(("table", name) for name in wanted) or columns != wanted or version < 1:
        raise AppError(f"{path} is not a notes file: move the file away. The next note creates a new file")
    return version


def _verdict(base: sqlite3.Connection, key: tuple, by: str, flag: str) -> str:
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
        return f"another program has locked {path.name} for {_WAIT_S:g} s; try again"
    if _is_read_only(error):
        return _read_only(path)
    return f"{path} cannot be used ({error}): move the file away. The next note creates a new file"


def _read_only(path: Path) -> str:
    return (f"Notes cannot be written, because {path.parent} is read-only for this program; existing notes are shown. "
            "Make the folder writable, or open a copy of it.")


def _note(row: tuple) -> Note:
    texts = {name: str(row[i]) for i, name in enumerate(_COLUMNS)}
    reward, changed = (value if isinstance(value, float) else None for value in row[9:])
    key = RolloutKey(texts["run"], texts["source"], texts["split"], row[3], texts["group_id"], row[5])
    return Note(key, "unsure" if texts["flag"] == _OLD_NAME else texts["flag"], texts["comment"], texts["sample"],
                reward, changed or 0.0)


def _values(key: RolloutKey) -> tuple:
    return tuple(utf8(value) if isinstance(value, str) else int(value) for value in key)


@dataclass(frozen=True)
class Pair:
    """The agreement of the annotators `a` and `b` on the `n` answers that both have flagged."""

    a: str
    b: str
    n: int
    same: int
    """Number of answers to which both annotators gave the same flag."""
    kappa: float | None
    """Cohen's kappa in [-1, 1]; None if all flags of both annotators are the same flag."""


def kappa(flags: Sequence[tuple[str, str]]) -> float | None:
    """Cohen's kappa of (flag by the first annotator, flag by the second annotator) for each answer: (observed agreement
    - expected agreement) / (1 - expected agreement). None for no answers, or if the expected agreement is 1."""
    if not flags:
        return None
    n, first, second = len(flags), Counter(a for a, _ in flags), Counter(b for _, b in flags)
    observed = sum(a == b for a, b in flags) / n
    expected = sum(first[flag] * second[flag] for flag in first) / n**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def pairs(verdicts: Iterable[Mapping[str, str]]) -> list[Pair]:
    """Compares every two annotators who flagged at least one common answer; sorted by the number of common answers,
    largest first. `verdicts` holds {annotator: flag} for each answer."""
    common: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for flags in verdicts:
        for a, b in combinations(sorted(flags), 2):
            common.setdefault((a, b), []).append((flags[a], flags[b]))
    agreements = [Pair(a, b, len(both), sum(x == y for x, y in both), kappa(both)) for (a, b), both in common.items()]
    return sorted(agreements, key=lambda pair: (-pair.n, pair.a, pair.b))
