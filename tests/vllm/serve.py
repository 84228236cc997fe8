"""`vlrl serve` with a real vLLM, as tests start it and wait for it."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil

from tests.e2e import forked
from tests.e2e.runs import ROOT

PATIENT = 900
"""Seconds; starting two servers takes one minute on a quiet machine."""
FORKED = "from tests.vllm import forking\nforking.servers()\n"


def until(true, what):
    end = time.monotonic() + PATIENT
    while not (found := true()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.2)
    return found


def free_ports() -> int:
    """The first of two free ports that no other worker takes while servers start, which take them after a minute."""
    for port in range(21000 + 20 * os.getpid() % 11000, 60000, 2):
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


def process_of(serve: int, address: str) -> psutil.Process:
    port = int(address.rpartition(":")[2])
    (found,) = [p for p in psutil.Process(serve).children() if any(
        c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in p.net_connections("tcp"))]
    return found


class Serve:
    """`vlrl serve` in a process of its own, whose servers find the tests, and whose engines have processes of theirs.

    It is a program in the folder `root` that is the command with `settings` set before. A command below nohup is
    started deaf to a closed terminal; this one heeds it."""

    def __init__(self, root: Path, name: str, config, *words, settings: str = FORKED, **environment: str):
        self.log, self.about = root / f"{name}.log", root / name / "servers.json"
        program = root / f"serve-{name}.py"
        program.write_text("import signal\nfrom vlrl.cli.main import main\n"
                           "from vlrl.engine.vllm import launch as vllm_launch\n"
                           f"signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{settings}raise SystemExit(main())\n")
        own = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        with self.log.open("w") as log:
            self.process = forked.Process([program, "serve", config, "--folder", root / name, *words],
                                          own | {"PYTHONPATH": str(ROOT)} | environment, ROOT, log, log)

    def said(self) -> str:
        return self.log.read_text()

    def there(self) -> bool:
        return self.about.exists()

    def ready(self):
        """Returns once there are servers, with the settings of those who ask them."""
        until(lambda: self.there() or self.process.poll() is not None, "the servers do not start")
        assert self.process.poll() is None, self.said()
        if not self.about.exists():
            return ()
        about = json.loads(self.about.read_text())
        self.servers, self.key_file = about["servers"], about["key_file"]
        return f"engine.key_file={self.key_file}", f"engine.servers=[{','.join(self.servers)}]"

    def close(self, how: int = signal.SIGTERM) -> tuple[int, int]:
        """Returns its exit code and how many processes it leaves, which are killed."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(how)
        code = self.process.wait(PATIENT)
        left = psutil.wait_procs(family, timeout=0 if how == signal.SIGKILL else 120)[1]
        for orphan in left:
            orphan.kill()
        return code, len(left)
