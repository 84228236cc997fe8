#!/usr/bin/env python3
"""Runs of four steps that must end in the same bytes after a change of the code that is to change no number.

    python benchmarks/equal_bytes.py --write before.json --keep kept --jobs 2            # with the code of before
    python benchmarks/equal_bytes.py --against before.json --resume-from kept --jobs 2   # with that of now
    python benchmarks/equal_bytes.py --against before.json --only chord,search

Each run has its own process, or two, one thread, and an embedded model. Compared are, of its last checkpoint, the
tensors of weights and trainer by value, whatever their names, the rest of the trainer's state, and all metrics but
times, speeds and memory. A run of a method fails if its metric does not show that the method acted in the last steps.

--keep leaves each run as a kill right after step 2 would have; --resume-from resumes copies of these, which must end in
the same bytes. Kept folders can be moved and resumed by any checkout. The exit code is 1 if something differs or
failed; the table says what."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import deserialize

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
from tests.e2e import forked  # noqa: E402

STEPS, KEPT, LIMIT_S = 4, 2, 1200
SMALL = (f"steps={STEPS}", f"save.every={KEPT}", "eval.samples=0", "log.samples_every=0", "run.dir=run",
         "rollout.prompts_per_step=4", "rollout.group_size=4")
VARYING = ("time/", "tokens_per_s", "memory/")
PARTS = ("weights", "trainer", "state", "metrics")
Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A command on a config. The largest value of `metric` in the last two steps must be above `above`."""

    config: str
    words: Sequence[str] = ()
    metric: str = ""
    above: float = 0.0
    command: str = "train"
    processes: int = 1
    folder: str = "run"
    """The run folder, below that in which the command runs."""


FAILING = ("task=tasks.py:Sums", "curriculum.pass_at=1", "rollout.group_size=2", "train.lr=5e-5")
"""Half of all groups have no right answer."""
PAIRS = ("data.train=pairs.jsonl", "data.heldout=pairs.jsonl", "model.train=[language]", "model.lora.rank=0")
CRITIC = "algo.critic={lr: 1.0e-3, warmup: 1, gamma: 0.99, lam: 0.95}"
RUNS: Mapping[str, Run] = {
    "quickstart": Run("quickstart.yaml", ["eval.samples=4", "eval.every=2"]),
    "lora": Run("quickstart.yaml", ["model.lora.rank=8", "model.lora.dropout=0.1", "train.lr=1e-3"]),
    "two_processes": Run("quickstart.yaml", ["rollout.prompts_per_step=5"], processes=2),
    "episodes": Run("recall.yaml", ["algo.kl_coef=0.01"]),
    "retries_beside": Run("quickstart.yaml", [
        *FAILING, "algo.guided={answers: 3, groups: wrong, loss: {name: dpo, beta: 0.1}}"], "guided/attempts"),
    "retries_hinted": Run("quickstart.yaml", [
        *FAILING, "algo.guided={words: {name: hint, shares: [0.3, 0.6]}, use: hinted}"], "guided/members"),
    "retries_joined": Run("quickstart.yaml", [
        *FAILING, "extends=algorithms/critique_grpo.yaml", "algo.guided.answers=3"], "guided/members"),
    "chord": Run("quickstart.yaml", [
        "algo.demonstrations={rows: 4, mix: {name: chord, decay: 4}}"], "demonstrations/grad_norm"),
    "interleaved": Run("quickstart.yaml", [
        "algo.demonstrations={mix: {name: relift, size: 2, lr: 1.0e-4}}"], "demonstrations/applied"),
    "stored": Run("quickstart.yaml", [
        "algo.stored={groups: 3, rule: truncated}"], "stored/answers"),
    "distillation": Run("quickstart.yaml", ["algo.distillation={objective: 0.5}"], "distillation/kl", 1e-5),
    "search": Run("quickstart.yaml", [
        "extends=algorithms/deepsearch.yaml", "rollout.branch.search={width: 2, depth: 3, hard: 0.5}",
        "task.count=8", "curriculum.pass_at=0.3"], "search/kept_frac"),
    "roots": Run("quickstart.yaml", ["extends=algorithms/treerl.yaml", "rollout.branch.roots=2"], "branch/reused_frac"),
    "meaning": Run("quickstart.yaml", ["algo.advantage=rose", "rollout.branch={roots: 1, at: meaning}",
                                       "rollout.branch.at={continuations: 3, tokens: 4}"], "branch/probed_frac"),
    "forget": Run("quickstart.yaml", [
        "rollout.forget={lr: 1.0e-2}", "algo.correction=token_truncate"], "mismatch/kl", 1e-4),
    "gae": Run("quickstart.yaml", ["extends=algorithms/ppo.yaml", CRITIC], "critic/grad_norm"),
    "turn_credit": Run("recall.yaml", ["extends=algorithms/vagen.yaml", "algo.critic.lr=1e-3"], "critic/grad_norm"),
    "dpo": Run("quickstart.yaml", [
        "extends=stages/kimi_dpo.yaml", "rounds={prompts: 24, answers: 6, least: 0.01, longer: 1, epochs: null}",
        "rollout.temperature=1.5"], "guided/attempts", folder="run/dpo/round-01"),
    "reward_model": Run("preference/reward_model.yaml", [
        "model.name=embedded/tiny-qwen3-vl", *PAIRS, "train.lr=1e-3", "eval.samples=8", "eval.every=2"],
        "pairs/loss", command="sft"),
    "horizon": Run("recall.yaml", [
        "task=tasks.py:Walk", "episode.horizon={name: success, start: 1, at: 0.2, window: 12}"], "episode/horizon", 1),
    "gain_rl": Run("quickstart.yaml", [
        "extends=curricula/gain_rl.yaml", "task.count=48", "curriculum.pass_at=0.2"], "curriculum/window"),
}


