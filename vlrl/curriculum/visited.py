"""Writes prompts.parquet of a run folder: one row (SCHEMA) per prompt drawn so far, ordered by index.

The file is computed from `Prompts.history` and the training split, so a resumed run writes the same file as an
uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.curriculum.history import History
from vlrl.data.samples import readable
from vlrl.store import utf8
from vlrl.store.files import open_regular, replacing
from vlrl.types import Sample

_NAMES = {"index": pa.int32(), "sample_id": pa.string(), "category": pa.string(), "task": pa.string()}
SCHEMA = pa.schema({**_NAMES, "visits": pa.int32(), "last_step": pa.int32(), "pass_rate": pa.float32(),
                    "reward": pa.float32()})
"""Columns of prompts.parquet. `index` is the row number in the training split, `task` the label in a mixture, and
`visits` the number of draws. An unreadable row of a large file has no id. `last_step`, and the pass rate and mean
reward of the group of that step, are null for a prompt that was never scored."""


def write_visited(path: Path, history: History, samples: Sequence[Sample]) -> None:
    """Writes prompts.parquet at `path`, replacing the existing file. Copies ids and labels of prompts from the existing
    file, so that only the samples of newly drawn prompts are read."""
    visited = np.flatnonzero(history.visits > 0).astype(np.int32)
    names = _named(path, visited, samples)
    last, rate, reward = (getattr(history, name)[visited] for name in ("last", "pass_rate", "reward"))
    table = pa.table([*names.columns, pa.array(history.visits[visited]), pa.array(last, mask=last < 0),
                      pa.array(rate, mask=np.isnan(rate)), pa.array(reward, mask=np.isnan(reward))], schema=SCHEMA)
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _named(path: Path, visited: np.ndarray, samples: Sequence[Sample]) -> pa.Table:
    known = _written(path, visited)
    fresh = np.setdiff1d(visited, np.asarray(known["index"]), assume_unique=True).tolist()
    drawn = (readable(samples, i) or Sample(id="") for i in fresh)
    rows = [{"index": i, "sample_id": utf8(s.id), "category": None if s.category is None else utf8(str(s.category)),
             "task": utf8(s.task)} for i, s in zip(fresh, drawn, strict=True)]
    table = pa.concat_tables([known, pa.Table.from_pylist(rows, pa.schema(_NAMES))])
    return table.take(pa.array(np.argsort(np.asarray(table["index"]))))


def _written(path: Path, visited: np.ndarray) -> pa.Table:
    try:
        with open_regular(path) as file:
            table = pq.read_table(file, columns=list(_NAMES)).cast(pa.schema(_NAMES))
    except (OSError, ValueError, pa.ArrowException):
        return pa.schema(_NAMES).empty_table()
    index, first = np.unique(np.asarray(table["index"]), return_index=True)
    return table.take(pa.array(first[np.isin(index, visited)]))
