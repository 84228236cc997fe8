"""The process that starts others for a task: what ends with it, what it prints, and that it may be killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.e2e.runs import ROOT
from tests.task.test_subprocess_scorer import alive, wait_for
from vlrl.task import keeper as keepers
from vlrl.task.keeper import Keeper, KeeperGone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def sleeper(connection, text):
    """Starts one in a session of its own, whose parent is gone."""
    started = subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True)
    connection.send_bytes(started.stdout.strip())
    time.sleep(1000)


def test_what_is_in_a_session_of_its_own_ends_with_it():
    keeper = Keeper(sleeper)
    connection, worker = keeper.start("")
    stray = int(connection.recv_bytes())
    assert alive(worker) and alive(stray)
    wait_for(lambda: os.getsid(stray) != os.getsid(worker))
    keeper.close()
    assert not alive(worker) and not alive(stray)


ENDING = """
import time
from tests.task.test_keeper import sleeper
from vlrl.task.keeper import Keeper
keeper = Keeper(sleeper)
print(int(keeper.start("")[0].recv_bytes()), keeper.process, flush=True)
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
    keeper = Keeper(sleeper)
    os.kill(keeper.process, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(KeeperGone, match=f"pid {keeper.process}.* was ended from outside"):
            keeper.start("")
    keeper.close()


def test_prints_are_bounded(capfd, monkeypatch):
    def chatty(connection, text):
        for _ in range(50):
            print("x" * 99)
        print("y", file=sys.stderr)
        connection.send_bytes(b"done")

    monkeypatch.setattr(keepers, "MOST_PRINTED", 1000)
    keeper = Keeper(chatty)
    assert keeper.start("")[0].recv_bytes() == b"done"
    keeper.close()
    out, err = capfd.readouterr()
    assert out.count("x") == 990 and "has printed 1000 characters" in out and err == "y\n"