def prepare(folder: Path) -> None:
    """Writes what runs read beside their config: tasks, and pairs of responses of which the longer one is better."""
    folder.mkdir()
    shutil.copy(ROOT / "benchmarks" / "equal_bytes_tasks.py", folder / "tasks.py")
    colours = ("red", "blue", "green", "grey", "pink", "white", "black", "brown")
    with (folder / "pairs.jsonl").open("w") as file:
        for i in range(24):
            pair = [" ".join(colours[(i + k) % 8] for k in range(n)) for n in (1 + i % 2, 4 + i % 3)]
            print(json.dumps({"id": str(i), "question": f"Which colours has picture {i % 5}?", "answer": 1 + i % 2,
                              "responses": pair if i % 2 else pair[::-1]}), file=file)


def start(run: Run, folder: Path) -> float:
    """Runs the command in `folder` to its end and returns the seconds that it took. Raises RuntimeError with what it
    said where it failed."""
    words = ["-m", "vlrl", run.command, str(ROOT / "configs" / run.config), *SMALL, *run.words]
    began = time.monotonic()
    done = forked.run(words, os.environ, folder, LIMIT_S, run.processes)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    return round(time.monotonic() - began, 1)


# --- what is left -----------------------------------------------------------------------------------------------------


def record(run: Run, folder: Path) -> Record:
    """Returns what is compared of a finished run, and the metric that shows that the method acted. Raises RuntimeError
    where it did not."""
    place = folder / run.folder
    last = place / "checkpoints" / f"step-{STEPS:06d}"
    weights = [file for file in last.glob("*.safetensors") if file.name != "trainer_state.safetensors"]
    lines = [line for name in ("metrics.jsonl", "eval.jsonl") for line in steady(place / name)]
    state = json.loads((last / "trainer_state.json").read_text())
    found: Record = {"weights": tensors(weights), "trainer": tensors([last / "trainer_state.safetensors"]),
                     "state": digest(state), "metrics": digest(lines)}
    if run.metric:
        value = max(line.get(run.metric, 0.0) for line in lines if line["step"] >= KEPT)
        if not value > run.above:
            values = [line.get(run.metric) for line in lines]
            raise RuntimeError(f"the method did not act: {run.metric} is {values}, not above {run.above:g} in the last "
                               "two steps")
        found |= {"acted": {run.metric: value}}
    return {**found, "lines": lines}


