#!/usr/bin/env python3
r"""Trains for hours in small steps, and shows whether memory, file handles or seconds a step grow.

    python benchmarks/soak.py configs/quickstart.yaml --hours 2 --threads 1 --out benchmarks/results/soak_cpu.md

Every half minute: anonymous memory (what its processes share counts once; libraries do not count, since how much of
them is a process's own depends on others), open file handles, threads and processes of the run and of those that it
started, and their processor time. A line is fitted to each, without the first tenth of the time. The learning rate is
next to nothing: a policy that learns answers in other lengths, which would change the seconds of a step. The run is
stopped as by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("steps=10000000", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=16",
         "train.lr=1e-12", "train.schedule=constant", "eval.every=200", "eval.samples=16", "save.every=100",
         "save.keep=3", "save.best=iou", "curriculum.name=sec", "log.samples_every=0")
EVERY_S = 30.0
FIRST = 20
"""Steps that are left out of the speed."""
NAMES = {"memory_mb": ("memory", "MiB"), "handles": ("file handles", ""), "threads": ("threads", ""),
         "processes": ("processes", "")}


def sample(run: psutil.Process, folder: Path, begun: float) -> dict[str, float] | None:
    """What the run and its processes hold, and the steps completed; None when one of them has just ended."""
    try:
        steps = json.loads((folder / "heartbeat.json").read_text())["step"]
        everyone = [run, *run.children(recursive=True)]
        times = [p.cpu_times() for p in everyone]
        return {"at_s": time.monotonic() - begun, "steps": steps,
                "memory_mb": sum(anonymous(p.pid) for p in everyone) / 2**10,
                "handles": sum(p.num_fds() for p in everyone), "threads": sum(p.num_threads() for p in everyone),
                "processes": len(everyone), "cpu_s": sum(t.user + t.system for t in times)}
    except (psutil.Error, OSError):  # a child may end in between: the next sample counts
        return None


def anonymous(pid: int) -> int:
    """KiB of a process's memory that is no file's; a page that processes share is divided among them."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss_Anon:"))


def soak(folder: Path, config: str, hours: float, threads: int, words: Sequence[str]) -> list[dict[str, float]]:
    """Runs for `hours` and samples; the samples are also in samples.jsonl beside the run."""
    command = [sys.executable, "train.py", config, *WORDS, *words, f"run.dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    found, begun, due = [], time.monotonic(), 0.0
    with open(folder.with_suffix(".log"), "wb") as log, open(folder.with_suffix(".jsonl"), "w") as kept:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        while time.monotonic() - begun < hours * 3600 and process.poll() is None:
            if time.monotonic() - begun >= due:
                due += EVERY_S
                if one := sample(psutil.Process(process.pid), folder, begun):
                    found.append(one)
                    kept.write(json.dumps(one) + "\n")
                    kept.flush()
            time.sleep(0.5)
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode}: "
                               f"{folder.with_suffix('.log').read_text()[-2000:]}")
        process.send_signal(signal.SIGINT)
        code = process.wait(600)
    if code != 130:
        raise RuntimeError(f"stopped, the run ended with {code}: {folder.with_suffix('.log').read_text()[-2000:]}")
    return found


def line(found: Sequence[dict[str, float]], name: str) -> Any:
    """The fitted line of a quantity by hours, without the first tenth of the time. Raises RuntimeError where fewer than
    two samples are left.
    """
    kept = [(s["at_s"] / 3600, s[name]) for s in found if s["at_s"] >= found[-1]["at_s"] / 10]
    if len(kept) < 2:
        raise RuntimeError(f"{len(found)} samples, one in {EVERY_S:g} s, show no change: let it run for more --hours")
    return stats.linregress(*np.array(kept).T)


def seconds(metrics: Sequence[dict[str, float]]) -> list[float]:
    """Seconds of each step without evaluating and saving."""
    return [m["time/total_s"] - m.get("time/eval_s", 0.0) - m.get("time/save_s", 0.0) for m in metrics[FIRST:]]


def tenths(values: Sequence[Any]) -> list[np.ndarray]:
    """The values in ten parts, in fewer where there are fewer."""
    return np.array_split(np.array(values), min(10, len(values))) if values else []


