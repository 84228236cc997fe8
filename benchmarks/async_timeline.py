r"""How much of the generation takes place beside the update, what that is worth, and whether it learns the same.

    python benchmarks/async_timeline.py configs/quickstart.yaml --steps 20
    python benchmarks/async_timeline.py configs/quickstart.yaml --steps 80 --seeds 3 --evaluate 256 \
        --out benchmarks/results/async_cpu.md engine=vllm

Runs the config with the decoupled objective for each seed, one step after the other and with async.max_staleness, and
compares the seconds of a step without the first ones and without evaluating and saving. The overlap is read from
timeline.jsonl. With --evaluate also the held-out metric after training, greedy. Runs are kept in --runs, go on where
they were stopped, and are not repeated when they are there."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from learning import changed, run

from vlrl import config
from vlrl.store import RunFolder

PRESET = "algorithms/decoupled_ppo.yaml"
FIRST = 2
"""Steps that are left out: things are made and warmed up in them."""
Span = tuple[float, float]
Pair = tuple[RunFolder, RunFolder]
"""The runs of a seed: one step after the other, and overlapped."""


def runs(args: argparse.Namespace, seed: int) -> Pair:
    """The finished runs of a seed."""
    def one(name: str, staleness: int) -> RunFolder:
        words = [f"extends={PRESET}", f"steps={args.steps}", f"async.max_staleness={staleness}", "save.every=0",
                 "eval.every=0", f"eval.samples={args.evaluate}", *args.settings, f"seed={seed}", "log.samples_every=0",
                 f"run.dir={args.runs / f'{name}-{seed}'}"]
        return RunFolder(run([sys.executable, "train.py", str(Path(args.config).resolve()), *words], args.threads)[0])

    return one("sequential", 0), one(f"staleness-{args.staleness}", args.staleness)


def seconds(folders: Sequence[RunFolder], *names: str) -> float:
    """Median over the steps that count of the sum of some times; of whole steps where none is named."""
    steps = [line for folder in folders for line in folder.metrics()[FIRST:]]
    return statistics.median(sum(line.get(name) or 0.0 for name in names) if names else alone(line) for line in steps)


def alone(line: Mapping[str, float]) -> float:
    """Seconds of a step, without evaluating and saving."""
    return line["time/total_s"] - line.get("time/eval_s", 0.0) - line.get("time/save_s", 0.0)


def spans(folder: RunFolder, phase: str) -> list[Span]:
    """When a phase took place, in the steps that count; of a phase inside itself the outer one."""
    lines = [json.loads(line) for line in (folder.path / "timeline.jsonl").read_text().splitlines()]
    return merged([(r["start"], r["end"]) for r in lines if r["phase"] == phase and r["step"] >= FIRST])


def merged(found: list[Span]) -> list[Span]:
    """Spans that touch or hold each other as one."""
    out: list[Span] = []
    for start, end in sorted(found):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def both(one: list[Span], other: list[Span]) -> float:
    """Seconds that are in two sets of spans."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other)


def compare(pairs: Sequence[Pair]) -> dict[str, float]:
    """The figures, over all seeds."""
    plain, ahead = ([pair[i] for pair in pairs] for i in (0, 1))
    whole = sum(end - start for folder in ahead for start, end in spans(folder, "ahead"))
    beside = sum(both(spans(folder, "ahead"), spans(folder, "train")) for folder in ahead)
    return {"sequential_s": seconds(plain), "overlapped_s": seconds(ahead),
            "throughput_ratio": seconds(plain) / seconds(ahead),
            "sequential_rollout_s": seconds(plain, "time/rollout_s", "time/score_s"),
            "sequential_train_s": seconds(plain, "time/train_s"), "overlapped_train_s": seconds(ahead, "time/train_s"),
            "ahead_s": seconds(ahead, "time/ahead_s"), "waited_s": seconds(ahead, "time/rollout_s"),
            "ahead_beside_update_share": beside / whole if whole else 0.0}


def table(args: argparse.Namespace, pairs: Sequence[Pair], found: Mapping[str, float]) -> str:
    """Markdown: what a step takes both ways, and with --evaluate what was learned."""
    names = ("sequential", f"async.max_staleness={args.staleness}")
    settings = config.load(str(Path(args.config).resolve()), [f"extends={PRESET}", *args.settings])
    lines = [f"# Generation beside the update: {args.config}, engine={settings.engine.name}", "",
             f"{args.steps} steps of {settings.rollout.prompts_per_step} prompts x {settings.rollout.group_size} "
             f"answers, {len(pairs)} seeds, {PRESET} both ways. Seconds: medians over the steps after the first "
             f"{FIRST}, without evaluating.", "",
             "| | s a step | generate and score | of it waited for | train |", "|---|---|---|---|---|"]
    wrote = (found["sequential_rollout_s"],) * 2, (found["ahead_s"], found["waited_s"])
    for name, total, (made, waited), learned in zip(
            names, (found["sequential_s"], found["overlapped_s"]), wrote,
            (found["sequential_train_s"], found["overlapped_train_s"]), strict=True):
        lines.append(f"| {name} | {total:.3f} | {made:.3f} | {waited:.3f} | {learned:.3f} |")
    lines += ["", f"Throughput {found['throughput_ratio']:.2f} times the sequential one; "
              f"{found['ahead_beside_update_share']:.0%} of the generation took place beside an update."]
    if args.evaluate:
        lines += ["", *learned_lines(args.metric, names, pairs)]
    return "\n".join([*lines, "", f"- start: `{settings.model.name}`; one run at a time, {args.threads} thread"
                      f"{'s' * (args.threads > 1)} on {os.cpu_count()} cores, {platform.machine()}", ""])


def learned_lines(metric: str, names: Sequence[str], pairs: Sequence[Pair]) -> list[str]:
    """Table of the held-out metric of each run."""
    return [f"Held-out {metric}, greedy.", "",
            "| | seed | n | before | after | gain [95 %] |", "|---|---|---|---|---|---|",
            *(f"| {name} | {seed} | {changed(folder, metric)} |" for seed, pair in enumerate(pairs)
              for name, folder in zip(names, pair, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of every run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--evaluate", type=int, default=0, metavar="N", help="held-out samples before and after")
    parser.add_argument("--metric", default="iou", help="of eval.jsonl")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/async_timeline"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args = parser.parse_intermixed_args()
    if args.steps <= FIRST:
        parser.error(f"--steps {args.steps}: the first {FIRST} steps do not count")
    args.runs = args.runs.resolve()
    pairs = [runs(args, seed) for seed in range(args.seeds)]
    found = compare(pairs)
    for name, value in found.items():
        print(f"{name:<28}{value:.3f}")
    print("", text := table(args, pairs, found), sep="\n")
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
