"""Kills a launcher that keeps running after its ranks have ended.

On a host that has lost its connection to the first host, torchrun's agent waits in a call to its store until TCP gives
up (15 minutes by Linux's default) and reacts only to SIGKILL. A rank that gets no reply from the store therefore starts
a guard process. The guard waits for the rank to end, then for the launcher to end, and kills the launcher if it does
not end in time. The guard process imports nothing of vlrl: it runs this file as a script. Linux only."""

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
"""Number of seconds for which the guard process waits for the rank to end. The rank may be writing a checkpoint."""
LAUNCHER_S = 60.0
"""Number of seconds for which the guard process waits for the launcher to end after the rank has ended. torchrun itself
waits 30 seconds for its ranks to end."""
_NAMES = ("torchrun", "torch.distributed", "accelerate")


class Launcher:
    """The process of torchrun or accelerate launch that started this process."""

    def __init__(self, process: psutil.Process):
        self.pid = process.pid
        self._handle = os.pidfd_open(self.pid)  # refers to this process even if its pid is reused

    def end_if_it_hangs(self) -> None:
        """Starts a guard process that kills the launcher if it does not end soon after this process. Returns at once.
        Does nothing if the launcher may still restart its ranks, because then the launcher continues once the
        network is back."""
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            return
        with suppress(OSError):
            rank = os.pidfd_open(os.getpid())
            words = map(str, (self.pid, self._handle, rank, RANK_S, LAUNCHER_S))
            subprocess.Popen([sys.executable, "-P", __file__, *words], pass_fds=(self._handle, rank),
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def find() -> Launcher | None:
    """Returns the launcher of this process; None if torchrun's agent did not start it."""
    with suppress(psutil.Error, OSError, AttributeError):  # no permission, an old kernel, or not Linux
        for process in psutil.Process().parents():
            if not _started_by_agent(process.environ()):
                return Launcher(process) if any(name in " ".join(process.cmdline()) for name in _NAMES) else None
    return None


def _started_by_agent(environ: Mapping[str, str]) -> bool:
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK")
    return all(name in os.environ and environ.get(name) == os.environ[name] for name in names)


def _ends(process: int, seconds: float) -> bool:
    return bool(select.select([process], [], [], seconds)[0])


def main(pid: int, launcher: int, rank: int, rank_s: float, launcher_s: float) -> None:
    """Waits for the rank (at most `rank_s` seconds) and then for the launcher (at most `launcher_s` seconds) to end.
    Kills a hanging launcher with all its child processes. `pid` is the launcher's process id; `launcher` and `rank`
    are pidfds."""
    if (_ends(rank, rank_s) and _ends(launcher, launcher_s)) or _ends(launcher, 0):
        return
    family = psutil.Process(pid).children(recursive=True)
    os.write(2, f"Killing the launcher, process {pid}: it still waits for its store, which does not answer.\n".encode())
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(launcher, signal.SIGKILL)
    for process in family:
        with suppress(psutil.Error):
            if process.pid != os.getpid():
                process.kill()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *map(float, sys.argv[4:]))
