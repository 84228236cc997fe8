"""How many rollouts does each sampler need to get as far as uniform sampling does in the whole budget?

    python benchmarks/curriculum/race.py run --jobs 2            # every sampler x 2 mixes x 5 seeds; kept in --runs
    python benchmarks/curriculum/race.py table --out benchmarks/results/curriculum_cpu.md

A mix is mix_a.yaml or mix_b.yaml; a sampler is a line of SAMPLERS, laid on it. Every answer that is drawn counts:
those of refills, of groups not chosen and of probes, and those that measured offline difficulty. A run ends with the
step in which the budget is spent. Held-out accuracy (greedy) is measured every --every rollouts."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.isotonic import isotonic_regression

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


def run_folder(runs: Path, mix: str, sampler: str, seed: int) -> Path:
    """The folder of one sampler on one mix with one seed; what is no letter or digit becomes an underscore."""
    return runs / f"{mix}-{''.join(c if c.isalnum() else '_' for c in sampler)}-{seed}"


def budgeted(budget: int, every: int) -> Any:
    """A session that ends once `budget` answers are drawn and evaluates every `every` answers.

    The answers drawn before each evaluation are written beside it, in `race.jsonl`."""

    from vlrl.training.session import Session

    class Budgeted(Session):
        _next = 0

        @property
        def spent(self) -> int:
            return self.parts.source.tally.answers

        def evaluate_if_due(self, done: int) -> None:
            if self.spent >= self._next:
                self._next = (self.spent // every + 1) * every
                self._measure()

        def interrupted(self) -> bool:
            return self.spent >= budget or super().interrupted()

        def finish(self) -> None:
            self.parts.engine.sync(self.parts.policy, self.done)
            self._measure()
            self._state = "finished"

        def _measure(self) -> None:
            self._evaluate()
            record = self.folder.evals()[-1]
            kept = {k: v for k, v in record.items() if k in ("step", "correct") or k.startswith("level/")}
            with open(self.folder.path / "race.jsonl", "a") as file:
                file.write(json.dumps({"answers": self.spent, **kept}) + "\n")

    return Budgeted


def run_one(job: tuple[str, str, int, argparse.Namespace]) -> str:
    """Runs one sampler on one mix with one seed, unless it is there; returns a line about it."""
    mix, sampler, seed, args = job
    folder = run_folder(args.runs, mix, sampler, seed)
    if (folder / "done.json").exists():
        return f"{folder.name}: there"
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    os.chdir(ROOT)
    import torch

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


# --- the table --------------------------------------------------------------------------------------------------------

STEP = 32
"""Answers between the points at which curves are compared."""


@dataclass(frozen=True)
class Runs:
    """All seeds of one sampler on one mix."""

    curves: np.ndarray
    """[seeds, points] held-out accuracy, lines between the evaluations."""
    zero_variance: float
    """Share of the trained groups."""
    wasted: float
    """Share of the answers in groups that were not trained on."""
    cpu_s: float


def read(args: argparse.Namespace, mix: str, sampler: str) -> Runs | None:
    """The runs of a sampler; None when not all seeds are there."""
    folders = [run_folder(args.runs, mix, sampler, seed) for seed in args.seeds]
    if not all((f / "done.json").exists() for f in folders):
        return None
    facts = [json.loads((f / "done.json").read_text()) for f in folders]
    steps = [_records(f / "metrics.jsonl") for f in folders]
    trained = [line["groups/trained_zero_variance_frac"] for lines in steps for line in lines
               if "groups/trained_zero_variance_frac" in line]
    answered = sum(lines[-1]["rollouts/total"] for lines in steps)
    wasted = sum(line["rollouts/wasted"] for lines in steps for line in lines)
    curves = [_curve(f, args.budget, fact.get("offline", 0)) for f, fact in zip(folders, facts, strict=True)]
    return Runs(np.array(curves),
                float(np.mean(trained)), wasted / answered, float(np.mean([fact["cpu_s"] for fact in facts])))


def _records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _curve(folder: Path, budget: int, offline: int) -> np.ndarray:
    """Accuracy at every STEP answers; those that measured difficulty beforehand count too."""
    race = _records(folder / "race.jsonl")
    at = [line["answers"] + (offline if line["answers"] else 0) for line in race]
    return np.interp(np.arange(0, budget + 1, STEP), at, [line["correct"] for line in race])


def reached(curve: np.ndarray, target: float) -> float:
    """Answers after which the rising fit (isotonic regression) of a curve is at the target; inf = never."""
    there = np.flatnonzero(isotonic_regression(curve) >= target - 1e-9)
    return float(there[0] * STEP) if len(there) else float("inf")


def ratios(uniform: np.ndarray, other: np.ndarray, draws: int = 1000) -> tuple[float, float, float]:
    """Median and 95 % interval, over seeds drawn again, of: answers that `other` needs to reach what uniform has at
    the end, divided by those that uniform needs. Both are means over the same seeds."""
    stream, found = np.random.default_rng(0), []
    for _ in range(draws):
        seeds = stream.integers(0, len(uniform), len(uniform))
        base = uniform[seeds].mean(0)
        target = float(isotonic_regression(base)[-1])
        found.append(reached(other[seeds].mean(0), target) / max(reached(base, target), STEP))
    low, middle, high = np.percentile(found, [2.5, 50, 97.5], method="inverted_cdf")
    return float(middle), float(low), float(high)


def table(args: argparse.Namespace) -> str:
    """Markdown: a table for each mix."""
    lines = ["# Samplers: rollouts to uniform's final accuracy", "",
             f"Embedded model, {args.budget} answers a run (those of refills, of groups not chosen, of probes and of "
             f"measuring difficulty beforehand included), {len(args.seeds)} seeds, held-out accuracy over all levels "
             "alike, greedy. Ratio: answers that the sampler needs to reach what uniform sampling reaches in the whole "
             "budget, divided by those that uniform needs for it; means over seeds, fitted by a rising line; median "
             "and 95 % interval of the bootstrap over seeds. `never`: not within the budget.", ""]
    for mix in args.mixes:
        uniform = read(args, mix, "uniform")
        if uniform is None:
            lines += [f"## {mix}", "", "uniform has not been run", ""]
            continue
        lines += [f"## {mix}", "", f"Uniform: {uniform.curves[:, 0].mean():.3f} before, "
                  f"{uniform.curves[:, -1].mean():.3f} after (seeds {_listed(uniform.curves[:, -1])}).", "",
                  "| sampler | ratio | 95 % | after, mean | after, seeds | trained groups of equal rewards | "
                  "answers not trained on | s a run |", "|---|---|---|---|---|---|---|---|"]
        rows = [(name, runs) for name in args.samplers if (runs := read(args, mix, name)) is not None]
        found = [(ratios(uniform.curves, runs.curves), name, runs) for name, runs in rows]
        for (middle, low, high), name, runs in sorted(found, key=lambda row: (row[0], row[1])):
            after = runs.curves[:, -1]
            lines.append(f"| {name} | {_number(middle)} | {_number(low)} to {_number(high)} | {after.mean():.3f} | "
                         f"{_listed(after)} | {runs.zero_variance:.2f} | {runs.wasted:.2f} | {runs.cpu_s:.0f} |")
        lines.append("")
    lines += ["## Settings", "", *(f"- {name}: `{' '.join(given) or '-'}`" for name, given in SAMPLERS.items()
                                   if name in args.samplers), "",
              f"- command: `python benchmarks/curriculum/race.py run {_settings()}`, then the same with `table`; one "
              "thread a run", ""]
    return "\n".join(lines)


def _listed(values: np.ndarray) -> str:
    return " ".join(f"{v:.3f}" for v in values)


def _number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "never"


def _settings() -> str:
    pairs = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    return " ".join(word for before, word in pairs if not {before, word} & {"--out", "--runs", "table"})


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
    if args.what == "table":
        text = table(args)
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
