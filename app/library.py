"""The runs below one folder: state, metrics, evaluations and settings. Imports no torch.

A run's id is its path relative to the root folder, with "/": "quickstart", "sweep/a1". If the root is itself a run
folder, its only run has the id ".". No file outside the root is read, not even through a link. Thread-safe."""

import math
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vlrl.errors import did_you_mean
from vlrl.store import RunFolder, utf8
from vlrl.store.files import read_json
from vlrl.tools.experiments import status
from vlrl.tools.stages.stage_list import FILE, read_stages

from . import AppError
from .html import finite
from .textfiles import BadFile, JsonLines, flat, read_yaml

_STATE = {"starting": "running", "dead": "stale"}  # state in status.py -> RunInfo.state, where they differ
_DEPTH = 5  # levels of folders below the root that are searched for runs
_MOST_FOLDERS = 20_000
_NOT_WALKED = {"media", "checkpoints", "rollouts", "eval-rollouts", "__pycache__", "node_modules"}
_SCAN_S = 1.0  # the folders are searched again after this time
_SMALL = 1 << 20  # largest size in bytes of config.yaml, env.json, heartbeat.json, run.lock
_WATCHED = ("heartbeat.json", "run.lock", "metrics.jsonl", "eval.jsonl", "config.yaml", "env.json", FILE)


@dataclass(frozen=True)
class RunInfo:
    """Summary of a run for the list of runs. Numbers are None if the run's files do not contain them."""

    id: str
    path: Path
    state: str
    """running, finished, failed, interrupted, unknown, or stale.

    stale: the run's files say that it is running, but it has no recent heartbeat or no live process."""
    task: str = ""
    model: str = ""
    step: int | None = None
    """Number of completed steps."""
    steps: int | None = None
    reward: float | None = None
    """Mean reward of the last step."""
    started: float | None = None
    """Unix time of the last start, which may be a resume."""
    duration_s: float | None = None
    """Seconds from `started` until now for a running run, else until its last heartbeat."""
    eta_s: float | None = None
    """Estimated seconds to completion, from the speed of the last steps; None unless the run is running."""
    notes: tuple[str, ...] = ()
    """Descriptions of problems with the run's files."""
    part_of: str = ""
    """Id of the multi-stage run that has this run as a stage; "" if this run is not a stage."""
    head: str = ""
    """Id of the outermost multi-stage run that contains this run; its own id if it is not a stage."""


