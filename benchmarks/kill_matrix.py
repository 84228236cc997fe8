#!/usr/bin/env python3
"""Kills runs with kill -9 at random moments, starts them again each time, and compares what is left with an undisturbed
run: every file of every checkpoint, metrics (times and memory aside), evaluations and rollouts.

    python benchmarks/kill_matrix.py --kills 50 --out benchmarks/results/kill_matrix.md
    python benchmarks/kill_matrix.py --kinds shaped --kills 30 --out benchmarks/results/kill_matrix_shaped.md

A kind is a configuration: `small` is 20 steps of 9 answers of 6 tokens; the others, together named `shaped`, have
answers as long as the quickstart's and a correction that makes the update depend on the sampler's log-probabilities.
With several processes the first one is killed. The moments are drawn with a seed: a run is killed in the c-th visit of
a phase, after a random part of that phase's time. The phase in which a kill fell is read from a memory-mapped file."""

from __future__ import annotations

import argparse
import collections
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PHASES = ("generation", "update", "checkpoint", "rollouts", "evaluation")
"""Checkpoints and rollouts are written in threads, beside the other phases."""
CONFIG = "configs/quickstart.yaml"
_SHAPED = ("steps=10", "rollout.prompts_per_step=8", "rollout.group_size=4", "eval.every=5", "eval.samples=24",
           "save.every=3", "save.keep=9", "log.samples_every=0", "algo.correction=token_truncate")
KINDS: dict[str, tuple[str, ...]] = {
    "small": ("steps=20", "rollout.prompts_per_step=3", "rollout.group_size=3", "rollout.max_new_tokens=6",
              "eval.every=4", "eval.samples=4", "save.every=3", "save.keep=2", "save.best=iou", "log.samples_every=0",
              "train.schedule=cosine", "curriculum.name=sec", "data.workers=1"),
    "plain": _SHAPED,
    "lora": (*_SHAPED, "model.lora.rank=8", "model.lora.dropout=0.1", "train.lr=1e-3"),
    "dump": (*_SHAPED, "curriculum.name=dump"),
    "rlcs": (*_SHAPED, "curriculum={name: rlcs, by: category, oversample: ema, select: nearest_half}"),
    "partial": (*_SHAPED, "rollout.step_tokens=12"),
    "async": (*_SHAPED, "async.max_staleness=1"),
    "two processes": _SHAPED}
"""Settings over those of the quickstart."""
PROCESSES = {"two processes": 2}
VARYING = ("time/", "tokens_per_s", "memory/")
MOST_PER_RUN = 5
"""Kills of one run; then it goes on to its end, and another one begins."""


# --- in the killed process --------------------------------------------------------------------------------------------


