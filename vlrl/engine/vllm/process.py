# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`python -m vlrl.engine.vllm.process ...` runs vLLM's `python -m vllm.entrypoints.openai.api_server ...`.

This module imports vlrl first, so that transformers and vLLM can be imported with a CPU-only torch, in this process and
in the processes that vLLM starts. On Linux the server ends when the process that started it ends, and its workers end
with it, so that no GPU stays occupied."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from vlrl import _torchcodec
from vlrl.engine.vllm.cpu_patches import wait_asleep

PARENT = "VLRL_PARENT"  # environment variable with the id of the process that started the server
_PR_SET_PDEATHSIG = 1

_torchcodec.hide_broken()  # at import: the processes that vLLM starts import this module too


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Makes the kernel send signal `number` to this process when its parent process ends. Linux only. parent: the
    parent's process id. If the parent has already ended, this process exits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before this was set
            sys.exit(1)


def kill_children_at_exit() -> None:
    """Makes the kernel kill child processes that are forked later as soon as this process ends. Otherwise vLLM's engine
    would wait for this process forever. Processes forked outside the main thread are excluded, because the kernel
    would kill them when the thread ends."""
    lasting = [True]
    os.register_at_fork(
        before=lambda: lasting.__setitem__(0, threading.current_thread() is threading.main_thread()),
        after_in_child=lambda: lasting[0] and end_with_parent(os.getppid(), signal.SIGKILL))


def register_model_class(arguments: Sequence[str]) -> None:
    """Imports the class of the model that the server's command-line `arguments` name. Otherwise vLLM would start a
    process without vlrl to inspect the class."""
    from vllm import ModelRegistry

    file = Path(dict(itertools.pairwise(arguments)).get("--model", "")) / "config.json"
    if not file.is_file():  # a name of the hub
        return
    for name in json.loads(file.read_text()).get("architectures", ()):
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def main() -> None:
    """Runs vLLM's server in this process, with the command-line arguments."""
    if parent := os.environ.pop(PARENT, ""):
        end_with_parent(int(parent))
    kill_children_at_exit()
    wait_asleep()
    register_model_class(sys.argv[1:])
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__mp_main__":
    end_with_parent(os.getppid(), signal.SIGKILL)
    kill_children_at_exit()
    wait_asleep()
if __name__ == "__main__":
    main()
