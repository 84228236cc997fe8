"""The run folder: written while training, read at any time, also in mid-run. Imports no torch.

    config.yaml  env.json  run.lock  heartbeat.json  metrics.jsonl  eval.jsonl  alerts.jsonl  reward.png
    data_sources.json                                 commits of data sets of the Hub, where it reads some
    prompts.parquet                                   each prompt drawn so far, see curriculum/visited.py
    tokenizer.json                                    reads the token ids of the rollouts (tokenizers.Tokenizer)
    rollouts/step-000012-rank-00000.parquet           one row a rollout, SCHEMA below
    eval-rollouts/step-000050-heldout-rank-00000.parquet
    media/<sha256>.<ext>                              each image or video once
    stored/                                           what algo.stored took of rollouts, see stored_rollouts.py
    checkpoints/step-000050/                          see checkpoint.py

`step` counts from 0 in metrics and rollouts; evaluations and checkpoints carry the number of steps completed.
Every file but the two .jsonl is written under a temporary name and renamed, so no reader ever sees half of one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.store.files import append_line, environment, read_json, read_lines, replacing, suffix_of, write_text
from vlrl.store.lock import Lock, Unlocked, lock
from vlrl.types import Completion, Group, LoadedMedia, Prompt, Rollout, Turn

SCHEMA_VERSION = 1
PINS = "data_sources.json"
"""Name of a data set of the Hub as the config has it -> commit."""
_NUMBERS = pa.map_(pa.string(), pa.float64())
_FLOATS = pa.list_(pa.float32())
_TURN = {"start": pa.int32(), "end": pa.int32(), "role": pa.string(), "media": pa.list_(pa.string()),
         "text": pa.string(), "parts": _NUMBERS, "state": pa.string(), "done": pa.bool_(), "seconds": pa.float64(),
         "error": pa.string(), "info": pa.string(), "prompt_ids": pa.list_(pa.int32())}
_MEDIA = {"hash": pa.string(), "kind": pa.string(), "width": pa.int32(), "height": pa.int32(),
          "processed_width": pa.int32(), "processed_height": pa.int32(), "visual_tokens": pa.int32(),
          "path": pa.string(), "timestamps": _FLOATS}
SCHEMA = pa.schema({
    "schema": pa.int32(), "group_id": pa.string(), "sample_id": pa.string(), "task": pa.string(),
    "index": pa.int32(), "step": pa.int32(), "policy_step": pa.int32(), "split": pa.string(),
    "prompt": pa.string(), "completion": pa.string(), "token_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()), "logprobs": _FLOATS, "trainer_logprobs": _FLOATS, "entropies": _FLOATS,
    "ratio": _FLOATS, "clipped": pa.list_(pa.bool_()), "parts": _NUMBERS, "weights": _NUMBERS,
    "reward": pa.float64(), "advantage": pa.float64(), "parsed": pa.string(), "target": pa.string(),
    "sample": pa.string(), "category": pa.string(), "difficulty": pa.float64(), "error": pa.string(),
    "finish_reason": pa.string(), "truncated": pa.bool_(), "turns": pa.list_(pa.struct(_TURN)),
    "media": pa.list_(pa.struct(_MEDIA)), "variant": pa.string(), "marks": pa.string(),
    "top_ids": pa.list_(pa.list_(pa.int32())), "top_logprobs": pa.list_(_FLOATS), "metrics": _NUMBERS,
    "correct": pa.bool_(), "episode_id": pa.string(), "turn_advantages": _FLOATS, "opened": pa.string(),
    "extra": pa.string(),
})
"""The columns of every rollout file. Lists are per token; parsed, target, sample and marks (those of Task.overlay, for
answer and target) are JSON; any value may be null. `advantage` of a rollout with one advantage per token is the mean
over its trained tokens. `prompt` is what an answer was drawn with, the guidance of a second attempt included.
`variant` names the variant that an answer was drawn with, `kept` one that was kept from an earlier visit; an answer of
one that is not trained on has no advantage, and is in no group. `top_ids` and `top_logprobs` are the
store.alternatives most probable tokens at the place of each token, in falling order. `metrics` is what Task.metrics
says of an evaluated answer, `correct` what Task.correct says of any; null where that is not known. `turns` of a plain
answer may be parts of it that a method gives credit of their own. `turn_advantages` has one for each of these and for
each action of an episode; null where all have that of the rollout. `opened` is what the prompt's template has begun an
answer with, each action of an episode too, such as <think>: it is scored with the `completion` and no part of it.
`extra` is JSON of what one method keeps of the answer."""

PER_TOKEN = {"trainer_logprobs": np.float32, "entropies": np.float32, "ratio": np.float32, "clipped": np.bool_,
             "top_ids": np.int32, "top_logprobs": np.float32}
"""What the update may add to each token, and its type; those of the top k are [T, k]."""

_SUFFIXES = {"image": {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"},
             "video": {".mp4", ".mkv", ".webm", ".mov", ".avi", ".gif", ".m4v"}}
ROLLOUT_FILE = re.compile(r"step-(\d{1,15})-(?:(.+)-)?rank-\d+\.parquet|steps-(\d{1,15})-(\d{1,15})\.parquet")
"""Name of a rollout file: its step and split, or the first and last step of a file that holds many."""


class RunFolder:
    """One run's files. Reading needs nothing else; a training run calls `create` first, inside `lock`.

    `media` is the setting `store.media`. Readers append to `notes` what they had to skip.
    """

    def __init__(self, path: str | Path, media: str = "copy"):
        self.path = Path(path)
        self.media = media
        self.notes: list[str] = []
        self._stored: dict[str, str] = {}
        self._lock: Lock = Unlocked()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    # --- writing --------------------------------------------------------------------------------------------------

    def create(self, config: str, seed: int) -> None:
        """Writes config.yaml (the resolved config as text) and env.json; what else is in the folder stays."""
        write_text(self.path / "config.yaml", config)
        write_text(self.path / "env.json", json.dumps(environment(seed), indent=2) + "\n")

    def write_tokenizer(self, text: str) -> None:
        """tokenizer.json, by which token ids can be read without the model; left alone when it is the same."""
        path = self.path / "tokenizer.json"
        if not path.is_file() or path.read_bytes() != text.encode():
            write_text(path, text)

    @contextmanager
    def lock(self, steal: bool = False) -> Iterator[Lock]:
        """Holds the folder for this process, see lock.lock; RunError while another one does, and from methods that
        write once the folder has vanished or was taken over."""
        try:
            with lock(self.path / "run.lock", steal) as self._lock:
                yield self._lock
        finally:
            self._lock = Unlocked()

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, on disk when this returns; NaN and infinities become null."""
        self._lock.check()
        append_line(self.path / "metrics.jsonl", _json(record))

    def append_eval(self, record: Mapping[str, Any]) -> None:
        """One line of eval.jsonl: one evaluation of one split."""
        self._lock.check()
        append_line(self.path / "eval.jsonl", _json(record))

    def append_timeline(self, step: int, spans: Sequence[tuple[str, float, float]]) -> None:
        """Lines of timeline.jsonl: the phases of a step, with their start and end in seconds since 1970."""
        if spans:
            append_line(self.path / "timeline.jsonl", "\n".join(
                _json({"step": step, "phase": name, "start": start, "end": end}) for name, start, end in spans))

    def heartbeat(self, record: Mapping[str, Any]) -> None:
        """Replaces heartbeat.json; adds time (seconds since 1970), pid and host.

        Expected keys: step, steps, state (running, finished, failed, interrupted), reward, eta_s. Only in own folders.
        """
        beat = {**record, "time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
        if self._lock.owned:
            write_text(self.path / "heartbeat.json", _json(beat), sync=False)

    def truncate(self, step: int, *, evaluated: bool = True) -> None:
        """Removes what a run wrote after its checkpoint of `step` completed steps, and half-written temporaries.

        Keeps metrics and rollouts of steps < `step`, and evaluations up to `step`; that of `step` itself goes too
        when it will be repeated (`evaluated=False`). `truncate(0, evaluated=False)` empties a run to start over.
        """
        last = step if evaluated else step - 1
        for name in ("metrics.jsonl", "alerts.jsonl", "timeline.jsonl", "rejected.jsonl"):
            self._keep_lines(name, lambda record: record.get("step", 0) < step)
        self._keep_lines("eval.jsonl", lambda record: record.get("step", 0) <= last)
        for folder, first in (("rollouts", step), ("eval-rollouts", last + 1)):
            for file, steps, _ in self.rollout_files(folder):
                if steps.start >= first:
                    file.unlink()
        if not step:
            (self.path / "prompts.parquet").unlink(missing_ok=True)  # of data that may have been others
            shutil.rmtree(self.path / "stored", ignore_errors=True)
        for folder in (".", "rollouts", "eval-rollouts", "media", "checkpoints"):
            for temporary in (self.path / folder).glob(".*.tmp"):
                temporary.unlink()

    def write_rollouts(self, step: int, rank: int, groups: Sequence[Group],
                       per_token: Mapping[str, Sequence[np.ndarray | None]] | None = None,
                       split: str | None = None) -> Path:
        """Writes the rollouts of `groups`, and their media, as one parquet file of SCHEMA; returns its path.

        `per_token` holds, for keys of PER_TOKEN, one [T] array (or None) per rollout in the order of the groups.
        With `split` it is an evaluation after `step` completed steps and goes to eval-rollouts. Answers of variants
        that are not trained on come after all others.
        """
        self._lock.check()
        columns = [self._media_columns(group) for group in groups]
        rows = [row for group, media in zip(groups, columns, strict=True) for row in _rows(step, group, media)]
        for key, arrays in (per_token or {}).items():
            _add_per_token(rows, key, arrays)
        rows += [{**row, "advantage": None} for group, media in zip(groups, columns, strict=True)
                 for row in _rows(step, replace(group, rollouts=group.aside), media)]
        name = f"step-{step:06d}-{_safe(split) + '-' if split else ''}rank-{rank:05d}.parquet"
        path = self.path / ("eval-rollouts" if split else "rollouts") / name
        table = pa.Table.from_pylist(rows, SCHEMA)
        with replacing(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
        return path

    def write_media(self, media: LoadedMedia) -> str | None:
        """Puts an image or video into media/ once, by its hash; returns its path inside the run folder.

        A file is copied or linked as it is, and so are the bytes that a row holds of one; media without a file, or
        whose file has changed since it was loaded, is written from its pixels, lossless: PNG, for a video animated
        WebP. None when `store.media=none`.
        """
        if self.media == "none":
            return None
        if media.sha256 not in self._stored:
            self._stored[media.sha256] = self._put(media)
        return self._stored[media.sha256]

    def _put(self, media: LoadedMedia) -> str:
        folder = self.path / "media"
        suffix = media.path.suffix.lower() if media.path else ""
        if media.path and suffix in _SUFFIXES[media.kind]:
            target = folder / (media.sha256 + suffix)
            if target.exists() or _take(media.path, target, media.sha256, self.media == "link"):
                return f"media/{target.name}"
        data_suffix = suffix_of(media.data[:16]) if media.data else ""
        whole = data_suffix in _SUFFIXES[media.kind]
        target = folder / (media.sha256 + (data_suffix if whole else ".png" if media.kind == "image" else ".webp"))
        if not target.exists():
            with replacing(target) as temporary:
                temporary.write_bytes(media.data) if whole and media.data else _save_pixels(media, temporary)
        return f"media/{target.name}"

    def _media_columns(self, group: Group) -> dict[int, list[dict[str, Any]]]:
        """Returns the media of each rollout by its index: those of the prompt, and those that an episode showed."""
        common = self._media_column(group.prompt.media, group.prompt)
        return {r.index: [*common, *self._media_column(r.completion.observed_media, r.completion.shown)]
                for r in (*group.rollouts, *group.aside)}

    def _media_column(self, shown: Sequence[LoadedMedia], prompt: Prompt | None) -> list[dict[str, Any]]:
        column, sizes, counts = [], prompt.processed_sizes if prompt else (), prompt.visual_tokens if prompt else ()
        for i, media in enumerate(shown):
            processed = sizes[i] if i < len(sizes) else (None, None)
            values = (media.sha256, media.kind, *media.size, *processed, counts[i] if i < len(counts) else None,
                      self.write_media(media), list(media.timestamps) or None)
            column.append(dict(zip(_MEDIA, values, strict=True)))
        return column

    def _keep_lines(self, name: str, keep: Callable[[dict[str, Any]], bool]) -> None:
        if (self.path / name).exists():
            lines = [_json(record) + "\n" for record in self._lines(name) if keep(record)]
            write_text(self.path / name, "".join(lines))

    # --- reading --------------------------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl; a half-written last one is left out."""
        return self._lines("metrics.jsonl")

    def evals(self) -> list[dict[str, Any]]:
        """Returns the lines of eval.jsonl; a half-written last one is left out."""
        return self._lines("eval.jsonl")

    def last_heartbeat(self) -> dict[str, Any]:
        """heartbeat.json, or {} when there is none."""
        return read_json(self.path / "heartbeat.json") or {}

    def rollouts(self, step: int | None = None, *, split: str | None = None,
                 columns: Sequence[str] | None = None) -> pa.Table:
        """Training rollouts of one step or of all; with `split`, those of its evaluations. Some columns, or all.

        Files that cannot be read, or of a newer schema, are skipped and named in `notes`.
        """
        fields = [SCHEMA.field(name) for name in columns or SCHEMA.names]
        tables = [pa.schema(fields).empty_table()]
        for file, steps, name in self.rollout_files("eval-rollouts" if split else "rollouts"):
            if (step is None or step in steps) and (split is None or name == _safe(split)):
                try:
                    tables.append(read_rollouts(file, fields, step))
                except (pa.ArrowException, OSError, ValueError) as error:
                    self.notes.append(f"skipped {file}: {str(error).splitlines()[0]}")
        return pa.concat_tables(tables)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path, records, bad = self.path / name, list[dict[str, Any]](), 0
        try:
            for number, (line, _) in enumerate(read_lines(path) if os.path.lexists(path) else (), 1):
                if bad:  # no half-written last one
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
        """(file, the steps it covers, split of an evaluation) in "rollouts" or "eval-rollouts", in order."""
        for file in sorted((self.path / folder).glob("*.parquet")):
            if (match := ROLLOUT_FILE.fullmatch(file.name)) and not file.is_file():
                self.notes.append(f"skipped {file}: it is no regular file")
            elif match:
                yield file, range(int(match[1] or match[3]), int(match[1] or match[4]) + 1), match[2]


def comparable(evals: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns those lines of eval.jsonl that measure on the same as the last one of their split: what they measure on
    may have changed between a stop and a resume, which the first line after it says in `changed`."""
    since = {line.get("split"): i for i, line in enumerate(evals) if line.get("changed")}
    return [line for i, line in enumerate(evals) if i >= since.get(line.get("split"), 0)]


# --- JSON -------------------------------------------------------------------------------------------------------------


def utf8(text: str) -> str:
    """Returns valid UTF-8: a lone surrogate becomes its \\uXXXX escape, which inside JSON is the same character."""
    return text.encode("utf-8", "backslashreplace").decode()


def _json(value: Any) -> str:
    return utf8(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def plain(value: Any, depth: int = 0) -> Any:
    """JSON-able form: NaN and infinities null, arrays lists, anything unknown its text; cut off at 50 levels."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return plain(value.tolist(), depth)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= 50:
        return "…"
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    return str(value)


# --- rollouts and media -----------------------------------------------------------------------------------------------


def _rows(step: int, group: Group, media: Mapping[int, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yields one row of SCHEMA per rollout, the per-token columns of the update left out."""
    sample, difficulty = group.sample, group.sample.difficulty
    shared = {
        "schema": SCHEMA_VERSION, "group_id": utf8(group.id), "sample_id": utf8(sample.id),
        "task": utf8(group.task), "step": step, "split": utf8(group.split),
        "weights": _numbers(group.weights), "target": _json(group.target), "sample": _json(sample.row),
        "category": None if sample.category is None else utf8(str(sample.category)),
        "difficulty": float(difficulty) if isinstance(difficulty, (int, float)) else None,
    }
    for rollout in group.rollouts:
        done = rollout.completion
        extra = {name: value for name, value in done.extra.items() if name != "turns"}
        mask = np.asarray(done.loss_mask, bool)
        per_token = np.ndim(rollout.advantage) > 0
        advantage = np.mean(np.asarray(rollout.advantage)[mask]) if per_token and mask.any() else rollout.advantage
        yield shared | {
            "index": rollout.index, "policy_step": rollout.policy_step,
            "prompt": utf8(rollout.sampled_prompt or group.prompt.text), "media": media[rollout.index],
            "completion": utf8(done.text), "opened": utf8(group.prompt.opened) or None,
            "token_ids": np.asarray(done.tokens, np.int32), "loss_mask": mask,
            "logprobs": np.asarray(done.logprobs, np.float32), "parts": _numbers(rollout.parts),
            "metrics": _numbers(rollout.metrics), "reward": rollout.reward, "correct": rollout.correct,
            "advantage": float(advantage) if np.ndim(advantage) == 0 else 0.0,
            "parsed": _json(rollout.parsed), "error": None if rollout.error is None else utf8(rollout.error),
            "finish_reason": done.finish_reason, "truncated": done.truncated,
            "turns": [_turn(t) for t in done.turns or _kept_turns(done)],
            "episode_id": utf8(done.episode_id) or None,
            "turn_advantages": _turn_advantages(rollout),
            "variant": utf8(rollout.variant) or None,
            "marks": None if rollout.marks is None else _json(rollout.marks),
            "extra": _json(extra) if extra else None,
        }


def _turn_advantages(rollout: Rollout) -> list[float] | None:
    """Returns the mean advantage over the trained tokens of each action of an episode, or part of an answer that a
    method keeps; None where all have one."""
    done = rollout.completion
    actions, mask = done.actions or _kept_turns(done), np.asarray(done.loss_mask, bool)
    if not actions or np.ndim(rollout.advantage) == 0:
        return None
    values = np.asarray(rollout.advantage)
    return [float(values[t.start:t.end][mask[t.start:t.end]].mean()) if mask[t.start:t.end].any() else 0.0
            for t in actions]


def _kept_turns(done: Completion) -> list[Turn]:
    """Those that a method keeps of an answer without turns of its own."""
    return [] if done.turns else [Turn(**turn) for turn in done.extra.get("turns", ())]


def _turn(turn: Turn) -> dict[str, Any]:
    """Returns a turn as SCHEMA has it; state and what follows it stand on the action that they answer."""
    return {"start": turn.start, "end": turn.end, "role": turn.role, "media": list(turn.media),
            "text": utf8(turn.text) or None, "parts": None if turn.parts is None else _numbers(turn.parts),
            "state": None if turn.state is None else utf8(turn.state), "done": turn.done, "seconds": turn.seconds,
            "error": None if turn.error is None else utf8(turn.error),
            "info": None if turn.info is None else _json(turn.info),
            "prompt_ids": None if turn.prompt_ids is None else list(turn.prompt_ids)}


def _numbers(values: Mapping[str, float | None]) -> list[tuple[str, float | None]]:
    return [(utf8(name), None if value is None else float(value)) for name, value in values.items()]


def _add_per_token(rows: list[dict[str, Any]], key: str, arrays: Sequence[np.ndarray | None]) -> None:
    if key not in PER_TOKEN:
        raise ValueError(f"per_token has {key!r}; the columns are {', '.join(PER_TOKEN)}")
    if len(arrays) != len(rows):
        raise ValueError(f"per_token[{key!r}] has {len(arrays)} arrays for {len(rows)} rollouts")
    for row, array in zip(rows, arrays, strict=True):
        if array is not None and np.shape(array)[:1] != row["token_ids"].shape:
            raise ValueError(f"per_token[{key!r}] of rollout {row['index']} of group {row['group_id']} has shape "
                             f"{np.shape(array)} for {len(row['token_ids'])} tokens")
        values = None if array is None else np.asarray(array, PER_TOKEN[key])
        row[key] = list(values) if values is not None and values.ndim > 1 else values


def read_rollouts(file: Path, fields: Sequence[pa.Field], step: int | None = None) -> pa.Table:
    """Returns the columns `fields` of one file, null where it has none, and only the rows of `step` when given.

    Raises ValueError for a file of a newer schema, and what pyarrow raises for one that cannot be read.
    """
    with pq.ParquetFile(file) as reader:
        names = {"schema", "step", *(f.name for f in fields)} & set(reader.schema_arrow.names)
        table = reader.read([n for n in reader.schema_arrow.names if n in names])
    if step is not None:
        table = table.filter(pa.array(np.asarray(table["step"]) == step))
    return as_schema(table, fields)


def as_schema(table: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    """Returns the columns `fields` of a table of rollouts, null where it has none. Raises ValueError for a newer
    schema.
    """
    names = table.column_names
    newest = max((v for v in table["schema"].to_pylist() if v is not None), default=0) if "schema" in names else 0
    if newest > SCHEMA_VERSION:
        raise ValueError(f"written by a newer vlrl (schema {newest}, this one reads up to {SCHEMA_VERSION})")
    columns = [table[f.name].cast(f.type) if f.name in names else pa.nulls(len(table), f.type) for f in fields]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _safe(split: str | None) -> str:
    return re.sub(r"[^\w.]+", "_", split or "")


def _take(source: Path, target: Path, sha256: str, link: bool) -> bool:
    """Copies or links a media file; False when it is gone or no longer the file that was loaded."""
    if not source.is_file():
        return False
    if link:
        with replacing(target, sync=False) as temporary:
            temporary.symlink_to(source.resolve())
        return True
    with open(source, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return False
        file.seek(0)
        with replacing(target) as temporary, open(temporary, "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
    return True


def _save_pixels(media: LoadedMedia, path: Path) -> None:
    first, *rest = media.frames
    if media.kind == "image":
        first.save(path, format="PNG")
        return
    times = [1000 * t for t in media.timestamps] or [500 * i for i in range(len(media.frames))]
    shown = [max(1, round(b - a)) for a, b in itertools.pairwise(times)]  # milliseconds
    shown.append(shown[-1] if shown else 500)
    first.save(path, format="WEBP", save_all=True, append_images=rest, duration=shown, lossless=True, method=0)
