"""Reads rollout files for replay, and decides which rows are usable. Does not import torch.

A file may be from another run, half-written, or malicious. A row that is unreadable or inconsistent is therefore
counted under a reason and skipped, without an error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.store import SCHEMA, as_schema, utf8

KEPT = pa.schema([*(SCHEMA.field(name) for name in (
    "group_id", "sample_id", "task", "index", "step", "policy_step", "prompt", "completion", "token_ids", "loss_mask",
    "logprobs", "parts", "weights", "reward", "correct", "finish_reason")), ("hashes", pa.list_(pa.string()))])
"""Columns of a rollout in the buffer. `hashes` are the hashes of the media in the prompt."""
_READ = [SCHEMA.field(name) for name in (*KEPT.names[:-1], "media", "schema", "split", "variant", "episode_id",
                                         "trainer_logprobs", "error")]
_LARGEST = 2**31
"""Maximum uncompressed size of a file in bytes."""
_ABOVE_ZERO = 1e-3
"""How far a log-probability may be above 0, to allow for rounding."""
_FINISHED = ("stop", "length")


class UnreadableFile(Exception):
    """Raised for a rollout file that cannot be used. The text of the exception is the reason."""


@dataclass(frozen=True, eq=False)
class RowLimits:
    """The conditions that a stored row must meet to be usable."""

    vocabulary: int
    """Size of the vocabulary; all token ids must be below it."""
    banned: frozenset[int]
    """Token ids that are never sampled; a row must not contain them."""
    most_tokens: int
    decode: Callable[[Sequence[int]], str]
    """Decodes token ids to text, leaving out a final end token."""
    most_gap: float
    """Largest allowed mean |log p(sampler) - log p(trainer)| of a row with both log-probabilities. A larger mean shows
    that the two log-probabilities are from different weights."""


def read_stored(file: Path, limits: RowLimits, most_rows: int) -> tuple[pa.Table, Counter[str]]:
    """Reads one rollout file. Returns a table of the usable rows with the columns KEPT, in which the rows of a group
    are adjacent, and the number of refused rows by reason. Raises UnreadableFile for a damaged file, or one with
    more than `most_rows` rows."""
    try:
        with pq.ParquetFile(file) as reader:
            facts = reader.metadata
            bytes_ = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
            if facts.num_rows > most_rows or bytes_ > _LARGEST:
                raise UnreadableFile(f"the {facts.num_rows:,} rows and {bytes_:,} bytes are more than a buffer of "
                                 f"{most_rows:,} rollouts can hold")
            names = {f.name for f in _READ} & {*reader.schema_arrow.names}
            table = as_schema(reader.read([n for n in reader.schema_arrow.names if n in names]), _READ)
    except UnreadableFile:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise UnreadableFile((str(error).splitlines() or [type(error).__name__])[0][:200]) from None
    return _usable(table, limits)


def _usable(table: pa.Table, limits: RowLimits) -> tuple[pa.Table, Counter[str]]:
    refused: Counter[str] = Counter()
    rows: dict[tuple[Any, Any], dict[int, dict[str, Any]]] = {}
    for row in (row for batch in table.to_batches(max_chunksize=1024) for row in _plain(batch)):
        why = problem(row, limits)
        group = rows.setdefault((row["step"], row["group_id"]), {}) if not why else {}
        why = why or ("repeated row" if row["index"] in group else "")
        if why:
            refused[why] += 1
        else:
            group[row["index"]] = row
    usable = []
    for group in rows.values():
        if len(group) < 2 or len({(r["sample_id"], r["prompt"], r["task"]) for r in group.values()}) > 1:
            refused["only row of its group" if len(group) < 2 else "group with several prompts"] += len(group)
        else:
            usable += [group[i] for i in sorted(group)]
    return pa.Table.from_pylist(usable, KEPT), refused


def _plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    light = batch.drop_columns(["token_ids", "loss_mask", "logprobs", "trainer_logprobs", "media"]).to_pylist()
    lists = {name: batch.column(name) for name in ("token_ids", "loss_mask", "logprobs", "trainer_logprobs")}
    media = batch.column("media").to_pylist()
    for i, row in enumerate(light):
        for name, column in lists.items():
            value = column[i].values
            row[name] = None if value is None else value.to_numpy(zero_copy_only=False)
        row["hashes"] = [(m or {}).get("hash") for m in media[i] or []]
    return light


def problem(row: Mapping[str, Any], limits: RowLimits) -> str:
    """The reason why a row is unusable; "" if it is usable. Missing log-probabilities of the engine are filled in with
    the trainer's."""
    if row["split"] != "train" or row["variant"] or row["episode_id"]:
        return "not a single-turn answer to a training row"
    if any(row[name] is None for name in ("group_id", "sample_id", "index", "step", "policy_step", "prompt",
                                          "completion", "token_ids", "loss_mask", "logprobs")):
        return "a value is missing"
    if row["error"] or row["reward"] is None or not math.isfinite(row["reward"]):
        return "not scored"
    return _tokens_problem(row, limits)


def _tokens_problem(row: Mapping[str, Any], limits: RowLimits) -> str:
    ids, mask, logprobs = row["token_ids"], row["loss_mask"], row["logprobs"]
    if not len(ids) == len(mask) == len(logprobs):
        return "lists of different lengths"
    if not 0 < len(ids) <= limits.most_tokens or row["finish_reason"] not in _FINISHED:
        return "too long, empty or unfinished"
    if [v.dtype.kind for v in (ids, mask, logprobs)] != ["i", "b", "f"] or not mask.any():
        return "a value is missing"
    if ids.min() < 0 or ids.max() >= limits.vocabulary or not limits.banned.isdisjoint(ids.tolist()):
        return "token ids that are never sampled"
    trainer = row["trainer_logprobs"]
    known = trainer is not None and len(trainer) == len(ids) and trainer.dtype.kind == "f"
    if known and not np.isfinite(logprobs).all():
        logprobs = row["logprobs"] = np.where(np.isnan(logprobs), trainer, logprobs)  # type: ignore[index]
    if not np.isfinite(logprobs[mask]).all() or (logprobs[mask] > _ABOVE_ZERO).any():
        return "no valid log-probabilities"
    if known and not np.abs(logprobs - trainer)[mask].mean() <= limits.most_gap:
        return "log-probabilities from other weights"
    if utf8(limits.decode(ids.tolist())) != row["completion"]:
        return "token ids that do not decode to the text"
    return ""
