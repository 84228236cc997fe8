"""The process that starts others for a task: what ends with it, what it prints, and that it may be killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.e2e.runs import ROOT
from tests.task.test_subprocess_scorer import alive, wait_for
from vlrl.task import fork_server
from vlrl.task.fork_server import ForkServer, ForkServerLost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def sleeper(connection, text):
    """Starts one in a session of its own, whose parent is gone."""
    started = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True)
    connection.send_bytes(started.stdout.strip())
    time.sleep(1000)


def test_what_is_in_a_session_of_its_own_ends_with_it():
    server = ForkServer(sleeper)
    connection, worker = server.start("")
    stray = int(connection.recv_bytes())
    assert alive(worker) and alive(stray)
    wait_for(lambda: os.getsid(stray) != os.getsid(worker))
    server.close()
    assert not alive(worker) and not alive(stray)


ENDING = """
import time
from tests.task.test_fork_server import sleeper
from vlrl.task.fork_server import ForkServer
server = ForkServer(sleeper)
print(int(server.start("")[0].recv_bytes()), server.process, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_what_is_in_a_session_of_its_own_ends_with_a_run_that_is_killed():
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pids = [*map(int, process.stdout.readline().split())]
    assert len(pids) == 2 and all(map(alive, pids))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(map(alive, pids)))
    assert not any(map(alive, pids))


def test_one_that_was_killed_is_named():
    server = ForkServer(sleeper)
    os.kill(server.process, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ForkServerLost, match=f"pid {server.process}.* was killed from outside"):
            server.start("")
    server.close()


def test_prints_are_bounded(capfd, monkeypatch):
    def chatty(connection, text):
        for _ in range(50):
            print("x" * 99)
        print("y", file=sys.stderr)
        connection.send_bytes(b"done")
    monkeypatch.setattr(fork_server, "MOST_PRINTED", 1000)
    server = ForkServer(chatty)
    assert server.start("")[0].recv_bytes() == b"done"
    server.close()
    out, err = capfd.readouterr()
    assert out.count("x") == 990 and "has printed 1000 characters" in out and err == "y\n"