def steady(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of metrics without what varies from run to run."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(VARYING)} for line in lines]


def digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tensors(files: Sequence[Path]) -> str:
    """Returns a digest of the values of all tensors of some files, whatever their names and their order."""
    each = [sha256(f"{t['dtype']} {t['shape']} ".encode() + t["data"]).hexdigest()
            for file in files for _, t in deserialize(file.read_bytes())]
    return digest(sorted(each))


def keep(run: Run, folder: Path, target: Path) -> None:
    """Copies a finished run as a kill right after step 2 would have left it; a copy that is there is replaced."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(folder, target)
    place = target / run.folder
    shutil.rmtree(place / "checkpoints" / f"step-{STEPS:06d}")
    for name, steps in (("metrics.jsonl", KEPT), ("eval.jsonl", KEPT + 1)):  # an evaluation is named by completed steps
        if (path := place / name).exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if json.loads(line)["step"] < steps))
    for path in place.glob("rollouts/*"):
        if int(path.name.split("-")[1]) >= KEPT:
            path.unlink()
    for path in target.rglob("stages.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "done": {}}))


# --- the table --------------------------------------------------------------------------------------------------------


def fresh(name: str, kept: Path | None) -> Record:
    """Returns the record of a run from its beginning."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        prepare(folder)
        found = {"seconds": start(RUNS[name], folder), **record(RUNS[name], folder)}
        if kept:
            keep(RUNS[name], folder, kept / name)
        return found


def resumed(name: str, kept: Path) -> Record:
    """Returns the record of a copy of a kept run that went on."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        shutil.copytree(kept / name, folder)
        manifest = folder / RUNS[name].folder / "checkpoints" / f"step-{KEPT:06d}" / "manifest.json"
        before = manifest.stat().st_mtime_ns
        seconds = start(RUNS[name], folder)
        if manifest.stat().st_mtime_ns != before:
            raise RuntimeError("it began again in place of resuming from the checkpoint")
        return {"seconds": seconds, **record(RUNS[name], folder)}


def outcome(made: Future[Record]) -> Record:
    try:
        return made.result()
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}


def difference(found: Record, before: Record | None) -> str:
    """Returns what differs and the first metric that does, or why a run failed; "" where all is equal."""
    if "error" in found:
        return f"FAILED: {found['error']}"
    if before is None:
        return "not in the file"
    parts = [part for part in PARTS if found[part] != before[part]]
    return f"DIFFERS: {', '.join(parts)}{_first(found['lines'], before['lines'])}" if parts else ""


def _first(lines: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    for now, old in zip(lines, before, strict=False):
        for key in {**old, **now}:
            if repr(now.get(key)) != repr(old.get(key)):
                return f"; first at step {now['step']}: {key} {old.get(key)} -> {now.get(key)}"
    return "" if len(lines) == len(before) else f"; {len(before)} -> {len(lines)} lines of metrics"


def row(name: str, says: Sequence[str], runs: Sequence[Record]) -> str:
    """Returns a row of the table."""
    acted = ", ".join(f"{key} {value:.4g}" for key, value in runs[0].get("acted", {}).items())
    seconds = sum(run.get("seconds", 0.0) for run in runs)
    return f"| {name} | {' | '.join([*says, ''][:2])} | {acted} | {seconds:.0f} |"


def main() -> int:
    args = arguments()
    file: Path = args.against or args.write
    known = json.loads(file.read_text()) if file.exists() else {}
    failed = False
    with ThreadPoolExecutor(args.jobs) as pool:
        started = [(name, [pool.submit(fresh, name, args.keep),
                           *([pool.submit(resumed, name, args.resume_from)] if args.resume_from else [])])
                   for name in args.only or RUNS]
        print("| run | from its beginning | resumed | acted | seconds |\n|---|---|---|---|---|", flush=True)
        for name, made in started:
            runs = [outcome(one) for one in made]
            found = [difference(run, known.get(name) if args.against else run) for run in runs]
            failed |= any(found)
            print(row(name, [say or ("equal" if args.against else "written") for say in found], runs), flush=True)
            if args.write and not any(found):
                known[name] = runs[0]
                file.write_text(json.dumps(known, indent=1) + "\n")
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    file = parser.add_mutually_exclusive_group(required=True)
    file.add_argument("--write", type=Path, metavar="FILE", help="write what the runs end in; others in it stay")
    file.add_argument("--against", type=Path, metavar="FILE", help="compare with what --write wrote")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with --write: keep each run as it was at step 2")
    parser.add_argument("--resume-from", type=Path, metavar="DIR", help="with --against: go on from what was kept")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="A,B", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side")
    args = parser.parse_args()
    if (args.keep and not args.write) or (args.resume_from and not args.against):
        parser.error("--keep goes with --write, and --resume-from with --against")
    for name in ("write", "against", "keep", "resume_from"):  # the working directory moves while processes are forked
        if path := getattr(args, name):
            setattr(args, name, path.resolve())
    return args


if __name__ == "__main__":
    sys.exit(main())
