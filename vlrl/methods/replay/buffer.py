"""A replay buffer of rollouts from run folders, with an index in memory and the rows in memory-mapped files.

    stored/000012-00003.arrow     rows copied from one rollout file before step 12; rows of a group are adjacent
    stored/taken.jsonl            one line per step: files examined, rows taken, and rows refused with reasons

Each rollout file is examined once, in the step in which it is first seen, and its usable rows are copied. So the folder
of another run may grow, change or vanish. A resumed run takes the rows that `taken.jsonl` lists for each step, and
draws the same groups. Does not import torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vlrl.errors import RunError
from vlrl.methods.replay.rows import KEPT, RowLimits, UnreadableFile, read_stored
from vlrl.store import ROLLOUT_FILE
from vlrl.store.files import append_line, read_small, replacing

FOLDER, TAKEN = "stored", "taken.jsonl"
_log = logging.getLogger(__name__)

GROUPS = np.dtype([("key", "u8"), ("file", "i4"), ("first", "i4"), ("size", "i4"), ("own", "?"), ("age_from", "i4"),
                   ("best", "f8"), ("spread", "f8")])
"""Data type of the buffer's index, which has one record per group. key: hash of the group's name. file, first, size:
the copied file and the group's rows in this file. own: whether the group is from this run. age_from: the step from
which the group's age is counted. For a group of this run, that is the number of training steps behind the weights
that sampled it, else the step in which the group was copied. best: largest reward - mean reward. spread: largest -
smallest reward. best and spread are NaN for groups of other runs, whose rewards are not trusted."""

Weigh = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function (groups [n] of dtype GROUPS, their ages [n] in steps) -> [n] sampling weights."""


@dataclass(frozen=True, eq=False)
class StoredGroup:
    """The stored rollouts of one group. own: whether the group is from this run. age: in steps."""

    name: str
    own: bool
    age: int
    rows: list[dict[str, Any]]
    """One dict per rollout, with the columns of KEPT; token ids, masks and log-probabilities are arrays."""


@dataclass(frozen=True)
class SourceFolder:
    """A run folder from which rollouts are copied. own: whether it is this run's folder."""

    path: Path
    own: bool = False

    @property
    def name(self) -> str:
        """The name of the folder in taken.jsonl. Empty for this run's own folder, so that the folder can be renamed."""
        return "" if self.own else str(self.path)


