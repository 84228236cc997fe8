"""Starts Python programs in processes forked from one that has imported torch, transformers and vlrl.

A start takes .1 s rather than the 5 to 10 s of the imports. Everything else is as after `python train.py ...`: an own
process with its own arguments, environment, working directory and output. Programs whose launcher, imports or
process tree are what a test is about are started by `subprocess` instead."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any

_CONTEXT = multiprocessing.get_context("forkserver")
_SUBPROCESS_RUN = subprocess.run


def preload(*first: str) -> None:
    """Names modules to import before the others; of use until the first program is started."""
    _CONTEXT.set_forkserver_preload([
        *first, "torch", "transformers", "vlrl.cli.main", "vlrl.cli.train", "vlrl.cli.evaluate", "vlrl.training.loop",
        "vlrl.training.session", "vlrl.training.build", "vlrl.engine.hf", "vlrl.evaluation", "tests.e2e.preloaded",
        "tests.e2e.forked"])


preload()


class Process:
    """A program that runs: `words` are those after `python`, so `train.py ...` or `-m module ...`."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: IO, stderr: IO,
                 start_new_session: bool = False):
        self.words = [str(word) for word in words]
        _start_server()
        self._process = _CONTEXT.Process(target=_main, args=(self.words, dict(env), str(cwd), stdout.name, stderr.name,
                                                           start_new_session))
        self._process.start()
        self.pid = self._process.pid or 0
        while start_new_session and self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.01)  # who ends its group may not end ours

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number where one ended it; None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code once it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.send_signal(signal.SIGKILL)
            raise subprocess.TimeoutExpired(self.words, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def run(words: Sequence[str], env: Mapping[str, str], cwd: Path, timeout: float,
        processes: int = 1) -> subprocess.CompletedProcess:
    """Runs a program to its end, or one of several ranks with the environment that torchrun gives them.

    Returns the exit code (of ranks: the first that is not 0) with the output of all."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        with files[0].open("w") as stdout, files[1].open("w") as stderr:
            started = [Process(words, {**env, **more}, cwd, stdout, stderr) for more in ranks(processes)]
            end = time.monotonic() + timeout
            codes = [process.wait(max(0.0, end - time.monotonic())) for process in started]
        code = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess(list(words), code, *(f.read_text(errors="replace") for f in files))


def in_place_of_subprocess_run(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess:
    """As `subprocess.run`, which a test replaces by it in code that starts Python programs and reads what they say:
    these are forked. Raises subprocess.TimeoutExpired, and CalledProcessError where it is to check."""
    if command[0] != sys.executable:
        return _SUBPROCESS_RUN(command, **options)
    done = run([str(word) for word in command[1:]], options.get("env") or os.environ,
               Path(options.get("cwd") or ".").absolute(), options.get("timeout") or 600)
    if options.get("check"):
        done.check_returncode()
    return done


def _start_server() -> None:
    """Starts the process that is forked, with one thread as torch learns when it is imported."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with contextlib.chdir(Path(__file__).resolve().parents[2]):  # where it finds `tests`, wherever a test is
            forkserver.ensure_running()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def ranks(processes: int) -> list[dict[str, str]]:
    """Returns what torchrun adds to the environment of each rank."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
             "LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
            for rank in range(processes)]


def _main(words: list[str], env: dict[str, str], cwd: str, stdout: str, stderr: str, start_new_session: bool) -> None:
    if start_new_session:
        os.setsid()
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    code = 0
    try:
        _program(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.exit(code)


def _program(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
