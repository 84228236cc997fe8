"""The status of a run, read during or after the run from files in its folder: the heartbeat, the lock, and the last
lines of the .jsonl files.

Does not import torch. If a file is missing or incomplete, the fields that are read from it stay empty."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlrl.errors import RunError, did_you_mean
from vlrl.rewards.boxes import is_number
from vlrl.store.files import open_regular, read_json
from vlrl.store.lock import owner_lives
from vlrl.tools.stages.stage_list import FILE, StageList, read_stages

ACTIVE = ("starting", "running", "stale")  # states in which a process is working on the run
RECENT = 20  # number of steps over which speed and trend are computed
_DEPTH = 3  # levels of subfolders that are searched for runs
_LINES = 200  # lines that are read from the end of each file
_BYTES = 1 << 20
_PATIENCE = 3.0  # a heartbeat older than this many of the longest recent steps is stale,
_LEAST_S = 60.0  # never before this
_UNKNOWN_S = 1800.0  # without a completed step: loading a model and the first evaluation take their time


@dataclass(frozen=True)
class Status:
    """The status of one run. A number is None if it cannot be read from the files."""

    path: str
    state: str
    """One of starting, running, finished, interrupted, failed, stale (the process is alive but reports nothing), dead
    (the process ended without reporting it), unknown (no heartbeat)."""
    step: int | None = None
    steps: int | None = None
    steps_per_minute: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    """Estimated seconds until the run ends, at the speed of the last steps; None if the run is not running."""
    reward: float | None = None
    trend: float | None = None
    """Mean reward of the last RECENT steps minus the mean reward of as many steps before them. With fewer steps, the
    two halves are compared; None with fewer than four steps."""
    evals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # split -> its last line in eval.jsonl
    heartbeat_age_s: float | None = None
    pid: int | None = None
    host: str | None = None
    stages: Sequence[Status] = ()
    """The status of each stage that has begun, if the run has stages. `path`, `state`, `step`, `steps` and `pid` then
    describe the whole run, and the other fields the last stage that has begun."""


def find_runs(path: Path) -> list[Path]:
    """The run folders at or below `path`, sorted by name. Raises RunError if there are none."""
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        if os.path.exists(path):
            raise RunError(f"{path} is not a run folder: it is a file. Name a run folder, e.g. runs/quickstart.")
        beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if os.path.isdir(path.parent) else []
        raise RunError(f"{path} is not a run folder.{did_you_mean(path.name, beside)}")
    runs = [path] if is_run(path) else _below(path, _DEPTH)
    if not runs:
        raise RunError(f"no run in {path}: a run folder holds heartbeat.json, metrics.jsonl or run.lock. Name a run "
                       "folder, or a folder of runs.")
    return runs


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder: it holds heartbeat.json, metrics.jsonl, run.lock or stages.json."""
    return any(os.path.isfile(path / name) for name in ("heartbeat.json", "metrics.jsonl", "run.lock", FILE))


def _below(path: Path, depth: int) -> list[Path]:
    try:
        folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return []
    return [run for p in folders for run in ([p] if is_run(p) else _below(p, depth - 1) if depth > 1 else [])]


def read_status(path: Path, now: float | None = None) -> Status:
    """Reads the status of the run in a folder. `now` is the current time in seconds since 1970."""
    now = time.time() if now is None else now
    stages = read_stages(path)
    if stages is not None:
        return _staged(stages, [read_status(folder, now) for folder in stages.folders], now)
    beat, owner = read_json(path / "heartbeat.json") or {}, read_json(path / "run.lock")
    records = _tail(path / "metrics.jsonl", _LINES)
    lives = owner_lives(owner) if owner else False
    written = _number(beat.get("time"))
    age = None if written is None else max(0.0, now - written)
    longest = max((s for r in records if (s := _number(r.get("time/total_s"))) is not None), default=None)
    state = _state(beat, owner, lives, age, longest)
    last = records[-1] if records else {}
    step = _integer(beat.get("step"))
    if step is None:
        step = next((known + 1 for r in reversed(records) if (known := _integer(r.get("step"))) is not None), None)
    steps, (per_step, tokens_per_s) = _integer(beat.get("steps")), _speed(records)
    left = max(0, steps - step) if steps is not None and step is not None else None
    eta = left * per_step if state == "running" and left is not None and per_step else None
    source = owner if owner and state in ACTIVE else beat
    evals = {str(r["split"]): r for r in _tail(path / "eval.jsonl", _LINES) if r.get("split")}
    return Status(str(path), state, step, steps, 60 / per_step if per_step else None, tokens_per_s, eta,
                  _number(last.get("reward/mean")), _trend(records), evals, age, _integer(source.get("pid")),
                  str(source["host"]) if source.get("host") else None)


