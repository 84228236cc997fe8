"""Rollout files: defines their columns, writes one row per rollout, and reads them. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.store.files import json_text, utf8
from vlrl.types import Completion, Group, LoadedMedia, Prompt, Rollout, Turn

SCHEMA_VERSION = 1
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
"""The columns of every rollout file. Columns with one value per token are lists. Any value may be null.

- `parsed`, `target`, `sample` and `marks` are JSON. `marks` are what Task.overlay draws for the answer and the target,
so that a viewer need not run task code; null if the task failed.
- `advantage` is the mean over the trained tokens if the rollout has per-token advantages. It is null for a rollout of a
variant that is not trained on; such a rollout belongs to no group.
- `prompt` is the prompt with which the completion was sampled, including the guidance of a second attempt.
- `variant` names the variant of the sample for which the completion was sampled; null = the unchanged sample. `kept`
means that the completion was kept from an earlier use of the sample.
- `media.timestamps` are the display times of a video's frames in seconds.
- `top_ids` and `top_logprobs` are the store.alternatives most probable tokens at each position, in decreasing order.
- `metrics` are Task.metrics of an evaluated answer, `correct` is Task.correct; null if unknown.
- `turns` of a completion without an environment may be parts of it that get separate advantages. `turn_advantages` has
one value per such part or per action of an episode; null if all tokens have the same advantage.
- `opened` is the beginning of a completion (or of each action) that the chat template wrote, such as <think>. It is
scored together with `completion`, but is not part of it.
- `extra` is JSON that a method stores for its own use."""

PER_TOKEN = {"trainer_logprobs": np.float32, "entropies": np.float32, "ratio": np.float32, "clipped": np.bool_,
             "top_ids": np.int32, "top_logprobs": np.float32}
"""Per-token columns that the update may add, and their types. `top_ids` and `top_logprobs` have the shape [T, k]."""

ROLLOUT_FILE = re.compile(r"step-(\d{1,15})-(?:(.+)-)?rank-\d+\.parquet|steps-(\d{1,15})-(\d{1,15})\.parquet")
"""Matches the name of a rollout file. Groups: its step and split, or its first and last step if it has many steps."""


def rollout_table(step: int, groups: Sequence[Group], per_token: Mapping[str, Sequence[np.ndarray | None]],
                  write_media: Callable[[LoadedMedia], str | None]) -> pa.Table:
    """Returns the rollouts of `groups` as a table with the columns of SCHEMA. Rollouts that are not trained on come
    last. `per_token` holds, for keys of PER_TOKEN, one [T] array (or None) per rollout in the order of the groups.
    `write_media` stores an image or video in the run folder and returns its path."""
    media = [_media(group, write_media) for group in groups]
    found = [row for group, shown in zip(groups, media, strict=True) for row in _rows(step, group, shown)]
    for key, arrays in per_token.items():
        _add_per_token(found, key, arrays)
    found += [{**row, "advantage": None} for group, shown in zip(groups, media, strict=True)
              for row in _rows(step, replace(group, rollouts=group.aside), shown)]
    return pa.Table.from_pylist(found, SCHEMA)


def _media(group: Group, write_media: Callable[[LoadedMedia], str | None]) -> dict[int, list[dict[str, Any]]]:
    def column(shown: Sequence[LoadedMedia], prompt: Prompt | None) -> list[dict[str, Any]]:
        found, sizes, counts = [], prompt.processed_sizes if prompt else (), prompt.visual_tokens if prompt else ()
        for i, one in enumerate(shown):
            processed = sizes[i] if i < len(sizes) else (None, None)
            values = (one.sha256, one.kind, *one.size, *processed, counts[i] if i < len(counts) else None,
                      write_media(one), list(one.timestamps) or None)
            found.append(dict(zip(_MEDIA, values, strict=True)))
        return found

    common = column(group.prompt.media, group.prompt)
    return {r.index: [*common, *column(r.completion.observed_media, r.completion.shown)]
            for r in (*group.rollouts, *group.aside)}


def _rows(step: int, group: Group, media: Mapping[int, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    sample, difficulty = group.sample, group.sample.difficulty
    shared = {
        "schema": SCHEMA_VERSION, "group_id": utf8(group.id), "sample_id": utf8(sample.id),
        "task": utf8(group.task), "step": step, "split": utf8(group.split),
        "weights": _numbers(group.weights), "target": json_text(group.target), "sample": json_text(sample.row),
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
            "parsed": json_text(rollout.parsed), "error": None if rollout.error is None else utf8(rollout.error),
            "finish_reason": done.finish_reason, "truncated": done.truncated,
            "turns": [_turn(t) for t in done.turns or _kept_turns(done)],
            "episode_id": utf8(done.episode_id) or None,
            "turn_advantages": _turn_advantages(rollout),
            "variant": utf8(rollout.variant) or None,
            "marks": None if rollout.marks is None else json_text(rollout.marks),
            "extra": json_text(extra) if extra else None,
        }


def _turn_advantages(rollout: Rollout) -> list[float] | None:
    """Returns for each action of an episode the mean advantage over its trained tokens. For a completion without
    actions, returns this for each part of the completion in `extra["turns"]`, where a method stores such parts. None
    if all tokens have the same advantage."""
    done = rollout.completion
    actions, mask = done.actions or _kept_turns(done), np.asarray(done.loss_mask, bool)
    if not actions or np.ndim(rollout.advantage) == 0:
        return None
    values = np.asarray(rollout.advantage)
    return [float(values[t.start:t.end][mask[t.start:t.end]].mean()) if mask[t.start:t.end].any() else 0.0
            for t in actions]


def _kept_turns(done: Completion) -> list[Turn]:
    return [] if done.turns else [Turn(**turn) for turn in done.extra.get("turns", ())]


def _turn(turn: Turn) -> dict[str, Any]:
    return {"start": turn.start, "end": turn.end, "role": turn.role, "media": list(turn.media),
            "text": utf8(turn.text) or None, "parts": None if turn.parts is None else _numbers(turn.parts),
            "state": None if turn.state is None else utf8(turn.state), "done": turn.done, "seconds": turn.seconds,
            "error": None if turn.error is None else utf8(turn.error),
            "info": None if turn.info is None else json_text(turn.info),
            "prompt_ids": None if turn.prompt_ids is None else list(turn.prompt_ids)}


def _numbers(values: Mapping[str, float | None]) -> list[tuple[str, float | None]]:
    return [(utf8(name), None if value is None else float(value)) for name, value in values.items()]


def _add_per_token(rows: list[dict[str, Any]], key: str, arrays: Sequence[np.ndarray | None]) -> None:
    if key not in PER_TOKEN:
        raise ValueError(f"per_token has the unknown column {key!r}; the known columns are {', '.join(PER_TOKEN)}")
    if len(arrays) != len(rows):
        raise ValueError(f"per_token[{key!r}] has {len(arrays)} arrays for {len(rows)} rollouts")
    for row, array in zip(rows, arrays, strict=True):
        if array is not None and np.shape(array)[:1] != row["token_ids"].shape:
            raise ValueError(f"per_token[{key!r}] of rollout {row['index']} of group {row['group_id']} has shape "
                             f"{np.shape(array)} for {len(row['token_ids'])} tokens")
        values = None if array is None else np.asarray(array, PER_TOKEN[key])
        row[key] = list(values) if values is not None and values.ndim > 1 else values


def read_rollouts(file: Path, fields: Sequence[pa.Field], step: int | None = None) -> pa.Table:
    """Reads the columns `fields` of a rollout file; columns that the file lacks are null. With `step`, reads only rows
    of this step. Raises ValueError for a file with a newer schema, and pyarrow's errors for an unreadable file."""
    with pq.ParquetFile(file) as reader:
        names = {"schema", "step", *(f.name for f in fields)} & set(reader.schema_arrow.names)
        table = reader.read([n for n in reader.schema_arrow.names if n in names])
    if step is not None:
        table = table.filter(pa.array(np.asarray(table["step"]) == step))
    return as_schema(table, fields)


def as_schema(table: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    """Returns the columns `fields` of a table of rollouts; columns that the table lacks are null. Raises ValueError if
    a newer version of vlrl wrote the table."""
    names = table.column_names
    newest = max((v for v in table["schema"].to_pylist() if v is not None), default=0) if "schema" in names else 0
    if newest > SCHEMA_VERSION:
        raise ValueError(f"the rollouts were written by a newer vlrl (schema {newest}; this vlrl reads up to "
                         f"{SCHEMA_VERSION}): upgrade vlrl")
    columns = [table[f.name].cast(f.type) if f.name in names else pa.nulls(len(table), f.type) for f in fields]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def split_name(split: str | None) -> str:
    """Returns a split's name as it is written in file names, with "_" for special characters."""
    return re.sub(r"[^\w.]+", "_", split or "")
