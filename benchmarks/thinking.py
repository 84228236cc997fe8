"""Digits without and with thinking, at equal samples: held-out accuracy and seconds over several seeds.

    python benchmarks/thinking.py [key=value ...] --seeds 5 --out benchmarks/results/thinking_digits_cpu.md

Each run is `train.py configs/classification/digits.yaml task.thinking=... seed=...`. Two runs of a seed draw the same
prompts and as many answers to each; they differ in the template alone, and so in the length of the answers. Accuracy
is held out and greedy, under the template of the run. Runs are kept in --runs and not repeated when they are there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from learning import run

from vlrl import config
from vlrl.evaluation.stats import Interval
from vlrl.store import RunFolder
from vlrl.tools.experiments import report

CONFIG = "configs/classification/digits.yaml"
MODES = ("no_thinking", "thinking")


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    n: int
    before: Interval
    after: Interval
    gain: Interval
    tokens: float
    """Mean tokens of an answer in training."""
    step_s: float
    """Seconds of all steps, evaluations and saving left out."""
    wall_s: float
    """Seconds of the whole command."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=2, help="threads of each run")
    parser.add_argument("--runs", type=Path, default=Path("runs/thinking"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_intermixed_args()
    work = commands(args.settings, args.seeds, args.runs.resolve())
    with ThreadPoolExecutor(args.jobs) as pool:
        done = pool.map(lambda command: result(*run(command, args.threads)), work.values())
        text = "\n".join(table(dict(zip(work, done, strict=True)), args))
    print(text)
    if args.out:
        args.out.write_text(text)


def commands(settings: Sequence[str], seeds: int, runs: Path) -> dict[tuple[str, int], list[str]]:
    """(mode, seed) -> command line; the modes of a seed one after the other, so that both meet the same machine."""
    return {(mode, seed): [sys.executable, "train.py", CONFIG, f"task.thinking={mode}", f"seed={seed}", *settings,
                           "log.samples_every=0", f"run.dir={runs / mode}-{seed}"]
            for seed in range(seeds) for mode in MODES}


def result(folder: Path, wall_s: float) -> Result:
    """Reads a finished run."""
    opened = RunFolder(folder)
    (row,) = [g for g in report.gains(opened) if (g.split, g.metric) == ("heldout", "accuracy")]
    steps = [*opened.metrics()]
    aside = ("time/eval_s", "time/save_s")
    return Result(row.n, row.before, row.after, row.gain, fmean(s["completion/length_mean"] for s in steps),
                  sum(s["time/total_s"] - sum(s.get(name, 0.0) for name in aside) for s in steps), wall_s)


def table(found: Mapping[tuple[str, int], Result], args: argparse.Namespace) -> list[str]:
    """Markdown: a row per run, the means of both modes, and what the seeds say about the difference."""
    lines = [f"# {CONFIG}: held-out accuracy without and with thinking", "",
             "| template | seed | n | before | after | gain [95 %] | tokens an answer | s in steps | wall s |",
             "|---|---|---|---|---|---|---|---|---|"]
    for (mode, seed), r in sorted(found.items()):
        gain = f"{r.gain.mean:+.3f} [{r.gain.low:+.3f}, {r.gain.high:+.3f}]"
        lines.append(f"| {mode} | {seed} | {r.n} | {r.before.mean:.3f} | {r.after.mean:.3f} | {gain} | "
                     f"{r.tokens:.1f} | {r.step_s:.0f} | {r.wall_s:.0f} |")
    for mode in MODES:
        runs = [r for (of, _), r in found.items() if of == mode]
        lines.append(f"| **{mode}, mean** | {len(runs)} | {runs[0].n} | {fmean(r.before.mean for r in runs):.3f} | "
                     f"{fmean(r.after.mean for r in runs):.3f} | {fmean(r.gain.mean for r in runs):+.3f} | "
                     f"{fmean(r.tokens for r in runs):.1f} | {fmean(r.step_s for r in runs):.0f} | "
                     f"{fmean(r.wall_s for r in runs):.0f} |")
    pairs = [tuple(found[mode, seed] for mode in MODES) for seed in range(args.seeds)]
    ahead = [b.after.mean - a.after.mean for a, b in pairs]
    times = [b.step_s / a.step_s for a, b in pairs]
    settings = config.load(CONFIG, args.settings)
    return [*lines, "",
            f"- thinking less no_thinking, accuracy after training, by seed: {fmean(ahead):+.3f} in the mean, from "
            f"{min(ahead):+.3f} to {max(ahead):+.3f}; seconds in steps {fmean(times):.2f} times as many",
            f"- {settings.steps} steps of {settings.rollout.prompts_per_step} prompts x {settings.rollout.group_size} "
            f"answers each; start: `{settings.model.name}`",
            f"- command: `python benchmarks/thinking.py {_shown()}`",
            f"- {args.jobs} runs side by side with {args.threads} threads each on {os.cpu_count()} cores, "
            f"{platform.machine()}; torch {version('torch')}, transformers {version('transformers')}", ""]


def _shown() -> str:
    return shlex.join(word for word in sys.argv[1:] if word != "--out" and not word.endswith(".md"))


if __name__ == "__main__":
    main()