def table(args: argparse.Namespace, found: Sequence[dict[str, float]], metrics: Sequence[dict[str, float]]) -> str:
    """The page."""
    kept = [s for s in found if s["at_s"] >= found[-1]["at_s"] / 10]
    rows = []
    for name, (title, unit) in NAMES.items():
        fit = line(found, name)
        rows.append(f"| {title}{f', {unit}' if unit else ''} | {kept[0][name]:.0f} | {kept[-1][name]:.0f} | "
                    f"{min(s[name] for s in kept):.0f} to {max(s[name] for s in kept):.0f} | {fit.slope:+.2f} "
                    f"(± {1.96 * fit.stderr:.2f}) |")
    each = seconds(metrics)
    peaks = [float(part[-1]) * 1024 for part in tenths([m["memory/peak_gib"] for m in metrics])]
    wall = [statistics.median(part) for part in tenths(each)]
    parts = tenths([(s["cpu_s"], s["steps"]) for s in found])
    busy = [float((p[-1, 0] - p[0, 0]) / max(p[-1, 1] - p[0, 1], 1)) for p in parts]
    words = " ".join(args.settings)
    return "\n".join([
        "# Soak", "",
        f"`python benchmarks/soak.py {args.config} --hours {args.hours:g} --threads {args.threads}"
        f"{' ' if words else ''}{words}`: {len(metrics)} steps in {found[-1]['at_s'] / 3600:.2f} hours. "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {args.note}".rstrip(", ") + ".", "",
        f"Settings: `{' '.join(WORDS)}`. So {len(metrics) // 100} checkpoints and {len(metrics) // 200} evaluations.",
        "",
        "| | after a tenth | end | range | change an hour (95 %) |", "|---|---|---|---|---|", *rows, "",
        f"Peak resident memory of the training process so far, MiB, by tenths: "
        f"{', '.join(f'{p:.0f}' for p in peaks)}.\n",
        by_tenths("Seconds of processor time a step, everything included", busy),
        by_tenths("Median seconds of a step, evaluating and saving aside", wall), "",
        f"![samples]({plot_name(args)})", ""])


def by_tenths(title: str, parts: Sequence[float]) -> str:
    """A line of the page."""
    change = f"{100 * (parts[-1] / parts[0] - 1):+.1f} %" if parts[0] else f"{parts[-1] - parts[0]:+.3f}"
    return (f"{title}, by tenths of the run: {', '.join(f'{p:.3f}' for p in parts)}; the last one is {change} beside "
            "the first.\n")


def plot_name(args: argparse.Namespace) -> str:
    """The picture beside the page."""
    return Path(args.out).with_suffix(".png").name


def plot(path: Path, found: Sequence[dict[str, float]], metrics: Sequence[dict[str, float]]) -> None:
    """Memory, handles and seconds a step over the hours."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hours = [s["at_s"] / 3600 for s in found]
    figure, axes = plt.subplots(3, 1, figsize=(7, 7), sharex=True, layout="constrained")
    for axis, name in zip(axes, ("memory_mb", "handles"), strict=False):
        axis.plot(hours, [s[name] for s in found])
        axis.set_ylabel(", ".join(filter(None, NAMES[name])))
    each = np.array(seconds(metrics))
    axes[2].plot(np.linspace(hours[0], hours[-1], len(each)), each, ".", markersize=1)
    axes[2].set_ylabel("seconds a step")
    axes[2].set_ylim(0, float(np.quantile(each, 0.999)) * 1.1)
    axes[2].set_xlabel("hours")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Runs, fits, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("settings", nargs="*", help="key=value, after those of the benchmark")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="the run; emptied first")
    parser.add_argument("--note", default="", help="what the page says of the machine")
    parser.add_argument("--out", default="", help="the page; a plot is written beside it")
    args = parser.parse_args()
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.folder, ignore_errors=True)
    found = soak(args.folder.resolve(), str(Path(args.config).resolve()), args.hours, args.threads, args.settings)
    metrics = [json.loads(text) for text in (args.folder / "metrics.jsonl").read_text().splitlines()]
    page = table(args, found, metrics)
    print(page)
    if args.out:
        Path(args.out).write_text(page)
        plot(Path(args.out).with_suffix(".png"), found, metrics)


if __name__ == "__main__":
    main()
