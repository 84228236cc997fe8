"""Starts many training runs, several in parallel. Runs that are already finished are not repeated.

run_jobs([Job(Path("runs/s/a-0"), ("train", "a.yaml", "seed=0"))], parallel=2)
final_score(Path("runs/s/a-0"), "heldout", "reward/mean")"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config
from vlrl.errors import ConfigError, RunError, TrainingError, did_you_mean
from vlrl.monitoring.signals import as_interrupt
from vlrl.progress import Progress, no_progress
from vlrl.store import RunFolder, plain
from vlrl.store.files import read_json, write_text

_LOOK_S = 0.2
_SAVE_S = 120  # seconds that the runs have to save a checkpoint after Ctrl-C
_OWN = {"seed", "run.dir", "run"}
_TAIL = 2000  # characters of a failed run's output in the message


@dataclass(frozen=True)
class Job:
    """A run to start: its folder, and the command that trains it."""

    folder: Path
    words: tuple[str, ...]  # Arguments of the `vlrl` command, without run.dir, e.g. ("train", "my.yaml", "seed=1").

    @property
    def log(self) -> Path:
        """The path of the file that receives the output of the run."""
        return self.folder.with_name(f"{self.folder.name}.log")


def finished(folder: Path) -> bool:
    """Whether a run has completed its last step."""
    return RunFolder(folder).last_heartbeat().get("state") == "finished"


def _completed_share(folder: Path) -> float:
    beat = RunFolder(folder).last_heartbeat()
    step, steps = beat.get("step"), beat.get("steps")
    return min(step / steps, 1.0) if isinstance(step, int) and isinstance(steps, int) and steps > 0 else 0.0


def run_jobs(jobs: Sequence[Job], parallel: int = 1, progress: Progress = no_progress,
           what: str = "runs") -> None:
    """Runs every job that is not finished, in the given order and `parallel` at a time. A job that was interrupted
    earlier resumes from its checkpoint.

    Each job is a separate `vlrl` process. It gets an equal share of the CPU threads (unless OMP_NUM_THREADS is set) and
    of the GPUs in CUDA_VISIBLE_DEVICES, if there are at least `parallel` GPUs. If this process is killed, the kernel
    kills the jobs. If this process is interrupted or its terminal is closed, the jobs save a checkpoint and stop.
    `progress` reports the number of completed runs under the name `what`; a run in progress counts as a fraction.

    If a run fails, the other runs save and stop, and TrainingError is raised with the end of the run's output."""
    waiting = [job for job in jobs if not finished(job.folder)]
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    done = len(jobs) - len(waiting)
    with as_interrupt(), _stopped_after(running):
        while waiting or running:
            for slot in range(parallel):
                if waiting and slot not in running:
                    job = waiting.pop(0)
                    running[slot] = job, _start(job, slot, parallel)
            for slot, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    _check(job, process.returncode)
                    done += 1
            progress(what, done + sum(_completed_share(job.folder) for job, _ in running.values()), len(jobs))
            time.sleep(_LOOK_S if running else 0)


def final_score(folder: Path, split: str, metric: str) -> float:
    """The value of a metric in the last evaluation of a finished run. Raises RunError if the value is missing or not
    finite."""
    lines = [line for line in RunFolder(folder).evals() if line.get("split") == split]
    if not lines:
        raise RunError(f"{folder} has no evaluation of {split!r}: choose one of its eval.splits, and set eval.samples "
                       "above 0")
    last = max(lines, key=lambda line: line.get("step", 0))
    value = last.get(metric)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        names = [k for k, v in last.items() if f"{k}/ci95_low" in last and v is not None]
        raise RunError(f"{folder}: the metric {metric!r} of {split!r} is {'missing' if value is None else value}."
                       f"{did_you_mean(metric, names)} The evaluation has: {', '.join(names)}")
    return float(value)


def deciding_split(configs: Mapping[str, Config], split: str | None, words: Iterable[str], options: str) -> str:
    """Returns the name of the split on which the configs (name -> config) are compared: `split`, or by default the
    first entry of eval.splits in the first config.

    Raises ConfigError if a config does not evaluate this split, or if the held-out samples of the configs differ. Also
    raises ConfigError if one of `words` (overrides key=value) sets the seed or the run folder, because the calling
    command sets these itself. The message then names the `options` of the command to use instead."""
    own = next((word for word in words if word.partition("=")[0] in _OWN), None)
    if own is not None:
        raise ConfigError(f"{own}: the command sets seed and run.dir of each run itself. Use the options "
                          f"of the command instead ({options})")
    first = next(iter(configs.values()))
    split = split or (first.eval.splits[0] if first.eval.splits else "")
    for name, one in configs.items():
        if split not in one.eval.splits or not one.eval.samples:
            raise ConfigError(f"{name}: eval.splits={list(one.eval.splits)} and eval.samples={one.eval.samples} do not "
                              f"evaluate the split {split!r}: add it to eval.splits and set eval.samples above 0, or "
                              "name another split with --split")
        for setting in ("data.heldout", "data.seed", "eval.samples"):
            section, field = setting.split(".")
            values = [getattr(getattr(c, section), field) for c in (first, one)]
            if values[0] != values[1]:
                raise ConfigError(f"{name}: {setting}={values[1]}, but another config has {values[0]}: scores on "
                                  "different held-out samples cannot be compared. Use the same value in all configs")
    return split


def check_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Writes `plan`, the configs and options that all runs of a command share, to a JSON file. If the file exists,
    checks that it contains the same plan.

    Raises ConfigError naming the first difference."""
    plan = json.loads(json.dumps(plain(plan)))
    before = read_json(path)
    if before is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(plan, indent=1) + "\n")
        return
    for name in dict.fromkeys((*before, *plan)):
        if before.get(name) != plan.get(name):
            raise ConfigError(f"{path.parent} was started with {name}={json.dumps(before.get(name))}, not "
                              f"{json.dumps(plan.get(name))}: use the same value to resume, or name another folder "
                              "with -o")


# --- processes --------------------------------------------------------------------------------------------------------


def _start(job: Job, slot: int, parallel: int) -> subprocess.Popen[bytes]:
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // parallel))
    env = {"OMP_NUM_THREADS": threads, **os.environ}
    if len(devices := [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]) >= parallel > 1:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot::parallel])
    command = [sys.executable, "-m", "vlrl", *job.words, "log.samples_every=0", f"run.dir={job.folder}"]
    with open(job.log, "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
                                start_new_session=True, preexec_fn=_end_with_parent)


def _end_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies (on Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _check(job: Job, code: int) -> None:
    if code == 0 and finished(job.folder):
        return
    with suppress(OSError):
        text = job.log.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip()
        raise TrainingError(f"run {job.folder} ended with exit code {code} before its last step. Its output is in "
                            f"{job.log}; fix the problem and start the same command again. The output ends "
                            f"with:\n{text}")
    raise TrainingError(f"run {job.folder} ended with exit code {code} before its last step, and wrote no log file "
                        f"{job.log}")


@contextmanager
def _stopped_after(running: Mapping[int, tuple[Job, subprocess.Popen[bytes]]]) -> Iterator[None]:
    """A context manager. At the end of its block, tells the processes in `running` to save a checkpoint and stop, waits
    for them, and kills those that take longer than _SAVE_S seconds."""
    try:
        yield
    finally:
        processes = [process for _, process in running.values()]
        for process in processes:
            process.send_signal(signal.SIGINT)
        limit = time.monotonic() + _SAVE_S
        for process in processes:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
