"""`vlrl serve` in a process of its own."""

import contextlib
import signal
import socket
import time

import httpx

from tests.e2e import forked
from tests.e2e.runs import ROOT


@contextlib.contextmanager
def serving(root, folder, words, env):
    """Starts `vlrl serve` on a free port; gives a client with its key, and the port. Ended as by a user at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (root / "log").open("w") as log:
        process = forked.Process(["-m", "vlrl", "serve", *map(str, words), "--port", str(port), "--folder",
                                  str(folder)], env, ROOT, log, log)
    said, end = lambda: (root / "log").read_text(), time.monotonic() + 600
    try:
        while "ready" not in said():
            assert process.poll() is None and time.monotonic() < end, said()
            time.sleep(0.2)
        key = (folder / "key").read_text().strip()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key}"},
                          timeout=300, trust_env=False) as client:
            yield client, port
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130, said()
    finally:
        process.kill()
        process.wait(60)