class Marker:
    """Says in a mapped file which phases are open and whether it killed, counts visits, and kills this process in the
    planned one."""

    def __init__(self, path: Path, plan: dict[str, Any]):
        path.write_bytes(bytes(len(PHASES) + 1))
        with open(path, "r+b") as file:
            self._open = mmap.mmap(file.fileno(), len(PHASES) + 1)
        self._plan, self._visits = plan, collections.Counter[str]()
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        place, start = PHASES.index(phase), time.monotonic()
        self._visits[phase] += 1
        self._open[place] += 1
        if self._plan.get("phase") == phase and self._visits[phase] == self._plan["visit"]:
            timer = threading.Timer(self._plan["after_s"], self._kill)
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            self._open[place] -= 1
            self.seconds[phase].append(time.monotonic() - start)

    def _kill(self) -> None:
        self._open[len(PHASES)] = 1
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapping(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` as a phase; an evaluation's rollouts are part of the evaluation."""
        def wrapped(*args: Any, **more: Any) -> Any:
            if more.get("split"):
                return call(*args, **more)
            with self(phase):
                return call(*args, **more)
        return wrapped

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """What vlrl.monitoring.metrics.watching takes: the clock's phases of the main thread."""
        phase = {"rollout": "generation", "train": "update", "eval": "evaluation"}.get(name)
        if phase is None or threading.current_thread() is not threading.main_thread():
            yield
        else:
            with self(phase):
                yield


def child(folder: Path, plan: dict[str, Any], words: Sequence[str]) -> int:
    """train.py, marked."""
    from vlrl.cli import main as cli
    from vlrl.monitoring import metrics
    from vlrl.store import RunFolder, checkpoint

    sys.argv = ["train.py", *words]
    if int(os.environ.get("RANK", 0)):
        return cli.train_script(words)
    marker = Marker(folder.with_suffix(".phases"), plan)
    checkpoint.save = marker.wrapping("checkpoint", checkpoint.save)
    RunFolder.write_rollouts = marker.wrapping("rollouts", RunFolder.write_rollouts)
    with metrics.watching(marker.watch):
        code = cli.train_script(words)
    if not plan:
        folder.with_suffix(".seconds").write_text(json.dumps(marker.seconds))
    return code


# --- in the one that kills --------------------------------------------------------------------------------------------


@dataclass
class Kill:
    """One moment."""

    planned: str
    visit: int
    share: float
    """Of the time that the phase takes."""
    fell: tuple[str, ...] = ()
    """Phases that were open."""
    kind: str = ""
    run: int = -1

    @property
    def phase(self) -> str:
        """Where it fell: in the planned phase if that was still open."""
        return self.planned if self.planned in self.fell else self.fell[0] if self.fell else "between"


@dataclass
class Found:
    """What a matrix gives."""

    kills: list[Kill] = field(default_factory=list)
    differing: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """Kind and run -> what is not as in the undisturbed one."""
    seconds: float = 0.0

    @property
    def identical(self) -> list[Kill]:
        """Kills of runs that ended as the undisturbed one."""
        return [kill for kill in self.kills if not self.differing[kill.kind, kill.run]]


def start(folder: Path, words: Sequence[str], plan: dict[str, Any], processes: int = 1, fork: bool = True) -> int:
    """Runs until the end or the kill; the exit code. A fork of this process has the imports done; else new ones."""
    words = [*words, f"run.dir={folder}"]
    with open(folder.with_suffix(".log"), "ab") as log:
        if not fork or processes > 1:
            own = [str(Path(__file__).resolve()), "--child", str(folder), json.dumps(plan), *words]
            several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            command = [sys.executable, *(several if processes > 1 else ()), *own]
            more = {"PYTHONPATH": str(ROOT), **({"ACCELERATE_USE_CPU": "true"} if processes > 1 else {})}
            return subprocess.run(command, env=os.environ | more, stdout=log, stderr=log, check=False,
                                  cwd=ROOT).returncode
        sys.stdout.flush()
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.chdir(ROOT)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        code = 1
        try:
            code = child(folder, plan, words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def moments(count: int, seed: int) -> list[Kill]:
    """Moments spread evenly over the phases, in random order."""
    rng = random.Random(seed)
    phases = [PHASES[i % len(PHASES)] for i in range(count)]
    rng.shuffle(phases)
    most = {"evaluation": 2, "checkpoint": 3}
    return [Kill(phase, rng.randint(1, most.get(phase, 7)), rng.random()) for phase in phases]


def matrix(root: Path, kind: str, kills: int, seed: int, words: Sequence[str], found: Found,
           tell: Callable[[str], object] = print) -> None:
    """Kills runs of a kind `kills` times, in as many runs as that takes; the last of `words` wins. Adds to `found`."""
    begun, whole, processes = time.monotonic(), root / "whole", PROCESSES.get(kind, 1)
    if start(whole, words, {}, processes, fork=False) != 0:
        raise RuntimeError(f"the undisturbed run failed: {whole.with_suffix('.log').read_text()[-2000:]}")
    seconds = {k: sum(v) / len(v) for k, v in json.loads(whole.with_suffix(".seconds").read_text()).items()}
    waiting, run = collections.deque(moments(kills, seed)), 0
    while waiting:
        folder, done, last = root / f"run-{run:03d}", False, max(len(waiting) - MOST_PER_RUN, 0)
        while len(waiting) > last and not done:
            kill = waiting[0]
            plan = {"phase": kill.planned, "visit": kill.visit, "after_s": kill.share * seconds.get(kill.planned, 0.1)}
            done = _killed(folder, words, plan, processes, kill) is None  # that moment is for the next run
            if not done:
                kill.kind, kill.run = kind, run
                found.kills.append(waiting.popleft())
                tell(f"{kind} {run}: killed in {kill.phase} (planned {kill.planned}, "
                     f"open: {', '.join(kill.fell) or 'none'})")
        if not done and start(folder, words, {"phase": ""}, processes) != 0:
            raise RuntimeError(f"{folder} did not end: {folder.with_suffix('.log').read_text()[-2000:]}")
        found.differing[kind, run] = differences(whole, folder)
        tell(f"{kind} {run}: {', '.join(found.differing[kind, run]) or 'identical'}; {kills - len(waiting)} of {kills} "
             f"kills, {time.monotonic() - begun:.0f} s")
        shutil.rmtree(folder)
        run += 1
    found.seconds += time.monotonic() - begun


def _killed(folder: Path, words: Sequence[str], plan: dict[str, Any], processes: int, kill: Kill) -> Kill | None:
    """The kill, with the phases that were open; None where the run ended before it."""
    code = start(folder, words, plan, processes)
    if code == 0:
        return None
    *state, killed = folder.with_suffix(".phases").read_bytes()
    if not killed:
        raise RuntimeError(f"{folder} ended with {code}: {folder.with_suffix('.log').read_text()[-2000:]}")
    kill.fell = tuple(name for name, depth in zip(PHASES, state, strict=True) if depth)
    return kill


def differences(whole: Path, other: Path) -> list[str]:
    """What two runs do not share."""
    from vlrl.store import RunFolder, checkpoint

    def checkpoints(run: Path) -> Any:
        paths = run.glob("checkpoints/step-*/manifest.json")
        return {path.parent.name: json.loads(path.read_bytes())["files"] for path in sorted(paths)}

    def lines(run: Path, name: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(VARYING)}
                for line in (run / name).read_text().splitlines()]

    def answers(run: Path, split: str | None) -> Any:
        return RunFolder(run).rollouts(split=split).to_pylist()

    looks: dict[str, Callable[[Path], Any]] = {
        "checkpoints": checkpoints, "best": lambda run: checkpoint.best_record(run / "checkpoints"),
        "metrics.jsonl": lambda run: lines(run, "metrics.jsonl"), "eval.jsonl": lambda run: lines(run, "eval.jsonl"),
        "rollouts": lambda run: answers(run, None), "eval-rollouts": lambda run: answers(run, "heldout")}
    return [name for name, look in looks.items() if repr(look(whole)) != repr(look(other))]


def table(found: Found, command: str) -> str:
    """Markdown."""
    kinds = dict.fromkeys(k.kind for k in found.kills)
    by_kind = [(kind, [k for k in found.kills if k.kind == kind]) for kind in kinds]
    by_phase = [(phase, [k for k in found.kills if k.phase == phase]) for phase in (*PHASES, "between")]
    rows = [f"| {name} | {len(kills)} | {sum(k in found.identical for k in kills)} |"
            for name, kills in (*(by_kind if len(by_kind) > 1 else ()), *by_phase) if kills]
    wrong = [f"{kind} {run}: {', '.join(names)}" for (kind, run), names in found.differing.items() if names]
    return "\n".join([
        "# Kill matrix", "", f"`{command}`: {len(found.differing)} runs of {CONFIG} ({', '.join(kinds)}), "
        f"{len(found.kills)} times kill -9, {found.seconds / 60:.0f} minutes.", "",
        "| killed in | kills | ended as the undisturbed run |", "|---|---|---|", *rows,
        f"| all | {len(found.kills)} | {len(found.identical)} |", "", *(f"Differing in {line}\n" for line in wrong),
        "Compared: every file of every checkpoint that is kept (sha256), which of them is the best, metrics.jsonl "
        "without times and memory, eval.jsonl, every rollout and every evaluated answer. `between`: starting up, or "
        "bookkeeping between two phases.", ""])


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--child"]:
        return child(Path(argv[1]), json.loads(argv[2]), argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="over all kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=("shaped", *KINDS), default=["small"])
    parser.add_argument("--out", type=Path, help="where the table is written, besides being printed")
    given = parser.parse_args(argv)
    kinds = [k for k in KINDS if k != "small"] if given.kinds == ["shaped"] else given.kinds
    import vlrl.training.loop  # noqa: F401 - before the forks, which then need not

    found = Found()
    for i, kind in enumerate(kinds):
        with tempfile.TemporaryDirectory(prefix="kill-matrix-") as root:
            kills = given.kills // len(kinds) + (i < given.kills % len(kinds))
            matrix(Path(root), kind, kills, given.seed + i, (CONFIG, *KINDS[kind]), found,
                   lambda text: print(text, flush=True))
    text = table(found, f"python benchmarks/kill_matrix.py {' '.join(argv)}".split(" --out")[0])
    print(text)
    if given.out:
        given.out.write_text(text)
    return 0 if len(found.identical) == given.kills else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