class Library:
    """The run folders at or below the folder `root`. Raises AppError if `root` is not a folder."""

    def __init__(self, root: str | Path):
        if not os.path.isdir(root):
            raise AppError(f"{root} is not a folder. Name a folder of runs, e.g. `vlrl app runs`.")
        self.root = Path(root).resolve()
        self.skipped: tuple[str, ...] = ()
        """Folders that were not searched for runs, with reasons."""
        self._lock = threading.RLock()
        self._paths: dict[str, Path] = {}
        self._scanned = -math.inf
        self._infos: dict[str, tuple[Any, float, RunInfo]] = {}
        self._settings: dict[str, tuple[Any, dict[str, Any], str]] = {}
        self._lines: dict[tuple[str, str], JsonLines] = {}

    def runs(self) -> list[RunInfo]:
        """Lists every run, latest start first; each multi-stage run is followed by its stages in order. Fast enough to
        be called every two seconds."""
        with self._lock:
            paths = self._scan()
            for cache in (self._infos, self._settings):
                for id in cache.keys() - paths.keys():
                    del cache[id]
            infos = [self._info(id, path) for id, path in paths.items()]
        heads = {info.id: info for info in infos if not info.part_of}
        places = {info.id: place for place, info in enumerate(infos)}

        def order(info: RunInfo) -> tuple[Any, ...]:
            head = heads.get(info.head, info)
            return -(head.started or 0.0), head.id, places[info.id]

        return sorted(infos, key=order)

    def run(self, id: str) -> RunInfo:
        """The summary of one run. Raises AppError for an unknown id."""
        with self._lock:
            return self._info(id, self.path(id))

    def path(self, id: str) -> Path:
        """The path of a run's folder. Raises AppError for an id that `runs` does not list."""
        with self._lock:
            folder = (self._scan().get(id) or self._scan(fresh=True).get(id)) if isinstance(id, str) else None
        if folder is None:
            word = str(id)[:200]
            raise AppError(f"there is no run {word!r} in {self.root}.{did_you_mean(word, self._paths)}")
        return folder

    def folder(self, id: str) -> RunFolder:
        """A RunFolder for reading the run; it reads nothing outside the root. Raises AppError for an unknown id."""
        return _ContainedRunFolder(self.path(id), self.root)

    def _scan(self, fresh: bool = False) -> dict[str, Path]:
        with self._lock:
            if fresh or time.monotonic() - self._scanned > _SCAN_S:
                walk = _Walk(self.root)
                self._paths, self.skipped = dict(walk.runs()), tuple(walk.skipped)
                self._scanned = time.monotonic()
            return self._paths

    def metrics(self, id: str) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, oldest first: `step` (int), and metrics by name, each finite or None."""
        return self._read_lines(id, "metrics.jsonl")

    def evals(self, id: str) -> list[dict[str, Any]]:
        """The records of eval.jsonl, oldest first; each has `step` (int) and `split` (str)."""
        return [record for record in self._read_lines(id, "eval.jsonl") if isinstance(record.get("split"), str)]

    def alerts(self, id: str) -> list[dict[str, Any]]:
        """The records of alerts.jsonl, oldest first."""
        return self._read_lines(id, "alerts.jsonl")

    def settings(self, id: str) -> dict[str, Any]:
        """The settings in config.yaml by dotted name, e.g. "train.lr"; {} if the file is unreadable."""
        return dict(self._config(id, self.path(id))[0])

    def diff(self, a: str, b: str) -> list[tuple[str, Any, Any]]:
        """(name, value in run a, value in run b) for each setting that differs; a value is None if it is not set. The
        setting run.dir is ignored."""
        first, second = self.settings(a), self.settings(b)
        names = [*first, *(name for name in second if name not in first)]
        return [(name, first.get(name), second.get(name)) for name in names
                if name != "run.dir" and first.get(name) != second.get(name)]

    def notes(self, id: str) -> tuple[str, ...]:
        """Descriptions of problems with the run's files."""
        info = self.run(id)
        for name in ("metrics.jsonl", "eval.jsonl", "alerts.jsonl"):
            self._read_lines(id, name)
        with self._lock:
            remarks = [note for (run, _), lines in self._lines.items() if run == id for note in lines.notes]
        return tuple(dict.fromkeys((*info.notes, *remarks)))

    def file(self, id: str, name: str) -> Path | None:
        """The path of a regular file of a run, such as "checkpoints/step-000050/tokenizer.json"; None unless it lies
        inside the root. Raises AppError for an unknown id."""
        return inside(self.path(id) / name, self.root)

    def _read_lines(self, id: str, name: str) -> list[dict[str, Any]]:
        path = self.path(id)
        with self._lock:
            lines = self._lines.setdefault((id, name), JsonLines(name))
            return list(lines.read(inside(path / name, self.root)))

    def _config(self, id: str, path: Path) -> tuple[dict[str, Any], str]:
        file = inside(path / "config.yaml", self.root)
        signature = _signature(file)
        with self._lock:
            if id not in self._settings or self._settings[id][0] != signature:
                settings, wrong = {}, ""
                try:
                    settings = flat(read_yaml(file, _SMALL)) if file else {}
                except BadFile as error:
                    wrong = f"config.yaml cannot be read: {error}"
                if file is None and os.path.lexists(path / "config.yaml"):
                    wrong = f"config.yaml is not read: it is not a regular file inside {self.root}"
                self._settings[id] = (signature, settings, wrong)
            return self._settings[id][1:]

    def _info(self, id: str, path: Path) -> RunInfo:
        signature = tuple(_signature(path / name) for name in _WATCHED)
        known = self._infos.get(id)
        if known and known[0] == signature:
            alive = known[2].state in ("running", "stale")  # no file records whether its process is alive
            if not alive or time.monotonic() - known[1] < _SCAN_S:
                return known[2]
        info = self._read_info(id, path)
        self._infos[id] = (signature, time.monotonic(), info)
        return info

    def _read_info(self, id: str, path: Path) -> RunInfo:
        settings, wrong = self._config(id, path)
        notes = [wrong] if wrong else []
        refused = [name for name in _WATCHED if name != "config.yaml" and
                   os.path.lexists(path / name) and not _readable(inside(path / name, self.root), name)]
        notes += [f"{name} is not read: it is too large, or not a regular file inside {self.root}" for name in refused]
        report = status.Status(str(path), "unknown")
        if not {"heartbeat.json", "run.lock", "metrics.jsonl", "eval.jsonl"} & set(refused):
            try:
                report = status.read_status(path)
            except Exception as error:  # the files may contain anything, e.g. an invalid process id
                notes.append(f"its state cannot be read: {type(error).__name__} in heartbeat.json or run.lock")
            if (path / "heartbeat.json").exists() and read_json(path / "heartbeat.json") is None:
                notes.append("heartbeat.json is not a complete JSON object")
        state = _STATE.get(report.state, report.state)
        started = None if "env.json" in refused else _started(path)
        ended = time.time() if state == "running" else _beat(path) if "heartbeat.json" not in refused else None
        lasted = ended - started if ended is not None and started is not None and ended >= started else None
        steps = report.steps if report.steps is not None else _whole(settings.get("steps"))
        part_of, head = self._whose(id, path)
        eta_s = finite(report.eta_s) if state == "running" else None
        return RunInfo(id, path, state, _task(settings), _word(settings.get("model.name")), _whole(report.step),
                       _whole(steps), finite(report.reward), started, lasted, eta_s, tuple(notes), part_of, head)

    def _whose(self, id: str, path: Path) -> tuple[str, str]:
        """Returns the id of the multi-stage run that directly contains this run, and the id of the outermost run that
        contains it. ("", id) if no run contains it."""
        around = path.parent
        if id == "." or not around.is_relative_to(self.root) or not (around / FILE).is_file():
            return "", id
        part_of = around.relative_to(self.root).as_posix()
        return part_of, self._whose(part_of, around)[1]


