"""Digits with thinking under a chat template that ends its prompts with <think>: what training makes of the form.

    python benchmarks/opened.py [key=value ...] --seeds 3 --out benchmarks/results/opened_digits_cpu.md

The start is the embedded model, which was taught to write `<think>...</think><answer>...</answer>`, with a template
that opens the thinking itself: its answers begin behind a `<think>` that they hold no more. Each run is 20 steps of
`train.py configs/classification/digits.yaml task.thinking=thinking seed=...`; format and accuracy are held out and
greedy. Runs are kept in --runs and not repeated when they are there.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev

from learning import run
from thinking import CONFIG

from vlrl.models.loading import resolve
from vlrl.store import RunFolder
from vlrl.tools.experiments import report
from vlrl.tools.experiments.report import Gain

START = "embedded/tiny-qwen3-vl"
OPENED = "<think>\\n"
METRICS = ("format", "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/opened"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_intermixed_args()
    model = start(args.runs.resolve())
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = [folder for folder, _ in pool.map(lambda command: run(command, args.threads), [
            command(model, args.settings, args.runs.resolve(), seed) for seed in range(args.seeds)])]
    text = "\n".join(table([gains(folder) for folder in folders], args.settings))
    print(text)
    if args.out:
        args.out.write_text(text)


def start(runs: Path) -> Path:
    """Returns a copy of the embedded model whose template opens the thinking."""
    folder = runs / "start"
    if not folder.exists():
        shutil.copytree(resolve(START), folder)
        template = folder / "chat_template.jinja"
        text = template.read_text()
        template.write_text(f"{text.removesuffix('{% endif %}')}{{{{ '{OPENED}' }}}}{{% endif %}}")
    return folder


def command(model: Path, settings: Sequence[str], runs: Path, seed: int) -> list[str]:
    return [sys.executable, "train.py", CONFIG, "task.thinking=thinking", f"model.name={model}", f"seed={seed}",
            "steps=20", "eval.every=20", *settings, "log.samples_every=0", f"run.dir={runs / f'seed-{seed}'}"]


def gains(folder: Path) -> dict[str, Gain]:
    """Returns the held-out metrics of a finished run."""
    return {g.metric: g for g in report.gains(RunFolder(folder)) if g.split == "heldout" and g.metric in METRICS}


def table(found: Sequence[dict[str, Gain]], settings: Sequence[str]) -> list[str]:
    """Markdown: a row per seed and metric, and what the seeds say together."""
    lines = [f"# {CONFIG} with thinking, behind a template that opens <think>", "",
             "| metric | seed | n | before | after 20 steps | gain [95 %] |", "|---|---|---|---|---|---|"]
    for metric in METRICS:
        for seed, own in enumerate(found):
            g = own[metric]
            lines.append(f"| {metric} | {seed} | {g.n} | {g.before.mean:.3f} | {g.after.mean:.3f} | "
                         f"{g.gain.mean:+.3f} [{g.gain.low:+.3f}, {g.gain.high:+.3f}] |")
        rises = [own[metric].gain.mean for own in found]
        spread = f", standard deviation {stdev(rises):.3f}" if len(rises) > 1 else ""
        lines.append(f"| **{metric}, mean** | {len(rises)} | | {fmean(o[metric].before.mean for o in found):.3f} | "
                     f"{fmean(o[metric].after.mean for o in found):.3f} | {fmean(rises):+.3f}{spread} |")
    return [*lines, "", f"- start: `{START}` with `{OPENED}` at the end of its generation prompt",
            f"- command: `python benchmarks/opened.py {shlex.join([*settings, '--seeds', str(len(found))])}`",
            f"- {os.cpu_count()} cores, {platform.machine()}; torch {version('torch')}, transformers "
            f"{version('transformers')}", ""]


if __name__ == "__main__":
    main()