class RolloutBuffer:
    """Holds the newest rollouts of several run folders, at most `capacity` of them. Used by one process only.

    `tokenizer` is the content of this run's tokenizer.json. Folders with a different tokenizer.json are ignored."""

    def __init__(self, folder: Path, sources: Sequence[SourceFolder], limits: RowLimits, capacity: int,
                 tokenizer: str = ""):
        self.folder, self.sources, self.limits, self.capacity = folder / FOLDER, sources, limits, capacity
        self._tokenizer = hashlib.sha256(tokenizer.encode()).digest()
        self.groups = np.zeros(0, GROUPS)
        self.refused: Counter[str] = Counter()
        """Number of rows refused so far, by reason. The reason "file" counts whole files."""
        self._files: list[str] = []
        self._examined: dict[tuple[str, str], tuple[int, int] | None] = {}
        """Maps (folder name, file name) to None for a file that was read, and for an unreadable file to its size and
        modification time. An unreadable file is read again when these change."""
        self._recorded = self._lines()

    @property
    def rollouts(self) -> int:
        """Number of rollouts in the index."""
        return int(self.groups["size"].sum())

    def take(self, step: int) -> None:
        """Adds new rollouts before a step. If `taken.jsonl` already has a line for the step, adds the rollouts listed
        there instead. Raises RunError if a file of `stored/` is missing or damaged."""
        known = False
        while self._recorded and self._recorded[0]["step"] <= step:
            line = self._recorded.pop(0)
            known = line["step"] == step
            for entry in line["files"]:
                self._note(entry, line["step"])
        if not known:
            entries = [*self._looked_at(step)]
            append_line(self.folder / TAKEN, json.dumps({"step": step, "files": entries}))
            for entry in entries:
                self._note(entry, step)

    def _lines(self) -> list[dict[str, Any]]:
        path = self.folder / TAKEN
        lines = read_small(path).splitlines() if path.is_file() else []
        out = []
        for line in lines:
            try:
                out.append(json.loads(line))
            except ValueError:  # a killed process left half a line; its step was not drawn
                continue
        return sorted(out, key=lambda line: line["step"])

    def _looked_at(self, step: int) -> Iterator[dict[str, Any]]:
        """Copies the usable rows of new rollout files, newest file first, while the buffer has room. Yields the entry
        of taken.jsonl for each new file, oldest file first."""
        candidates = [(source, name, place) for source in self.sources for name, place in self._new(source)]
        room, entries = self.capacity, []
        for source, name, place in reversed(candidates):
            entry: dict[str, Any] = {"from": source.name, "name": name, "own": source.own}
            if room <= 0:
                entries.append({**entry, "refused": {"older than the rows that fit": 1}})
                continue
            entries.append({**entry, **self._copied(place, f"{step:06d}-{len(entries):05d}.arrow")})
            room -= entries[-1].get("rows", 0)
        yield from reversed(entries)

    def _new(self, source: SourceFolder) -> list[tuple[str, Path]]:
        folder, names = source.path / "rollouts", []
        try:
            seen = self._examined
            names = [e.name for e in os.scandir(folder) if (source.name, e.name) not in seen
                     or seen[source.name, e.name] not in (None, _signature(folder / e.name))]
        except OSError:
            return []  # the run has no rollouts yet
        if not source.own and names and self._other_tokenizer(source):
            return []
        matched = [(ROLLOUT_FILE.fullmatch(name), name) for name in names]
        return [(name, folder / name) for _, name in sorted((int(m[1] or m[3]), name) for m, name in matched if m)]

    def _other_tokenizer(self, source: SourceFolder) -> bool:
        try:
            other = hashlib.sha256(read_small(source.path / "tokenizer.json")).digest() != self._tokenizer
        except OSError:
            return False  # then rows whose tokens do not decode to their text are refused
        if other and self._examined.setdefault((source.name, ""), (0, 0)) == (0, 0):
            self._examined[source.name, ""] = None
            self.refused["folder with a different tokenizer"] += 1
            _log.warning("algo.stored.runs: %s is from a model with a different tokenizer, so nothing is replayed "
                         "from it. Leave this folder out of algo.stored.runs.", source.path)
        return other

    def _copied(self, place: Path, name: str) -> dict[str, Any]:
        signature = _signature(place)
        try:
            table, refused = read_stored(place, self.limits, self.capacity)
        except UnreadableFile as error:
            _log.warning("algo.stored: %s cannot be replayed: %s", place, error)
            return {"refused": {"file": 1}, "signature": list(signature)}
        if len(table):
            with replacing(self.folder / name) as temporary, pa.ipc.new_file(str(temporary), KEPT) as writer:
                writer.write_table(table.combine_chunks(), max_chunksize=len(table))
        return {"file": name if len(table) else None, "rows": len(table), "refused": dict(refused)}

    def _note(self, entry: dict[str, Any], step: int) -> None:
        signature = entry.get("signature")
        self._examined[entry["from"], entry["name"]] = (int(signature[0]), int(signature[1])) if signature else None
        self.refused.update(entry.get("refused") or {})
        if entry.get("file"):
            fresh = self._indexed(entry, step)
            known = np.isin(fresh["key"], self.groups["key"])
            if known.any():
                self.refused["already taken"] += int(fresh["size"][known].sum())
            self.groups = np.concatenate([self.groups, fresh[~known]])
            sizes = np.cumsum(self.groups["size"][::-1])
            self.groups = self.groups[len(self.groups) - int(np.searchsorted(sizes, self.capacity, "right")):]

    def _indexed(self, entry: dict[str, Any], step: int) -> np.ndarray:
        self._files.append(entry["file"])
        with _mapped(self.folder / entry["file"]) as batch:
            columns = {name: batch.column(name).to_pylist() for name in ("step", "group_id", "policy_step", "reward")}
        names = [*zip(columns["step"], columns["group_id"], strict=True)]
        starts = [i for i in range(len(names)) if not i or names[i] != names[i - 1]]
        out = np.zeros(len(starts), GROUPS)
        for g, (first, end) in enumerate(zip(starts, [*starts[1:], len(names)], strict=True)):
            rewards = np.array(columns["reward"][first:end])
            worth = (rewards.max() - rewards.mean(), np.ptp(rewards)) if entry["own"] else (np.nan, np.nan)
            age_from = min(columns["policy_step"][first:end]) if entry["own"] else step
            out[g] = (_key(entry["from"], *names[first]), len(self._files) - 1, first, end - first, entry["own"],
                      age_from, *worth)
        return out

    def draw(self, count: int, step: int, rng: np.random.Generator, weigh: Weigh,
             max_age: int | None = None, equal_rewards: bool = False) -> list[StoredGroup]:
        """Draws at most `count` different groups, none older than `max_age` steps (None = no limit). `weigh` gives the
        sampling weights of this run's groups; a group of another run has the mean of these weights. A group of this
        run whose rewards are equal is drawn only if `equal_rewards` is set."""
        ages = np.maximum(step - self.groups["age_from"], 0)
        young = ages <= (step if max_age is None else max_age)
        usable = np.flatnonzero((equal_rewards | ~(self.groups["spread"] <= 0)) & young)
        usable = usable[np.argsort(self.groups["key"][usable])]  # the same whichever file, and so process, wrote it
        groups, ages = self.groups[usable], ages[usable]
        if not len(groups):
            return []
        weights = np.asarray(weigh(groups, ages), float)
        weights = np.where(groups["own"], weights, weights[groups["own"]].mean() if groups["own"].any() else 1.0)
        positive = int((weights > 0).sum())
        if not positive:
            return []
        chosen = rng.choice(len(groups), min(count, positive), replace=False, p=weights / weights.sum())
        return [self._read(groups[i], int(ages[i])) for i in chosen]

    def _read(self, group: Any, age: int) -> StoredGroup:
        with _mapped(self.folder / self._files[int(group["file"])]) as batch:
            own = batch.slice(int(group["first"]), int(group["size"]))
            lists = {name: own.column(name) for name in ("token_ids", "loss_mask", "logprobs")}
            rows = own.drop_columns([*lists]).to_pylist()
            for i, row in enumerate(rows):
                row |= {name: column[i].values.to_numpy(zero_copy_only=False).copy() for name, column in lists.items()}
        return StoredGroup(f"stored-{int(group['key']):016x}", bool(group["own"]), age, rows)


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        source = pa.memory_map(str(path))
        batch = pa.ipc.open_file(source).get_batch(0)
    except (pa.ArrowException, OSError) as error:
        raise RunError(f"{path} is missing or damaged ({str(error).splitlines()[0]}), but the run has trained on "
                       "its rollouts: restore the file, or start over with resume=never (the old run is kept in a "
                       "folder next to the new one)."
                       ) from None
    with source:
        yield batch


def _signature(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _key(source: str, step: int, group_id: str) -> int:
    name = json.dumps([source, step, group_id]).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
