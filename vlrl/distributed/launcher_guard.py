"""Ends a launcher that outlives its ranks.

On a host that is cut off from the first one, torchrun's agent waits in a call to its store until TCP gives up (15
minutes by Linux's default) and reacts to SIGKILL alone. A rank that finds the store silent leaves a process behind that
waits for its end, then for the launcher's, and kills the launcher if that does not come. That process imports nothing
of vlrl: it runs this file as a script. Linux alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

import psutil

RANK_S = 600.0
"""Seconds that the rank has to end; it may be writing a checkpoint."""
LAUNCHER_S = 60.0
"""Seconds that the launcher then has; torchrun gives hanging ranks 30."""
_NAMES = ("torchrun", "torch.distributed", "accelerate")


class Launcher:
    """The agent of torchrun or accelerate launch that started this process."""

    def __init__(self, process: psutil.Process):
        self.pid = process.pid
        self._handle = os.pidfd_open(self.pid)  # of this process for good, whoever gets its number later

    def end_if_it_hangs(self) -> None:
        """Makes sure that the launcher ends soon after this process, which is about to. Returns at once.

        A launcher that may restart its ranks is left alone: it goes on when the network is back."""
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            return
        with suppress(OSError):
            rank = os.pidfd_open(os.getpid())
            words = map(str, (self.pid, self._handle, rank, RANK_S, LAUNCHER_S))
            subprocess.Popen([sys.executable, "-P", __file__, *words], pass_fds=(self._handle, rank),
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def find() -> Launcher | None:
    """The launcher of this process; None when torchrun's agent did not start it."""
    with suppress(psutil.Error, OSError, AttributeError):  # no right to look, an old kernel, another system
        for process in psutil.Process().parents():
            if not _started_by_agent(process.environ()):
                return Launcher(process) if any(name in " ".join(process.cmdline()) for name in _NAMES) else None
    return None


def _started_by_agent(environ: Mapping[str, str]) -> bool:
    """Whether this environment is that of a process, such as a wrapper script, started by the same agent."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK")
    return all(name in os.environ and environ.get(name) == os.environ[name] for name in names)


def _ends(process: int, seconds: float) -> bool:
    return bool(select.select([process], [], [], seconds)[0])


def main(pid: int, launcher: int, rank: int, rank_s: float, launcher_s: float) -> None:
    """Waits, and kills the launcher with all its child processes; `launcher` and `rank` are pidfds."""
    if (_ends(rank, rank_s) and _ends(launcher, launcher_s)) or _ends(launcher, 0):
        return
    family = psutil.Process(pid).children(recursive=True)
    os.write(2, f"The launcher, process {pid}, is killed: it still waits for its store, which is silent.\n".encode())
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(launcher, signal.SIGKILL)
    for process in family:
        with suppress(psutil.Error):
            if process.pid != os.getpid():
                process.kill()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *map(float, sys.argv[4:]))
