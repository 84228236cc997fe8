"""How much of the generation takes place beside the update, and what that is worth.

    python benchmarks/async_timeline.py configs/quickstart.yaml --steps 20 --plot timeline.png
    python benchmarks/async_timeline.py configs/quickstart.yaml --staleness 2 engine=vllm

Runs the config twice with the decoupled objective, one step after the other and with async.max_staleness, and compares
the seconds of a step without the first ones and without evaluations. The overlap is read from timeline.jsonl. Runs are
kept in --runs and not repeated when they are there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from vlrl.store import RunFolder

ROOT = Path(__file__).resolve().parent.parent
FIRST = 2
"""Steps that are left out: things are made and warmed up in them."""
Span = tuple[float, float]


def run(args: argparse.Namespace, name: str, staleness: int) -> RunFolder:
    """The finished run of one kind."""
    folder = args.runs / name
    words = [str(args.config), f"run.dir={folder}", f"steps={args.steps}", f"async.max_staleness={staleness}",
             "extends=algorithms/decoupled_ppo.yaml", "eval.samples=0", "save.every=0", "log.samples_every=0",
             *args.settings]
    if len(RunFolder(folder).metrics()) < args.steps:
        subprocess.run([sys.executable, str(ROOT / "train.py"), *words], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "COLUMNS": "120"})
    return RunFolder(folder)


def seconds(folder: RunFolder, name: str = "time/total_s") -> float:
    """Median over the steps that count."""
    return statistics.median(line.get(name) or 0.0 for line in folder.metrics()[FIRST:])


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


def compare(plain: RunFolder, ahead: RunFolder) -> dict[str, float]:
    """The figures."""
    generated, learned = spans(ahead, "ahead"), spans(ahead, "train")
    total = sum(end - start for start, end in generated)
    return {"sequential_s": seconds(plain), "overlapped_s": seconds(ahead),
            "throughput_ratio": seconds(plain) / seconds(ahead),
            "sequential_rollout_s": seconds(plain, "time/rollout_s") + seconds(plain, "time/score_s"),
            "sequential_train_s": seconds(plain, "time/train_s"), "overlapped_train_s": seconds(ahead, "time/train_s"),
            "ahead_s": seconds(ahead, "time/ahead_s"), "waited_s": seconds(ahead, "time/rollout_s"),
            "ahead_beside_update_share": both(generated, learned) / total if total else 0.0}


def plot(folder: RunFolder, file: Path, count: int = 6) -> None:
    """The last steps as bars: what the loop does, and what the thread does beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {"train": ("loop", "#4c78a8"), "sync": ("loop", "#72b7b2"), "rollout": ("loop", "#e45756"),
            "store": ("loop", "#bab0ac"), "ahead": ("thread", "#f58518")}
    last = sorted(spans(folder, "train"))[-2 * count:]  # a step has two: groups are dealt out, then learned from
    begin, end = last[0][0], last[-1][1]
    figure, axes = pyplot.subplots(figsize=(10, 2), layout="constrained")
    for phase, (row, colour) in rows.items():
        shown = [(a - begin, b - a) for a, b in spans(folder, phase) if b > begin and a < end]
        axes.broken_barh(shown, (0 if row == "thread" else 1, 0.8), color=colour, label=phase)
    axes.set(yticks=[0.4, 1.4], yticklabels=["thread", "loop"], xlabel="seconds", xlim=(0, end - begin))
    figure.legend(loc="outside upper center", ncols=len(rows), frameon=False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/async_timeline"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_intermixed_args()
    found = compare(run(args, "sequential", 0), ahead := run(args, f"staleness-{args.staleness}", args.staleness))
    for name, value in found.items():
        print(f"{name:<28}{value:.3f}")
    if args.plot:
        plot(ahead, args.plot)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
