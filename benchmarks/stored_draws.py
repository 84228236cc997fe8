"""How long a step takes to draw stored groups, and what memory it takes, as a buffer grows to 100,000 rollouts.

    python benchmarks/stored_draws.py [--rollouts 100000] [--tokens 200] [--json OUT]

Rollout files of 64 rollouts (8 groups of 8) are written as a run writes them, and taken and drawn from as algo.stored
does: each step takes one new file and draws 8 groups. A second buffer takes one file that holds all of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlrl.methods.replay.buffer import Source, StoredRollouts
from vlrl.methods.replay.rows import Limits
from vlrl.methods.replay.rules import by_advantage, uniform
from vlrl.store import SCHEMA

GROUPS, SIZE = 8, 8
LIMITS = Limits(vocabulary=50_000, banned=frozenset(), most_tokens=4096, most_gap=0.2, decode=lambda ids: "text")


def rollouts(tokens: int, rng: np.random.Generator) -> pa.Table:
    """Returns the rows of one step."""
    rows = []
    for place in range(GROUPS * SIZE):
        n = int(rng.integers(tokens // 2, tokens + tokens // 2))
        logprobs = -rng.exponential(0.5, n)
        rows.append({
            "schema": 1, "sample_id": f"row-{place // SIZE}", "task": "t", "index": place % SIZE, "split": "train",
            "prompt": "a prompt " * 20, "completion": "text", "token_ids": rng.integers(0, 50_000, n),
            "loss_mask": np.ones(n, bool), "logprobs": logprobs, "trainer_logprobs": logprobs, "parts": [("r", 1.0)],
            "weights": [("r", 1.0)], "correct": True, "finish_reason": "stop", "media": []})
    return pa.Table.from_pylist(rows, SCHEMA)


def of_step(table: pa.Table, step: int, rng: np.random.Generator) -> pa.Table:
    """Returns the rows with the names and rewards of a step."""
    names = [f"{step * GROUPS + i // SIZE:08d}" for i in range(len(table))]
    columns = {"group_id": names, "step": [step] * len(table), "policy_step": [step] * len(table),
               "reward": rng.random(len(table))}
    for name, values in columns.items():
        place = SCHEMA.get_field_index(name)
        table = table.set_column(place, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))
    return table


def memory() -> float:
    """Returns MiB that this process holds now, mapped files that others can take back included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def draws(buffer: StoredRollouts, step: int, count: int) -> dict[str, float]:
    """Returns medians of `count` draws of 8 groups, half of them by advantage: milliseconds, and those of the CPU."""
    wall, cpu = [], []
    for i in range(count):
        begun, used = time.perf_counter(), time.process_time()
        found = buffer.draw(GROUPS, step, np.random.default_rng(i), by_advantage if i % 2 else uniform)
        wall.append((time.perf_counter() - begun) * 1e3)
        cpu.append((time.process_time() - used) * 1e3)
        assert len(found) == GROUPS
    return {"draw_ms": float(np.median(wall)), "draw_cpu_ms": float(np.median(cpu)),
            "draw_cpu_ms_95": float(np.quantile(cpu, 0.95))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    steps = given.rollouts // (GROUPS * SIZE)
    rng, lines = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        buffer = StoredRollouts(run, [Source(run, own=True)], LIMITS, given.rollouts)
        base, taken = rollouts(given.tokens, rng), []
        (run / "rollouts").mkdir(parents=True)
        for step in range(1, steps + 1):
            pq.write_table(of_step(base, step - 1, rng), run / "rollouts" / f"step-{step - 1:06d}-rank-00000.parquet",
                           compression="zstd")
            used = time.process_time()
            buffer.take(step)
            taken.append((time.process_time() - used) * 1e3)
            if step % max(steps // 8, 1) == 0:
                lines.append({"files": step, "rollouts": buffer.rollouts, **draws(buffer, step, 50),
                              "take_cpu_ms": float(np.median(taken[-50:])), "memory_mib": memory()})
                print(json.dumps(lines[-1]), flush=True)
        whole = Path(place) / "whole"
        table = pa.concat_tables(pq.read_table(p, schema=SCHEMA) for p in sorted((run / "rollouts").iterdir()))
        (whole / "rollouts").mkdir(parents=True)
        pq.write_table(table, whole / "rollouts" / f"steps-000000-{steps:06d}.parquet", compression="zstd")
        del table
        one = StoredRollouts(Path(place) / "mine", [Source(whole)], LIMITS, given.rollouts)
        used = time.process_time()
        one.take(0)
        used = (time.process_time() - used) * 1e3
        lines.append({"files": 1, "rollouts": one.rollouts, **draws(one, 1, 50), "take_cpu_ms": used,
                      "memory_mib": memory()})
        print(json.dumps(lines[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
