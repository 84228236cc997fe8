"""The run folder, which is written during training and can be read at any time. Imports no torch.

    config.yaml  env.json  run.lock  heartbeat.json  metrics.jsonl  eval.jsonl  alerts.jsonl  reward.png
    data_sources.json                                 commits of Hub data sets, if the run uses any
    prompts.parquet                                   each prompt used so far, see curriculum/visited.py
    tokenizer.json                                    converts the token ids of rollouts to text (tokenizers.Tokenizer)
    rollouts/step-000012-rank-00000.parquet           one row per rollout, see rollout_rows.py
    eval-rollouts/step-000050-heldout-rank-00000.parquet
    media/<sha256>.<ext>                              each image or video once, see media_files.py
    stored/                                           rollouts copied for replay, see methods/replay/buffer.py
    checkpoints/step-000050/                          see checkpoint.py

In metrics and rollouts, `step` counts from 0. In evaluations and checkpoints, it is the number of completed steps.
Every file except the .jsonl files is written under a temporary name and renamed, so that readers never see an
incomplete file."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.store.files import append_line, environment, json_text, read_json, read_lines, replacing, write_text
from vlrl.store.lock import Lock, NoLock, lock
from vlrl.store.media_files import MediaFiles
from vlrl.store.rollout_rows import ROLLOUT_FILE, SCHEMA, read_rollouts, rollout_table, split_name
from vlrl.types import Group, LoadedMedia

PINS = "data_sources.json"  # name of the file that maps each Hub data set of the config to its commit


class RunFolder:
    """The files of one run. They can be read without preparation. A training run first calls `create`, inside `lock`.
    `media` is the setting `store.media`. Read methods append messages about skipped files and lines to `notes`."""

    def __init__(self, path: str | Path, media: str = "copy"):
        self.path = Path(path)
        self.notes: list[str] = []
        self._media = MediaFiles(self.path, media)
        self._lock: Lock = NoLock()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    # --- writing --------------------------------------------------------------------------------------------------

    def create(self, config: str, seed: int) -> None:
        """Writes config.yaml (the resolved config as text) and env.json. Other files are unchanged."""
        write_text(self.path / "config.yaml", config)
        write_text(self.path / "env.json", json.dumps(environment(seed), indent=2) + "\n")

    def write_tokenizer(self, text: str) -> None:
        """Writes tokenizer.json, which converts token ids to text without the model. Skipped if it has this text."""
        path = self.path / "tokenizer.json"
        if not path.is_file() or path.read_bytes() != text.encode():
            write_text(path, text)

    @contextmanager
    def lock(self, steal: bool = False) -> Iterator[Lock]:
        """Context manager: in the block, this process holds the folder's lock; see lock.lock. Raises RunError if
        another process holds the lock. Write methods raise RunError once the folder has vanished or was taken over."""
        try:
            with lock(self.path / "run.lock", steal) as self._lock:
                yield self._lock
        finally:
            self._lock = NoLock()

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Appends `record`, the metrics of a step, as a line to metrics.jsonl, and waits until it is on the disk. NaN
        and infinities become null."""
        self._lock.check()
        append_line(self.path / "metrics.jsonl", json_text(record))

    def append_eval(self, record: Mapping[str, Any]) -> None:
        """Appends `record`, the results of one evaluation of one split, as a line to eval.jsonl."""
        self._lock.check()
        append_line(self.path / "eval.jsonl", json_text(record))

    def append_timeline(self, step: int, spans: Sequence[tuple[str, float, float]]) -> None:
        """Appends a line to timeline.jsonl for each phase of a step. spans: (phase, start, end), seconds since 1970."""
        if spans:
            append_line(self.path / "timeline.jsonl", "\n".join(
                json_text({"step": step, "phase": name, "start": start, "end": end}) for name, start, end in spans))

    def heartbeat(self, record: Mapping[str, Any]) -> None:
        """Replaces heartbeat.json by `record` plus time (seconds since 1970), pid and host. Expected keys of `record`:
        step, steps, state (running, finished, failed, interrupted), reward, eta_s. Writes nothing unless this process
        holds the lock."""
        beat = {**record, "time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        if self._lock.owned:
            write_text(self.path / "heartbeat.json", json_text(beat), sync=False)

    def truncate(self, step: int, *, evaluated: bool = True) -> None:
        """Removes what a run wrote after its checkpoint of `step` completed steps, and temporary files.

        Keeps metrics and rollouts of steps < `step`, and evaluations up to `step`. With `evaluated=False`, the
        evaluation after `step` steps is removed too, because it will be repeated. `truncate(0, evaluated=False)`
        empties a run that starts over."""
        last = step if evaluated else step - 1
        for name in ("metrics.jsonl", "alerts.jsonl", "timeline.jsonl", "rejected.jsonl"):
            self._keep_lines(name, lambda record: record.get("step", 0) < step)
        self._keep_lines("eval.jsonl", lambda record: record.get("step", 0) <= last)
        for folder, first in (("rollouts", step), ("eval-rollouts", last + 1)):
            for file, steps, _ in self.rollout_files(folder):
                if steps.start >= first:
                    file.unlink()
        if not step:
            (self.path / "prompts.parquet").unlink(missing_ok=True)  # it may describe other data
            shutil.rmtree(self.path / "stored", ignore_errors=True)
        for folder in (".", "rollouts", "eval-rollouts", "media", "checkpoints"):
            for temporary in (self.path / folder).glob(".*.tmp"):
                temporary.unlink()

    def write_rollouts(self, step: int, rank: int, groups: Sequence[Group],
                       per_token: Mapping[str, Sequence[np.ndarray | None]] | None = None,
                       split: str | None = None) -> Path:
        """Writes the rollouts of `groups`, and their media, as one parquet file, and returns its path.

        `per_token` holds, for keys of PER_TOKEN, one [T] array (or None) per rollout in the order of the groups. With
        `split`, the rollouts belong to an evaluation after `step` completed steps and are written to eval-rollouts.
        Rollouts of variants that are not trained on come last."""
        self._lock.check()
        name = f"step-{step:06d}-{split_name(split) + '-' if split else ''}rank-{rank:05d}.parquet"
        path = self.path / ("eval-rollouts" if split else "rollouts") / name
        rows = rollout_table(step, groups, per_token or {}, self.write_media)
        with replacing(path) as temporary:
            pq.write_table(rows, temporary, compression="zstd")
        return path

    def write_media(self, media: LoadedMedia) -> str | None:
        """Stores an image or video once in media/ (media_files.py), and returns its path inside the run folder."""
        return self._media.write(media)

    def _keep_lines(self, name: str, keep: Callable[[dict[str, Any]], bool]) -> None:
        if (self.path / name).exists():
            lines = [json_text(record) + "\n" for record in self._lines(name) if keep(record)]
            write_text(self.path / name, "".join(lines))

    # --- reading --------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl. An incomplete last line is left out."""
        return self._lines("metrics.jsonl")

    def evals(self) -> list[dict[str, Any]]:
        """Returns the lines of eval.jsonl. An incomplete last line is left out."""
        return self._lines("eval.jsonl")

    def last_heartbeat(self) -> dict[str, Any]:
        """Returns the content of heartbeat.json; {} if it does not exist."""
        return read_json(self.path / "heartbeat.json") or {}

    def rollouts(self, step: int | None = None, *, split: str | None = None,
                 columns: Sequence[str] | None = None) -> pa.Table:
        """Returns the training rollouts of one step or of all steps; with `split`, the rollouts of evaluations of that
        split. `columns` selects columns (default: all). Unreadable files, and files with a newer schema, are skipped
        and named in `notes`."""
        fields = [SCHEMA.field(name) for name in columns or SCHEMA.names]
        tables = [pa.schema(fields).empty_table()]
        for file, steps, name in self.rollout_files("eval-rollouts" if split else "rollouts"):
            if (step is None or step in steps) and (split is None or name == split_name(split)):
                try:
                    tables.append(read_rollouts(file, fields, step))
                except (pa.ArrowException, OSError, ValueError) as error:
                    self.notes.append(f"skipped {file}: {str(error).splitlines()[0]}")
        return pa.concat_tables(tables)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path, records, bad = self.path / name, list[dict[str, Any]](), 0
        try:
            for number, (line, _) in enumerate(read_lines(path) if os.path.lexists(path) else (), 1):
                if bad:  # an incomplete last line is not reported
                    self.notes.append(f"skipped line {bad} of {path}: not a JSON object")
                bad = 0
                try:
                    records.append(dict(json.loads(line)))
                except (ValueError, TypeError, RecursionError):
                    bad = number
        except OSError as error:
            self.notes.append(f"skipped {path}: {error.strerror}")
        return records

    def rollout_files(self, folder: str) -> Iterator[tuple[Path, range, str | None]]:
        """Yields (file, range of its steps, split) for each rollout file, sorted by name. The split is None for
        rollouts of training. folder: "rollouts" or "eval-rollouts"."""
        for file in sorted((self.path / folder).glob("*.parquet")):
            if (match := ROLLOUT_FILE.fullmatch(file.name)) and not file.is_file():
                self.notes.append(f"skipped {file}: it is not a regular file")
            elif match:
                yield file, range(int(match[1] or match[3]), int(match[1] or match[4]) + 1), match[2]


def comparable(evals: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the lines of eval.jsonl that can be compared with the last line of the same split. If a split's data
    changed before a resume, the first line after the resume has the key `changed`, and the split's earlier lines are
    left out."""
    since = {line.get("split"): i for i, line in enumerate(evals) if line.get("changed")}
    return [line for i, line in enumerate(evals) if i >= since.get(line.get("split"), 0)]
