"""The inspector's lists over 10,000 and 100,000 rollouts with 5,000 images: seconds and peak memory.

    python benchmarks/app_scale.py [--out benchmarks/results/app_scale_cpu.md]

Run folders are made of random answers of 128 tokens on average, 256 to a file as a run of 32 prompts and groups of 8
writes them. Each size is read in a process of its own, of which the peak memory is told; a list is asked for three
times and its median time given. What differs from list to list is the query, so no answer comes from a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vlrl.store import SCHEMA

SIZES = (10_000, 100_000)
IMAGES = 5_000
GROUP, FILE = 8, 256  # answers
TOKENS = 128
LIMITS = {"first page of groups, nothing read yet": 2.0}
"""Seconds; of everything else 1."""
WORDS = ("the a red blue box circle left right of above I look find think maybe then so answer is at 12 40 118 "
         "because picture shows near edge").split()


# --- making -----------------------------------------------------------------------------------------------------------


def make(folder: Path, rollouts: int, images: int = IMAGES) -> None:
    """A run folder with so many rollouts over so many images."""
    rng = np.random.default_rng(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "media").mkdir()
    for i in range(images):
        grid = rng.integers(0, 255, (6, 8, 3), np.uint8)
        Image.fromarray(grid).resize((224, 168), Image.Resampling.NEAREST).save(folder / f"media/{i:064x}.png")
    answers = [" ".join(rng.choice(WORDS, TOKENS * 3 // 4)) for _ in range(2000)]
    for step, first in enumerate(range(0, rollouts, FILE)):
        table = step_of(rng, step, min(FILE, rollouts - first), answers, images)
        pq.write_table(table, folder / f"rollouts/step-{step:06d}-rank-00000.parquet", compression="zstd")
    line = {"step": step, "reward/mean": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def step_of(rng: np.random.Generator, step: int, size: int, answers: list[str], images: int) -> pa.Table:
    """The rollouts of one step."""
    lengths = rng.integers(TOKENS // 2, TOKENS * 3 // 2 + 1, size)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = int(ends[-1])
    groups, samples = np.arange(size) // GROUP, rng.integers(0, images, -(-size // GROUP))

    def per_token(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(ends, pa.array(values))

    def media(sample: int) -> list[dict[str, Any]]:
        name = f"{sample:064x}"
        return [{"hash": name, "kind": "image", "width": 224, "height": 168, "processed_width": 224,
                 "processed_height": 168, "visual_tokens": 48, "path": f"media/{name}.png", "timestamps": None}]

    ious = rng.random(size)
    columns = {
        "schema": [1] * size, "group_id": [f"{step}-{g}" for g in groups],
        "sample_id": [f"sample-{samples[g]}" for g in groups], "task": ["grounding"] * size,
        "index": np.arange(size) % GROUP, "step": [step] * size, "policy_step": [step] * size,
        "split": ["train"] * size, "prompt": [f"Where is object {samples[g]}? {answers[samples[g] % 2000][:120]}"
                                             for g in groups],
        "completion": [f"<think>{answers[rng.integers(2000)]}</think><answer>{iou:.4f}</answer>" for iou in ious],
        "token_ids": per_token(rng.integers(0, 150_000, count).astype(np.int32)),
        "loss_mask": per_token(np.ones(count, bool)), "clipped": per_token(np.zeros(count, bool)),
        "parts": [[("iou", iou), ("format", 1.0)] for iou in ious],
        "weights": [[("iou", 1.0), ("format", 0.1)]] * size, "reward": ious + 0.1, "advantage": rng.normal(size=size),
        "parsed": ["[1, 2, 3, 4]"] * size, "target": ["{}"] * size, "sample": ['{"q": "where"}'] * size,
        "category": [f"category {samples[g] % 20}" for g in groups], "difficulty": rng.random(size),
        "finish_reason": ["stop"] * size, "truncated": rng.random(size) < 0.05,
        "media": [media(samples[g]) for g in groups]}
    floats = {name: per_token(rng.normal(size=count).astype(np.float32))
              for name in ("logprobs", "trainer_logprobs", "entropies", "ratio")}
    return pa.table([pa.array(columns[f.name], f.type) if isinstance(columns.get(f.name), (list, np.ndarray)) else
                     (columns | floats).get(f.name, pa.nulls(size, f.type)) for f in SCHEMA], schema=SCHEMA)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(root: Path) -> dict[str, Any]:
    """(Wall, CPU) seconds of each list by name, and the peak memory of this process in MiB."""
    from vlrl.app.details import group  # pyright: ignore[reportMissingImports]
    from vlrl.app.index import Index, Query  # pyright: ignore[reportMissingImports]
    from vlrl.app.library import Library  # pyright: ignore[reportMissingImports]
    from vlrl.app.media import MediaStore  # pyright: ignore[reportMissingImports]

    before = _peak()
    library = Library(root)
    index, media = Index(library), MediaStore(library)
    began, cpu = time.perf_counter(), time.process_time()
    page = index.groups(Query())
    first, left = (time.perf_counter() - began, time.process_time() - cpu), page.pending
    while page.pending:
        page = index.groups(Query())
    whole = time.perf_counter() - began, time.process_time() - cpu
    answers = index.rollouts(Query())

    def low(i: int) -> tuple[float, None]:
        return (0.1 + 0.01 * i, None)

    def shown(i: int) -> None:
        for row in index.groups(Query(order="mixed"), page=i).rows:
            media.thumbnail(row.key.run, str(row.media), 96)

    def opened(i: int) -> None:
        key = page.rows[i].key
        group(library, key.run, key.source, key.step, key.group, key.split)

    lists: dict[str, Callable[[int], Any]] = {
        "next page of groups": lambda i: index.groups(Query(), page=i + 1),
        "last page of answers": lambda i: index.rollouts(Query(), page=answers.pages - 1 - i),
        "groups sorted: best, worst, mixed": lambda i: index.groups(Query(order=("best", "worst", "mixed")[i])),
        "answers sorted by reward, length, part": lambda i: index.rollouts(
            Query(sort=("reward", "length", "part")[i], part="iou")),
        "filter: reward, part and length": lambda i: index.rollouts(
            Query(reward=low(i), part="iou", part_range=(0.2, 0.9), length=(80, None))),
        "filter: category, groups": lambda i: index.groups(Query(category=f"category {i}", truncated=True)),
        "search: a text that is rare": lambda i: index.rollouts(Query(text=f"<answer>0\\.12{i}")),
        "search: a hard pattern": lambda i: index.groups(Query(text=f"(red|blue) (box|circle).*near edge.*{i}12")),
        "neighbours of a group": lambda i: index.neighbours(Query(order="mixed"), page.rows[i].key),
        "what filters can be set to": lambda i: index.facets(),
        "one group with its tokens": opened,
        "50 thumbnails": shown}
    seconds = {"first page of groups, nothing read yet": first, "every file read": whole}
    for name, ask in lists.items():
        times = [_timed(lambda ask=ask, i=i: ask(i)) for i in range(3)]
        seconds[name] = tuple(statistics.median(t) for t in zip(*times, strict=True))
    return {"seconds": seconds, "left": left, "peak_mib": _peak(), "before_mib": before, "rollouts": answers.total}


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the wall and of the CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - cpu


def _peak() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- the report -------------------------------------------------------------------------------------------------------


def report(found: dict[int, dict[str, Any]]) -> list[str]:
    """The table as lines of markdown."""
    small, large = (found[size] for size in SIZES)
    lines = ["# The inspector's lists at 10,000 and 100,000 rollouts (CPU)", "",
             "`python benchmarks/app_scale.py --out benchmarks/results/app_scale_cpu.md`", "",
             f"{IMAGES:,} images, answers of {TOKENS} tokens on average, {FILE} to a file. Seconds by the wall, and of "
             "the CPU over all threads; of three calls the median, each of another query.", "",
             "| list | 10,000 | 100,000 | aim | CPU 10,000 | CPU 100,000 | ratio of CPU |",
             "|---|---|---|---|---|---|---|"]
    for name, (wall, cpu) in small["seconds"].items():
        wall_large, cpu_large = large["seconds"][name]
        most = "" if name == "every file read" else f"{LIMITS.get(name, 1.0):g}"
        lines.append(f"| {name} | {wall:.3f} | {wall_large:.3f} | {most} | {cpu:.3f} | {cpu_large:.3f} | "
                     f"{cpu_large / cpu:.1f} |")
    own = {size: f["peak_mib"] - f["before_mib"] for size, f in found.items()}
    lines += ["", f"Peak memory of the process: {small['peak_mib']:.0f} and {large['peak_mib']:.0f} MiB (aim: below "
              f"1024), of it {own[SIZES[0]]:.0f} and {own[SIZES[1]]:.0f} above the imports: "
              f"{own[SIZES[1]] / max(1, own[SIZES[0]]):.1f} times as much.", ""]
    lines += [f"When the first page was shown, {small['left']} and {large['left']} files were not read yet: reading "
              "stops after 0.8 s and goes on with the next call.", "",
              f"Machine: {platform.machine()}, {os.cpu_count()} CPU cores, "
              f"{psutil.virtual_memory().total / 2**30:.0f} GiB; load while measuring {os.getloadavg()[0]:.1f}; "
              f"Python {platform.python_version()}."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    found = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "run", size)
            done = subprocess.run([sys.executable, __file__, "--measure", folder], stdout=subprocess.PIPE, check=True)
            found[size] = json.loads(done.stdout)
    text = "\n".join(report(found)) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
