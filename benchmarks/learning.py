"""Does a config learn? RL over several seeds, beside a random-reward control and SFT on as many samples.

    python benchmarks/learning.py configs/quickstart.yaml --metric iou --control RandomGrounding
    python benchmarks/learning.py configs/classification/digits.yaml --metric accuracy --control RandomDigits
    python benchmarks/learning.py configs/zoom.yaml --metric accuracy --kinds rl --variant "no tool:task.tool=false"

A variant is RL with other settings, KIND:key=value,key=value. Every number is from held-out samples, greedy; a run's
interval is a paired bootstrap over the samples. Runs are kept in --runs and not repeated when they are there."""

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from vlrl import config
from vlrl.models.loading import resolve
from vlrl.store import RunFolder
from vlrl.tools.experiments import report

ROOT = Path(__file__).resolve().parent.parent


def commands(args: argparse.Namespace) -> dict[tuple[str, int], list[str]]:
    """(kind, seed) -> command line."""
    control = f"task.name={ROOT / 'benchmarks' / 'random_reward.py'}:{args.control}"
    if "control" in args.kinds and not args.control:
        raise SystemExit("--kinds control needs --control, a class of benchmarks/random_reward.py")
    kinds = {"rl": ["train.py", args.config], "control": ["train.py", args.config, control],
             "sft": ["-m", "vlrl", "sft", args.config], "sft lr x 5": ["-m", "vlrl", "sft", args.config,
                                                                  f"train.lr={5 * config.load(args.config).train.lr}"]}
    kinds = {kind: words for kind, words in kinds.items() if kind in args.kinds}
    for kind, _, settings in (variant.partition(":") for variant in args.variant):
        kinds[kind] = ["train.py", args.config, *settings.split(",")]
    return {(kind, seed): [sys.executable, *words, f"seed={seed}", *args.settings, "log.samples_every=0",
                           f"run.dir={args.runs / Path(args.config).stem / kind.replace(' ', '-')}-{seed}"]
            for kind, words in kinds.items() for seed in range(args.seeds)}


def run(command: list[str], threads: int) -> tuple[Path, float]:
    """Runs one command to its end; returns its run folder and wall seconds (0 when it was finished before)."""
    folder = Path(command[-1].removeprefix("run.dir="))
    start = time.perf_counter()
    if RunFolder(folder).last_heartbeat().get("state") != "finished":
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        (folder / "wall_s").write_text(str(time.perf_counter() - start))
    return folder, float((folder / "wall_s").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--metric", required=True, nargs="+", help="of eval.jsonl, e.g. iou")
    parser.add_argument("--lowest", nargs="*", default=(), help="metrics whose least value of all evaluations is shown")
    parser.add_argument("--variant", action="append", default=[], help="KIND:key=value,key=value; may be repeated")
    parser.add_argument("--control", help="class of benchmarks/random_reward.py")
    parser.add_argument("--kinds", nargs="*", default=["rl", "control", "sft", "sft lr x 5"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=2, help="threads of each run")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_intermixed_args()
    args.runs = args.runs.resolve()
    work = commands(args)
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = dict(zip(work, pool.map(lambda c: run(c, args.threads), work.values()), strict=True))
    text = table(args, folders)
    print(text)
    if args.out:
        args.out.write_text(text)


def table(args: argparse.Namespace, folders: dict) -> str:
    """Markdown: one row per run, and how it was made."""
    lines = [f"# {args.config}: held-out {', '.join(args.metric)}", "",
             "| run | seed | metric | n | before | after | gain [95 %] | wall s |", "|---|---|---|---|---|---|---|---|"]
    for metric in args.metric:
        for (kind, seed), (folder, wall) in folders.items():
            lines.append(f"| {kind} | {seed} | {metric} | {changed(RunFolder(folder), metric)} | {wall:.0f} |")
    for metric in args.lowest:
        lines += ["", f"Least {metric} of all evaluations: " + ", ".join(
            f"{kind} {seed}: {min(line[metric] for line in RunFolder(folder).evals() if metric in line):.3f}"
            for (kind, seed), (folder, _) in folders.items()) + "."]
    settings = config.load(args.config, args.settings)
    weights = Path(resolve(settings.model.name)) / "model.safetensors"
    return "\n".join([*lines, "", f"- command: `python benchmarks/learning.py {shlex.join(_shown())}`",
                      f"- start: `{settings.model.name}`, sha256 {sha256(weights.read_bytes()).hexdigest()}",
                      f"- {settings.steps} steps of {settings.rollout.prompts_per_step} prompts x "
                      f"{settings.rollout.group_size} answers (SFT: the same prompts, one given answer each)",
                      f"- {args.jobs} runs side by side with {args.threads} threads each on {os.cpu_count()} cores, "
                      f"{platform.machine()}; versions {json.dumps(_versions())}", ""])


def changed(run: RunFolder, metric: str) -> str:
    """n, before, after and gain of a metric; one of a whole split, such as F1, has no interval."""
    (row,) = [g for g in report.gains(run) if g.metric == metric]
    interval = "" if math.isnan(row.gain.low) else f" [{row.gain.low:+.3f}, {row.gain.high:+.3f}]"
    return f"{row.n} | {row.before.mean:.3f} | {row.after.mean:.3f} | {row.gain.mean:+.3f}{interval}"


def _shown() -> list[str]:
    words = sys.argv[1:]
    return [word for before, word in zip(["", *words], words, strict=False)
            if not word.startswith("--out") and before != "--out"]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers")}


if __name__ == "__main__":
    main()
