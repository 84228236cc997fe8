"""What do given answers add to RL? Supervised stages, RL, one after the other, and rules that mix both.

    python benchmarks/demonstrations.py mixing --out mixing.md    # every mixing rule, two task families
    python benchmarks/demonstrations.py shots                     # four images of a class: SFT against RL
    python benchmarks/demonstrations.py jitter                    # given boxes that are off: SFT, then RL

Every arm has as many steps of as many prompts from the same start; a supervised step learns one given answer to each
prompt of a step, an RL step draws `group_size` answers to it. Figures are from held-out samples, greedy. Intervals of
differences are over samples and seeds (vlrl.tools.experiments.differences). Finished runs are not repeated.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import learning
import numpy as np

from vlrl import config
from vlrl.store import RunFolder
from vlrl.store.files import read_json
from vlrl.tools.experiments.compare import Side, compare
from vlrl.training.build_task import make_task
from vlrl.types import Sample

STEPS, PROMPTS = 40, 16
CONFIGS = {"digits": ("configs/classification/digits.yaml", "accuracy"),
           "grounding": ("configs/quickstart.yaml", "iou")}
HEEDING = "task.name=benchmarks/heeding.py"
TOLD = {"digits": [f"{HEEDING}:ToldDigits", "task.thinking=thinking", "steps=200"],
        "grounding": [f"{HEEDING}:ToldGrounding", "steps=200"]}
REASONED = {"digits": [f"{HEEDING}:ReasonedDigits", "task.thinking=thinking"], "grounding": []}
NOT_THERE = {("digits", "agent_rlvr"): "the task has no guidance", ("grounding", "ghpo"): "answers have no reasoning"}


def staged(*stages: str) -> list[str]:
    """Settings of equally long stages, e.g. `sft`, `rl`; `sft@file` learns answers of a file."""
    each = []
    for stage in stages:
        kind, _, file = stage.partition("@")
        given = f", data: {{solutions: {file}}}" if file else ""
        each.append(f"{{name: {kind}, kind: {kind}, steps: {STEPS // len(stages)}{given}}}")
    return [f"stages=[{', '.join(each)}]"]


def rule(name: str, *settings: str) -> list[str]:
    return [f"extends=algorithms/{name}.yaml", *settings]


MIX = "algo.demonstrations.mix"
MIXING = {
    "rl": [], "sft": staged("sft"), "sft, then rl": staged("sft", "rl"),
    "chord": rule("chord", f"{MIX}.decay={STEPS}"), "chord_phi": rule("chord_phi"),
    "sasr": rule("sasr", f"{MIX}.warmup={STEPS // 4}", f"algo.demonstrations.rows={PROMPTS}"),
    "relift": rule("relift", f"{MIX}.size={PROMPTS}", f"{MIX}.lr=2e-4"),
    "ghpo": rule("ghpo"), "egsr": rule("egsr"), "expo": rule("expo", f"algo.guided.loss.decay={STEPS}"),
    "critique_grpo": rule("critique_grpo"), "agent_rlvr": rule("agent_rlvr")}
SHOTS = {"sft": staged("sft"), "rl": [], "sft, then rl": staged("sft", "rl")}
ACTS = ("demonstrations/applied", "demonstrations/grad_share", "guided/groups_frac", "guided/success", "guided/kept",
        "guided/tokens_frac", "guided/loss")


class Experiment(NamedTuple):
    """Arms of one task, each against the first."""

    title: str
    config: str
    metric: str
    arms: Mapping[str, list[str]]
    settings: Sequence[str] = ()


def experiments(name: str, runs: Path) -> Iterator[Experiment]:
    for family, (path, metric) in CONFIGS.items():
        if name == "mixing":
            arms = {k: v for k, v in MIXING.items() if (family, k) not in NOT_THERE}
            yield Experiment(f"mixing-{family}", path, metric, arms,
                             [f"model.name={heeding(family, runs)}", *REASONED[family]])
        elif name == "shots" and family == "digits":
            yield Experiment("shots", path, metric, SHOTS, ["task.shots=4"])
            yield Experiment("shots-own-words", path, metric, SHOTS,
                             [f"{HEEDING}:ReasonedDigits", "task.thinking=both", "task.shots=4"])
        elif name == "jitter" and family == "grounding":
            for share in (0.1, 0.3):
                off = jittered(path, share, runs / f"jittered-{share}.jsonl")
                arms = {"sft, true boxes": staged("sft"), "sft, boxes off": staged(f"sft@{off}"),
                        "sft, boxes off, then rl": staged(f"sft@{off}", "rl"),
                        "sft, true boxes, then rl": staged("sft", "rl"), "rl": []}
                yield Experiment(f"jitter-{share}", path, metric, arms)


def heeding(family: str, runs: Path) -> Path:
    """Teaches the embedded model what is said to second attempts (heeding.py), if that was not done; returns it."""
    folder = runs / f"heeding-{family}"
    learning.run([sys.executable, "-m", "vlrl", "sft", CONFIGS[family][0], *TOLD[family], "train.lr=5e-4",
                  "eval.every=100", "eval.samples=100", "log.samples_every=0", f"run.dir={folder}"], 1)
    return max((folder / "checkpoints").glob("step-*"))


def jittered(path: str, share: float, file: Path) -> Path:
    """Writes the given answers of the training rows with each edge of a box moved by up to `share` of its side."""
    made = make_task(config.load(path))
    stream, lines = random.Random(0), []
    for number, sample in enumerate(list(made.samples("train"))[:STEPS * PROMPTS]):
        x1, y1, x2, y2 = made.target(sample)
        w, h = (x2 - x1) * share, (y2 - y1) * share
        moved = [x1 + stream.uniform(-w, w), y1 + stream.uniform(-h, h),
                 x2 + stream.uniform(-w, w), y2 + stream.uniform(-h, h)]
        box = [min(max(v, 0.0), float(sample["width"])) for v in moved]  # pictures are square
        row = {**sample.row, "boxes": [{**sample["boxes"][0], "box": box}]}
        text = made.oracle(Sample(id=sample.id, media=sample.media, row=row))
        lines.append(json.dumps({"number": number, "id": sample.id, "solution": text}))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    return file


def folders(run: Path) -> tuple[RunFolder, RunFolder]:
    """The run folders with the first and the last evaluation."""
    stages = read_json(run / "stages.json")
    names = [stage["name"] for stage in stages["stages"]] if stages else [""]
    return RunFolder(run / names[0]), RunFolder(run / names[-1])


def ends(run: Path, metric: str) -> tuple[float, float]:
    first, last = folders(run)
    return first.evals()[0][metric], last.evals()[-1][metric]


def acting(run: Path) -> str:
    """Means over the steps of what says that a rule acted."""
    lines = list(folders(run)[1].metrics())
    found = {name: [line[name] for line in lines if name in line] for name in ACTS}
    return ", ".join(f"{name} {np.mean(values):.3g}" for name, values in found.items() if values)


def table(one: Experiment, done: Mapping[tuple[str, int], Path], seeds: int) -> str:
    first = next(iter(one.arms))
    lines = [f"## {one.title}: held-out {one.metric}", "",
             f"| arm | before | after, by seed | mean | against {first} [95 %] | acting (seed 0) |", "|---" * 6 + "|"]
    for arm in one.arms:
        values = [ends(done[arm, seed], one.metric) for seed in range(seeds)]
        a, b = ([Side(folders(done[name, seed])[1].path) for seed in range(seeds)] for name in (first, arm))
        found = compare(a, b, metric=one.metric).metrics[one.metric].difference
        against = "" if arm == first else f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
        after = [value[1] for value in values]
        lines.append(f"| {arm} | {values[0][0]:.3f} | {', '.join(f'{v:.3f}' for v in after)} | {np.mean(after):.3f} | "
                     f"{against} | {acting(done[arm, 0])} |")
    return "\n".join(lines)


def command(one: Experiment, arm: str, seed: int, runs: Path) -> list[str]:
    folder = runs / one.title / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    return [sys.executable, "train.py", one.config, *one.arms[arm], *one.settings, f"steps={STEPS}",
            f"rollout.prompts_per_step={PROMPTS}", f"eval.every={STEPS}", "log.samples_every=0", f"seed={seed}",
            f"run.dir={folder}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["mixing", "shots", "jitter"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/demonstrations"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_args()
    runs = args.runs.resolve()
    texts = []
    for one in experiments(args.experiment, runs):
        work = {(arm, seed): command(one, arm, seed, runs) for seed in range(args.seeds) for arm in one.arms}
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda words: learning.run(words, 1), work.values()))
        texts.append(table(one, {key: Path(c[-1].removeprefix("run.dir=")) for key, c in work.items()}, args.seeds))
    text = "\n\n".join([*texts, f"{STEPS} steps of {PROMPTS} prompts, groups of 8; {os.cpu_count()} cores; versions "
                        f"{json.dumps(learning._versions())}"])
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
