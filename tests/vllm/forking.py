"""vLLM's server with its engine and worker, forked from a process that has imported vLLM, rather than spawned.

vLLM's CPU platform spawns them, and each then imports torch and vLLM again: most of what a test with servers takes.
Where it matters how they come about (who ends with whom), tests start servers as users do."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace

from vllm.utils import system_utils

from vlrl.engine.vllm import launch as vllm_launch
from vlrl.engine.vllm import process, worker  # noqa: F401  hides what keeps vLLM from being imported

system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # before vLLM's other modules take it
import vllm.entrypoints.openai.api_server  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401


class Forked:
    """What `vlrl serve` uses of a subprocess.Popen of `python -m module ...`."""

    def __init__(self, command, env, stdin, stdout, stderr, start_new_session):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                for number in (1, 2):
                    os.dup2(stdout.fileno(), number)
                os.environ.clear()
                os.environ.update(env)
                worker.prepare()  # as at the import in a process of its own
                _, _, module, *sys.argv[1:] = command
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as error:
                os._exit(error.code if isinstance(error.code, int) else bool(error.code))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("", timeout)
            time.sleep(0.05)
        return self.returncode


def servers() -> None:
    """Has `vlrl serve` of this process fork its servers."""
    vllm_launch.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
