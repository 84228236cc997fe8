"""Does a run learn the same whatever generates its answers, and what does a step cost? hf, vllm and vllm_server.

    python benchmarks/engines.py --seeds 3 --out benchmarks/results/engines_cpu.md
    python benchmarks/engines.py --engines hf vllm --seeds 1 steps=10 --runs /tmp/engines

Held-out numbers are greedy; the spread is from the worst seed to the best. Seconds are means over the steps after the
first, without evaluations and saving; an engine's start is not in them. One `vlrl serve` serves all runs of
vllm_server. Runs are kept in --runs, go on where they were stopped, and are not repeated when they are there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from learning import ROOT, changed, run

from vlrl import config
from vlrl.store import RunFolder
from vlrl.tools.experiments import report

ENGINES = ("hf", "vllm", "vllm_server")
PARTS = ("rollout", "train", "sync")
READY_S = 900
"""Most seconds until a server answers."""


def folder_of(args: argparse.Namespace, engine: str, seed: int) -> Path:
    """The run folder of an engine and seed."""
    return args.runs / f"{engine}-{seed}"


def command(args: argparse.Namespace, engine: str, seed: int, words: Sequence[str] = ()) -> list[str]:
    """The command line of one run; `words` are further settings."""
    return [sys.executable, "train.py", args.config, *args.settings, f"engine={engine}", *words, f"seed={seed}",
            "log.samples_every=0", f"run.dir={folder_of(args, engine, seed)}"]


def finished(args: argparse.Namespace, engine: str, seed: int) -> bool:
    """Whether a run is there already."""
    return RunFolder(folder_of(args, engine, seed)).last_heartbeat().get("state") == "finished"


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[list[str]]:
    """A server of the config for as long as it lasts; the settings that name it."""
    port = _free_port()
    files = args.runs / "servers"
    words = [sys.executable, "-m", "vlrl", "serve", args.config, *args.settings, f"run.dir={args.runs / 'any'}",
             "--port", str(port), "--folder", str(files)]
    args.runs.mkdir(parents=True, exist_ok=True)
    with open(args.runs / "serve.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, files / "servers.json", args.runs / "serve.log")
            yield [f"engine.servers=[http://127.0.0.1:{port}]", f"engine.key_file={files / 'key'}"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait(process: subprocess.Popen, ready: Path, log: Path) -> None:
    """Until `vlrl serve` has written servers.json, which it does when the servers answer."""
    end = time.monotonic() + READY_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server did not start; see {log}:\n{log.read_text()[-2000:]}")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of every run")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--metric", default="iou", help="of eval.jsonl")
    parser.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each run and of the server")
    parser.add_argument("--runs", type=Path, default=Path("runs/engines"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_intermixed_args()
    args.runs = args.runs.resolve()
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for engine in args.engines:
        left = [seed for seed in range(args.seeds) if not finished(args, engine, seed)]
        with server(args) if left and engine == "vllm_server" else contextlib.nullcontext([]) as words:
            for seed in left:  # one at a time: what is timed shares the machine with nothing of its own
                run(command(args, engine, seed, words), args.threads)
    text = table(args)
    print(text)
    if args.out:
        args.out.write_text(text)


def table(args: argparse.Namespace) -> str:
    """Markdown: a row for each engine, and one for each run."""
    settings = config.load(ROOT / args.config, args.settings)
    lines = [f"# Engines on {args.config}: held-out {args.metric} and seconds a step", "",
             f"{settings.steps} steps of {settings.rollout.prompts_per_step} prompts x {settings.rollout.group_size} "
             f"answers, {args.seeds} seeds; greedy, held out. Spread: from the worst seed to the best. Seconds: means "
             "over the steps after the first.", "",
             "| engine | before | after, mean | spread | s a step | rollout | train | sync | mismatch/kl, largest |",
             "|---|---|---|---|---|---|---|---|---|"]
    for engine in args.engines:
        gains = [_gain(args, engine, seed) for seed in range(args.seeds)]
        steps = [line for seed in range(args.seeds) for line in _steps(folder_of(args, engine, seed))]
        after = [gain.after.mean for gain in gains]
        seconds = [fmean(line.get(f"time/{part}_s", 0.0) for line in steps) for part in PARTS]
        total = fmean(_alone(line) for line in steps)
        cells = [engine, f"{gains[0].before.mean:.3f}", f"{fmean(after):.3f}", f"{min(after):.3f} to {max(after):.3f}",
                 *(f"{s:.3f}" for s in (total, *seconds)), f"{max(line['mismatch/kl'] for line in steps):.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| engine | seed | n | before | after | gain [95 %] |", "|---|---|---|---|---|---|"]
    for engine, seed in itertools.product(args.engines, range(args.seeds)):
        lines.append(f"| {engine} | {seed} | {changed(RunFolder(folder_of(args, engine, seed)), args.metric)} |")
    return "\n".join([*lines, "", f"- start: `{settings.model.name}`; one run at a time, {args.threads} thread"
                      f"{'s' * (args.threads > 1)} on {os.cpu_count()} cores, {platform.machine()}; the server has as "
                      "many of its own", ""])


def _gain(args: argparse.Namespace, engine: str, seed: int) -> report.Gain:
    return next(g for g in report.gains(RunFolder(folder_of(args, engine, seed))) if g.metric == args.metric)


def _steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl after the first step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["step"]] or lines


def _alone(line: dict[str, Any]) -> float:
    """Seconds of a step, without evaluating and saving."""
    return line["time/total_s"] - line.get("time/eval_s", 0.0) - line.get("time/save_s", 0.0)


if __name__ == "__main__":
    main()