def _task(settings: Mapping[str, Any]) -> str:
    several = settings.get("tasks")
    labels = [_word(t.get("label") or t.get("name")) for t in several if isinstance(t, Mapping)] \
        if isinstance(several, list) else []
    return " + ".join(labels)[:200] or _word(settings.get("task.name"))


class _Walk:
    def __init__(self, root: Path):
        self.root, self.skipped, self._left = root, list[str](), _MOST_FOLDERS

    def runs(self) -> Iterator[tuple[str, Path]]:
        if _is_run(self.root):
            yield from self._with_stages(self.root)
        else:
            yield from self._below(self.root, _DEPTH)

    def _with_stages(self, path: Path) -> Iterator[tuple[str, Path]]:
        yield path.relative_to(self.root).as_posix(), path
        known = read_stages(path) if _readable(inside(path / FILE, self.root), FILE) else None
        for folder in known.folders if known else ():
            if folder.is_dir() and not folder.is_symlink() and _is_run(folder):
                yield from self._with_stages(folder)

    def _below(self, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
        try:
            with os.scandir(folder) as entries:
                names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        except OSError as error:
            self.skipped.append(f"{utf8(str(folder))}: {error.strerror}")
            return
        for name in names:
            path = folder / name
            self._left -= 1
            if self._left == 0:
                self.skipped.append(f"only the first {_MOST_FOLDERS} folders were searched: name a smaller folder")
            if self._left <= 0:
                return
            if utf8(str(path)) != str(path):
                self.skipped.append(f"{utf8(str(path))}: its name is not valid UTF-8")
            elif _is_run(path):
                yield from self._with_stages(path)
            elif depth > 1 and not name.startswith(".") and name not in _NOT_WALKED:
                yield from self._below(path, depth - 1)


class _ContainedRunFolder(RunFolder):
    def __init__(self, path: Path, root: Path):
        super().__init__(path)
        self._root = root

    def last_heartbeat(self) -> dict[str, Any]:
        return super().last_heartbeat() if _readable(inside(self.path / "heartbeat.json", self._root), "") else {}

    def _lines(self, name: str) -> list[dict[str, Any]]:
        lines = JsonLines(name)
        records = lines.read(inside(self.path / name, self._root))
        self.notes += lines.notes
        return records

    def rollout_files(self, folder: str) -> Iterator[tuple[Path, range, str | None]]:
        if not inside_folder(self.path / folder, self._root):
            return
        for file, steps, split in super().rollout_files(folder):
            if inside(file, self._root) if os.path.islink(file) else os.path.isfile(file):
                yield file, steps, split
            else:
                self.notes.append(f"skipped {file.name}: it is not a regular file inside {self._root}")


def inside(path: Path, root: Path) -> Path | None:
    """Returns `path` with links resolved if that is a regular file inside `root`, else None. Does not open the file."""
    try:
        real = path.resolve(strict=True)
        return real if real.is_relative_to(root) and stat.S_ISREG(real.stat().st_mode) else None
    except (OSError, ValueError, RuntimeError):  # missing, a NUL in its name, links in a circle
        return None


def inside_folder(folder: Path, root: Path) -> bool:
    """Whether `folder`, with links resolved, lies inside `root`."""
    try:
        return folder.resolve().is_relative_to(root)
    except (OSError, RuntimeError):
        return False


def _is_run(path: Path) -> bool:
    return status.is_run(path) or any(_holds_parquet(path / name) for name in ("rollouts", "eval-rollouts"))


def _holds_parquet(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".parquet") for entry in entries)
    except OSError:
        return False


def _readable(path: Path | None, name: str) -> bool:
    return path is not None and (name.endswith(".jsonl") or path.stat().st_size <= _SMALL)


def _signature(path: Path | None) -> Any:
    try:
        info = path.stat() if path else None
    except (OSError, ValueError):
        return None
    return info and (info.st_mtime_ns, info.st_size, info.st_ino)


def _started(path: Path) -> float | None:
    started = (read_json(path / "env.json") or {}).get("started")
    try:
        return datetime.strptime(str(started), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError, OSError):
        pass
    try:
        return (path / "config.yaml").stat().st_mtime
    except OSError:
        return None


def _beat(path: Path) -> float | None:
    return finite((read_json(path / "heartbeat.json") or {}).get("time"))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


def _word(value: Any) -> str:
    return "" if value is None or isinstance(value, (Mapping, list)) else str(value)[:300]
