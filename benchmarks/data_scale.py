"""What large data files cost: seconds and memory to open 1,000,000 rows, and rows read in a second, at random places
and in the order of data.stream.

    python benchmarks/data_scale.py --out benchmarks/results/data_scale_cpu.md

Rows are made by code. Each case opens its file in a process of its own, once without anything kept of it and once
again; memory is what the process holds above its imports.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import platform
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

CASES = ("rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows-in-one-group.parquet", "rows.arrow", "rows.tar")
_BLOCK = 10_000


def made(start: int, count: int) -> dict[str, list[Any]]:
    """Columns of `count` rows from number `start`, about 300 bytes each as JSON."""
    stream = np.random.default_rng(start)
    words = np.array(["red", "mug", "left", "of", "the", "open", "laptop", "near", "window", "chair", "tall", "plant"])
    texts = [" ".join(row) for row in words[stream.integers(0, len(words), (count, 24))]]
    return {"id": [f"row-{i:08d}" for i in range(start, start + count)], "question": texts,
            "answer": [str(v) for v in stream.integers(0, 100, count)], "answer_type": ["number"] * count,
            "category": [f"c{v}" for v in stream.integers(0, 10, count)],
            "difficulty": stream.random(count).round(4).tolist()}


def write(folder: Path, rows: int) -> None:
    """The files of CASES."""
    import gzip

    blocks = [(start, min(_BLOCK, rows - start)) for start in range(0, rows, _BLOCK)]
    schema = pa.table(made(0, 1)).schema
    with (open(folder / "rows.jsonl", "w", encoding="utf-8") as lines,
          gzip.open(folder / "rows.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as packed,
          pq.ParquetWriter(folder / "rows.parquet", schema) as groups,
          pq.ParquetWriter(folder / "rows-in-one-group.parquet", schema) as one,
          pa.ipc.new_stream(folder / "rows.arrow", schema) as arrow,
          tarfile.open(folder / "rows.tar", "w", format=tarfile.USTAR_FORMAT) as tar):
        every = []
        for start, count in blocks:
            columns = made(start, count)
            text = "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n"
                           for row in zip(*columns.values(), strict=True))
            lines.write(text)
            for line in text.splitlines():
                member = tarfile.TarInfo(f"{json.loads(line)['id']}.json")
                member.size = len(line)
                tar.addfile(member, io.BytesIO(line.encode()))
            tar.getmembers().clear()  # they would be held until the end
            packed.write(text)
            table = pa.table(columns)
            groups.write_table(table, row_group_size=1000)
            arrow.write_table(table, max_chunksize=1000)
            every.append(table)
        one.write_table(pa.concat_tables(every), row_group_size=rows)


def measure(path: Path, cache: Path, reads: int) -> dict[str, float]:
    """Opens a file as a run does, reads rows at random; in this process."""
    from vlrl.config.schema import DataSettings
    from vlrl.curriculum import Prompts, Uniform
    from vlrl.data import read_samples
    from vlrl.data.sources import lazy_dataset  # noqa: F401  imports are not what is measured
    from vlrl.task import Task

    task, process = Task(), psutil.Process()
    task.data = DataSettings(train=str(path), cache=str(cache), index="lazy")
    gc.collect()
    before, began, worked = process.memory_info().rss, time.perf_counter(), time.process_time()
    samples = read_samples(task, "train")
    opened, worked, after = time.perf_counter() - began, time.process_time() - worked, process.memory_info().rss
    prompts = Prompts.of(samples, seed=0)
    prompts.buffer = DataSettings().shuffle_buffer
    streamed = [draw.index for draw in Uniform(prompts).next(reads, 0)]
    _read(samples, streamed[:1])
    first = time.perf_counter() - began
    streamed_s = _read(samples, streamed)
    stream_mib = (process.memory_info().rss - before) / 2**20
    order = random.Random(0).sample(range(len(samples)), min(reads, len(samples)))
    return {"rows": len(samples), "open_s": opened, "open_cpu_s": worked, "open_mib": (after - before) / 2**20,
            "first_s": first, "stream_mib": stream_mib, "streamed_per_s": len(streamed) / streamed_s,
            "reads_per_s": len(order) / _read(samples, order),
            "read_mib": (process.memory_info().rss - before) / 2**20}


def _read(samples: Any, places: list[int]) -> float:
    """CPU seconds of whole samples at these places."""
    began = time.process_time()
    for place in places:
        if (found := samples[place].id) != f"row-{place:08d}":
            raise SystemExit(f"row {place} is {found}")
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--reads", type=int, default=2_000)
    parser.add_argument("--folder", type=Path, help="where the files are made (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="markdown file to write")
    parser.add_argument("--one", nargs=2, type=Path, metavar=("FILE", "CACHE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        file, cache = args.one
        print(json.dumps(measure(file, cache, args.reads)))
        return
    with tempfile.TemporaryDirectory(prefix="vlrl-scale-", dir=args.folder) as name:
        folder = Path(name)
        write(folder, args.rows)
        lines = [_row(folder, case, args.reads, kept) for case in CASES for kept in (False, True)]
    text = _page(args.rows, args.reads, lines)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text)


def _row(folder: Path, case: str, reads: int, kept: bool) -> str:
    command = [sys.executable, __file__, "--reads", str(reads), "--one", folder / case, folder / f"cache-{case}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    cells = [case, f"{(folder / case).stat().st_size / 2**20:.0f}", "again" if kept else "first",
             f"{found['open_s']:.2f}", f"{found['open_cpu_s']:.2f}", f"{found['first_s']:.2f}",
             f"{found['open_mib']:.0f}", f"{found['stream_mib']:.0f}", f"{found['read_mib']:.0f}",
             f"{found['streamed_per_s']:,.0f}", f"{found['reads_per_s']:,.0f}"]
    print(line := f"| {' | '.join(cells)} |", flush=True)
    return line


def _page(rows: int, reads: int, lines: list[str]) -> str:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return "\n".join([
        f"# Opening {rows:,} rows", "",
        "Each line is a process of its own. `first`: nothing is kept of the file yet; `again`: what the first one kept "
        "is there. Memory is resident, above the imports, pages of mapped files included. Reads are whole samples, "
        f"parsed and checked: first {reads:,} in the order of data.stream=true (data.shuffle_buffer=1000), then as "
        "many at random places, as without it. The first sample is that of the streamed order, counted from the start: "
        "opening, the history of the sampler, its order of all rows, one read. Load average of the machine meanwhile: "
        f"{os.getloadavg()[1]:.0f}; where it is above the number of cores, seconds are far above CPU seconds.", "",
        "| file | MiB | opened | seconds to open | CPU seconds | seconds to the first sample | MiB after opening | MiB "
        "after the stream | MiB after random reads | streamed reads a CPU second | random reads a CPU second |",
        "|---|---|---|---|---|---|---|---|---|---|---|", *lines, "",
        f"- {machine}, pyarrow {pa.__version__}",
        f"- command: `python benchmarks/data_scale.py --rows {rows} --reads {reads}`", ""])


if __name__ == "__main__":
    main()