def _staged(stage_list: StageList, stages: Sequence[Status], now: float) -> Status:
    """The status of a run with stages, from the status of each stage. `step` and `steps` are sums over the stages,
    `state` and `pid` describe the whole run, and the other fields are those of the last stage that has begun."""
    begun = [s for s in stages if s.state != "unknown" or s.step is not None or s.stages]
    last = begun[-1] if begun else None
    owner = read_json(stage_list.folder / "run.lock")
    lives = owner_lives(owner) if owner else False
    finished = len(stage_list.done) == len(stage_list.stages)
    state = last.state if last and last.state != "unknown" else "starting"
    if finished:
        state = "finished"
    elif lives and state not in ACTIVE:
        state = "running"  # between two stages, or while a stage samples answers
    elif lives is False and state in (*ACTIVE, "finished"):
        state = "dead" if owner or state in ACTIVE else "interrupted"
    steps = [s.steps for s in stages if s.steps is not None]
    source = owner or {}
    shown = last or Status(str(stage_list.folder), state)
    return replace(shown, path=str(stage_list.folder), state=state, step=sum(s.step or 0 for s in stages),
                   steps=sum(steps) if steps else None, pid=_integer(source.get("pid")) or shown.pid, stages=begun)


def _state(beat: Mapping[str, Any], owner: Mapping[str, Any] | None, lives: bool | None, age: float | None,
           longest: float | None) -> str:
    """The state of a run, from its heartbeat `beat` and the `owner` of its lock. `lives`: whether the owner is running
    (None if unknown). `age`: seconds since the heartbeat. `longest`: seconds of the longest recent step."""
    state = beat.get("state")
    state = state if state in ("running", "finished", "interrupted", "failed") else "unknown"
    if lives is False:
        return "dead" if state == "running" or (owner and state == "unknown") else state
    assert owner is not None
    own = beat.get("pid") == owner.get("pid") and beat.get("host") == owner.get("host")
    if not own:
        return "starting"  # what the heartbeat says is from an earlier process
    if state != "running":
        return state
    limit = _UNKNOWN_S if longest is None else max(_LEAST_S, _PATIENCE * longest)
    return "stale" if age is None or age > limit else "running"


def _speed(records: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Returns (seconds per step, tokens per second) over the last RECENT records; None for an unrecorded value."""
    recent = [(s, _number(r.get("tokens_per_s"))) for r in records[-RECENT:] if (s := _number(r.get("time/total_s")))]
    total = sum(s for s, _ in recent)
    timed = sum(s for s, rate in recent if rate is not None)
    rate = sum(s * rate for s, rate in recent if rate is not None) / timed if timed else None
    return (total / len(recent) if recent else None), rate


def _trend(records: Sequence[Mapping[str, Any]]) -> float | None:
    rewards = [v for r in records if (v := _number(r.get("reward/mean"))) is not None]
    size = min(RECENT, len(rewards) // 2)
    if size < 2:
        return None
    return sum(rewards[-size:]) / size - sum(rewards[-2 * size:-size]) / size


def _tail(path: Path, count: int) -> list[dict[str, Any]]:
    """The last `count` complete JSON objects of a .jsonl file, which may still be growing."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - _BYTES))
            lines = file.read().splitlines()[1 if start else 0:]
    except OSError:
        return []
    records = []
    for line in lines[-count:]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
