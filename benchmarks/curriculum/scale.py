"""What deciding costs with many prompts: next + observe for a step, and the state that a checkpoint holds.

    python benchmarks/curriculum/scale.py --out benchmarks/results/curriculum_scale_cpu.md

Prompts, categories and outcomes are drawn by code; no model is needed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum import SAMPLERS, Outcome, Prompts, make

OPTIONS: dict[str, dict] = {
    "recap": {"by": "category"},
    "staged": {"stages": [{"where": {"difficulty": {"max": 0.5}}, "steps": 20}, {"carry": 0.25}]},
}
"""What a sampler needs beyond its defaults."""


KNOBS = ("alp_gmm", "weakness")
"""They choose the knobs of a generator, and know no prompts."""


def made_prompts(size: int) -> Prompts:
    """`size` prompts of ten categories with difficulties."""
    stream = np.random.default_rng(0)
    difficulty = stream.random(size).astype(np.float32)
    columns = {"difficulty": difficulty, "pass_at_k": 1 - difficulty,
               "category": np.array([f"c{i}" for i in range(10)])[stream.integers(0, 10, size)]}
    return Prompts(size, 0, lambda name: columns.get(name, [None] * size))


def measure(name: str, size: int, groups: int, steps: int) -> tuple[float, float, float]:
    """Milliseconds of CPU time a step (mean, longest) and MiB of state."""
    prompts = made_prompts(size)
    sampler: Any = make(CurriculumSettings(name=name, **OPTIONS.get(name, {})), prompts)
    stream, spent = np.random.default_rng(1), []
    if hasattr(sampler, "missing"):  # gain_rl: measured before the first draw
        missing = sampler.missing()
        sampler.measured(missing, np.random.default_rng(2).random(len(missing)))
    sampler.next(groups, 0)  # what is made once: columns read, orders drawn
    for step in range(steps):
        began = time.process_time()
        draws = sampler.next(groups, step)
        spent.append(time.process_time() - began)
        right = stream.random((groups, 8)) < stream.random((groups, 1))
        outcomes = [Outcome(draw, tuple(map(float, row)), tuple(map(bool, row)), 1.0)
                    for draw, row in zip(draws, right, strict=True)]
        began = time.process_time()
        prompts.history.note(outcomes, step)
        sampler.observe(outcomes, step)
        spent[-1] += time.process_time() - began
    held = _bytes({**sampler.state_dict(), **prompts.history.state_dict()})
    return 1e3 * float(np.mean(spent)), 1e3 * max(spent), held / 2**20


def _bytes(value) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samplers", nargs="*", default=[name for name in SAMPLERS if name not in KNOBS])
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_args()
    lines = [f"# Deciding among {args.prompts:,} prompts", "",
             f"next + observe (with the history of prompts) of {args.groups} groups of 8, {args.steps} steps, one "
             "process; what is made once before the first step is left out.", "",
             "| sampler | CPU ms a step, mean | longest | state, MiB |", "|---|---|---|---|"]
    for name in args.samplers:
        mean, longest, held = measure(name, args.prompts, args.groups, args.steps)
        lines.append(f"| {name} | {mean:.1f} | {longest:.1f} | {held:.0f} |")
        print(lines[-1], flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines += ["", f"- peak memory of the process with all of them: {peak:.2f} GiB; {os.cpu_count()} cores",
              f"- command: `python benchmarks/curriculum/scale.py {' '.join(sys.argv[1:])}`", ""]
    if args.out:
        args.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
