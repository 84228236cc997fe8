"""Runs a command and kills it, with its process group, when the parent process ends: `python leash.py PARENT command
...`.

A process that is killed by kill -9 cannot end the servers that it started, and a server may not notice that its
standard input was closed. PARENT is the parent's process id. Linux only. This file imports nothing of vlrl, so that it
starts fast."""

import ctypes
import os
import signal
import subprocess
import sys


def main() -> int:
    """Runs the command and returns its exit code."""
    if os.getpgrp() != os.getpid():  # before anything can end its group, which must not be the parent's
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # itself too
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        return 1
    try:
        return subprocess.Popen(sys.argv[2:]).wait()
    except OSError as error:
        print(f"{sys.argv[2]!r} cannot be started: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
