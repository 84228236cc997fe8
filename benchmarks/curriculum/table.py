"""The table of race.py: rollouts to uniform's final accuracy, as a ratio with a bootstrap interval over seeds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from run_folders import run_folder
from sklearn.isotonic import isotonic_regression

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
    steps = [_lines(f / "metrics.jsonl") for f in folders]
    trained = [line["groups/trained_zero_variance_frac"] for lines in steps for line in lines
               if "groups/trained_zero_variance_frac" in line]
    answered = sum(lines[-1]["rollouts/total"] for lines in steps)
    wasted = sum(line["rollouts/wasted"] for lines in steps for line in lines)
    curves = [_curve(f, args.budget, fact.get("offline", 0)) for f, fact in zip(folders, facts, strict=True)]
    return Runs(np.array(curves),
                float(np.mean(trained)), wasted / answered, float(np.mean([fact["cpu_s"] for fact in facts])))


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _curve(folder: Path, budget: int, offline: int) -> np.ndarray:
    """Accuracy at every STEP answers; those that measured difficulty beforehand count too."""
    race = _lines(folder / "race.jsonl")
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


def table(args: argparse.Namespace, samplers: Mapping[str, Sequence[str]]) -> str:
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
    lines += ["## Settings", "", *(f"- {name}: `{' '.join(given) or '-'}`" for name, given in samplers.items()
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
