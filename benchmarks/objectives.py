"""Every main objective on one task at equal budget: which learn, and how much do they differ?

    python benchmarks/objectives.py --seeds 3 --jobs 2 --out benchmarks/results/objectives_cpu.md
    python benchmarks/objectives.py --variants gspo cispo --seeds 1

A variant is a file of configs/algorithms/, laid on the config: `vlrl train CONFIG extends=algorithms/gspo.yaml`. All
see the same prompts, answers a prompt, steps and learning rate. Numbers are held out and greedy. Runs are kept in
--runs and not repeated when they are there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from learning import ROOT, changed, run

from vlrl import config
from vlrl.store import RunFolder
from vlrl.tools.experiments import report

VARIANTS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "rloo", "reinforce_pp_baseline", "remax",
            "maxrl", "lite_ppo", "kimi", "top_entropy")


def command(args: argparse.Namespace, variant: str, seed: int) -> list[str]:
    """The command line of one run."""
    return [sys.executable, "train.py", args.config, f"extends=algorithms/{variant}.yaml", *args.settings,
            f"seed={seed}", "log.samples_every=0", f"run.dir={args.runs / variant}-{seed}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of every run")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--metric", default="iou", help="of eval.jsonl")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_intermixed_args()
    args.runs = args.runs.resolve()
    work = [(seed, variant) for seed in range(args.seeds) for variant in args.variants]
    with ThreadPoolExecutor(args.jobs) as pool:
        done = pool.map(lambda job: run(command(args, job[1], job[0]), threads=1), work)
        walls = {job: wall for job, (_, wall) in zip(work, done, strict=True)}
    text = table(args, walls)
    print(text)
    if args.out:
        args.out.write_text(text)


def table(args: argparse.Namespace, walls: Mapping[tuple[int, str], float]) -> str:
    """Markdown: a row for each variant, and one for each run."""
    settings = config.load(ROOT / args.config, args.settings)
    lines = [f"# Objectives on {args.config}: held-out {args.metric}", "",
             f"{settings.steps} steps of {settings.rollout.prompts_per_step} prompts x {settings.rollout.group_size} "
             f"answers, learning rate {settings.train.lr:g} for all, {args.seeds} seeds; greedy, held out. Spread: "
             "from the worst seed to the best. Seconds: all of a run, evaluations included, beside another run. A "
             "preset that draws groups anew (dapo) writes more answers.", "",
             "| variant | before | after, mean | spread | gain, mean | s a run |", "|---|---|---|---|---|---|"]
    for variant in args.variants:
        rows = [_gain(args, variant, seed) for seed in range(args.seeds)]
        after = [row.after.mean for row in rows]
        lines.append(f"| {variant} | {rows[0].before.mean:.3f} | {np.mean(after):.3f} | {min(after):.3f} to "
                     f"{max(after):.3f} | {np.mean([row.gain.mean for row in rows]):+.3f} | "
                     f"{np.mean([walls[seed, variant] for seed in range(args.seeds)]):.0f} |")
    lines += ["", "| variant | seed | n | before | after | gain [95 %] |", "|---|---|---|---|---|---|"]
    for variant, seed in itertools.product(args.variants, range(args.seeds)):
        lines.append(f"| {variant} | {seed} | {changed(_folder(args, variant, seed), args.metric)} |")
    pairs = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    words = " ".join(word for before, word in pairs if not {before, word} & {"--out", "--runs"})
    return "\n".join([*lines, "", f"- command: `python benchmarks/objectives.py {words}`",
                      f"- start: `{settings.model.name}`; {args.jobs} runs side by side, one thread each, on "
                      f"{os.cpu_count()} cores", ""])


def _folder(args: argparse.Namespace, variant: str, seed: int) -> RunFolder:
    return RunFolder(args.runs / f"{variant}-{seed}")


def _gain(args: argparse.Namespace, variant: str, seed: int) -> report.Gain:
    return next(g for g in report.gains(_folder(args, variant, seed)) if g.metric == args.metric)


if __name__ == "__main__":
    main()
