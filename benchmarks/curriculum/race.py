"""How many rollouts does each sampler need to get as far as uniform sampling does in the whole budget?

    python benchmarks/curriculum/race.py run --jobs 2            # every sampler x 2 mixes x 5 seeds; kept in --runs
    python benchmarks/curriculum/race.py table --out benchmarks/results/curriculum_cpu.md

A mix is mix_a.yaml or mix_b.yaml; a sampler is a line of SAMPLERS, laid on it. Every answer that is drawn counts:
those of refills, of groups not chosen and of probes, and those that measured offline difficulty. A run ends with the
step in which the budget is spent. Held-out accuracy (greedy) is measured every --every rollouts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

from run_folders import run_folder

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MIXES = ("mix_a", "mix_b")
OFFLINE = 2
"""Answers a prompt of those who know the difficulty beforehand: `vlrl data difficulty`, counted."""


def _lines(name: str, *options: str) -> list[str]:
    return [f"curriculum.name={name}", *(f"curriculum.{option}" for option in options)]


_EASY = "{where: {difficulty: {max: 0.5}}, steps: 13}"
SAMPLERS: dict[str, list[str]] = {
    "uniform": [],
    "sequential": _lines("sequential"),
    "uniform, keep=mixed": ["curriculum.keep=mixed"],
    "uniform, pass_range": ["curriculum.keep={name: pass_range, low: 0.2, high: 0.8}"],
    "uniform, oversample and nearest_half": ["curriculum.oversample=ema", "curriculum.select=nearest_half"],
    "easy_to_hard (offline)": _lines("easy_to_hard"),
    "gaussian": _lines("gaussian"),
    "staged (offline)": _lines("staged", "stages=[" + _EASY + ", {where: {difficulty: {max: 0.9}}}]"),
    "retrospective": _lines("retrospective"),
    "adcl (offline)": _lines("adcl", "probe_size=2"),
    "hard_focus": _lines("hard_focus", "after=16", "group_size=16"),
    "rlcs": ["extends=curricula/rlcs.yaml", "curriculum.by=category"],
    "rlcs, no filters": _lines("rlcs", "by=category"),
    "rlcs (offline)": ["extends=curricula/rlcs.yaml"],
    "sec": _lines("sec"),
    "dump": _lines("dump"),
    "dump, keep=mixed": [*_lines("dump"), "curriculum.keep=mixed"],
    "domain_weighted": _lines("domain_weighted"),
    "recap": _lines("recap", "by=category"),
    "sws": _lines("sws"),
    "prioritised": _lines("prioritised"),
    "replay": _lines("replay"),
    "lifecycle": _lines("lifecycle"),
    "limr": _lines("limr", "epochs=1"),
    "gain_rl": _lines("gain_rl"),
    "gvm": _lines("gvm"),
}
"""alp_gmm and weakness choose the knobs of a generator, which the mixes have not."""


def run_one(job: tuple[str, str, int, argparse.Namespace]) -> str:
    """Runs one sampler on one mix with one seed, unless it is there; returns a line about it."""
    mix, sampler, seed, args = job
    folder = run_folder(args.runs, mix, sampler, seed)
    if (folder / "done.json").exists():
        return f"{folder.name}: there"
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    os.chdir(ROOT)
    import torch
    from session import budgeted

    from vlrl import config
    from vlrl.training.loop import train

    torch.set_num_threads(1)
    offline = [f"data.difficulty={args.runs / mix}.difficulty.jsonl"] if "(offline)" in sampler else []
    settings = config.load(HERE / f"{mix}.yaml", [*SAMPLERS[sampler], *offline, *args.settings, f"seed={seed}",
                                                  f"run.dir={folder}", "steps=100000", "resume=never"])
    count = (settings.task.model_extra or {})["count"]
    began = time.process_time()
    session = train(settings, make_session=budgeted(args.budget, args.every))
    facts = {"mix": mix, "sampler": sampler, "seed": seed, "settings": SAMPLERS[sampler], "budget": args.budget,
             "offline": OFFLINE * count if offline else 0, "steps": session.done,
             "cpu_s": round(time.process_time() - began, 1)}
    (folder / "done.json").write_text(json.dumps(facts))
    return f"{folder.name}: {facts['cpu_s']:.0f} s, {facts['steps']} steps"


def measure_difficulty(mix: str, args: argparse.Namespace) -> None:
    """What the embedded model gets right of each prompt before any training; the same for all seeds."""
    out = args.runs / f"{mix}.difficulty.jsonl"
    if not out.exists() and any("(offline)" in name for name in args.samplers):
        out.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "vlrl", "data", "difficulty", str(HERE / f"{mix}.yaml"), "--answers",
                        str(OFFLINE), "--out", str(out)], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of every run")
    parser.add_argument("--samplers", nargs="*", default=list(SAMPLERS), metavar="NAME")
    parser.add_argument("--mixes", nargs="*", default=MIXES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--budget", type=int, default=5120, help="answers a run")
    parser.add_argument("--every", type=int, default=1024, help="answers between evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/curriculum"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_intermixed_args()
    args.runs = args.runs.resolve()
    sys.path.insert(0, str(HERE))
    if args.what == "table":
        from table import table

        text = table(args, SAMPLERS)
        print(text)
        if args.out:
            args.out.write_text(text)
        return
    for mix in args.mixes:
        measure_difficulty(mix, args)
    jobs = [(mix, sampler, seed, args) for seed in args.seeds for mix in args.mixes for sampler in args.samplers]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for i, line in enumerate(pool.imap_unordered(run_one, jobs), 1):
            print(f"{i}/{len(jobs)} {line}", flush=True)


if __name__ == "__main__":
    main()
