"""What ends a run, and what does not: the watchdog with the stacks on disk, signals, a terminal that is closed."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest
import torch.distributed as distributed

from tests.tables import each
from vlrl.distributed import comm, rank_monitor
from vlrl.distributed import position as place
from vlrl.monitoring import metrics
from vlrl.monitoring.signals import StopSignals, as_interrupt
from vlrl.monitoring.watchdog import Stuck, Watchdog

SCRIPT = """
import sys, time
from pathlib import Path
from vlrl.monitoring import metrics, watchdog
watchdog.GRACE_S = watchdog._FAREWELL_S = 0.5
def holds_on_to_everything():
    while True:
        try:
            time.sleep(100)
        except BaseException:
            pass
def fills_a_pipe():
    while True:
        try:
            sys.stdout.write("x" * 10**7)
        except BaseException:
            pass
def moves():
    print("moving", flush=True)
    end = time.monotonic() + 60
    while not (Path(sys.argv[1]) / "go").exists() and time.monotonic() < end:
        metrics.phase("decode")
        time.sleep(0.05)
with watchdog.Watchdog(float(sys.argv[3]), Path(sys.argv[1])):
    metrics.phase("generate")
    globals()[sys.argv[2]]()
print("ended well")
"""


def test_a_main_thread_that_waits_is_made_to_raise(tmp_path):
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(Stuck, match=r"limits\.stuck_s=0\.2.*'generate' began.*stuck-rank-00000\.txt.*checkpoint"), \
            Watchdog(0.2, tmp_path):
        metrics.phase("generate")
        time.sleep(60)
    stacks = (tmp_path / "stuck-rank-00000.txt").read_text()
    assert "test_a_main_thread_that_waits" in stacks and "'generate'" in stacks
    assert signal.getsignal(signal.SIGVTALRM) == before
    for seconds in (0, 1000):
        with Watchdog(seconds, tmp_path):
            pass
    assert os.listdir(tmp_path) == ["stuck-rank-00000.txt"]  # the one of before


def start(tmp_path, what, seconds):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), what, str(seconds)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_process_that_cannot_end_is_ended(tmp_path):
    (tmp_path / "run.lock").write_text("{}")
    (tmp_path / "full").mkdir()
    process, filling = (start(folder, what, 0.2) for folder, what in (
        (tmp_path, "holds_on_to_everything"), (tmp_path / "full", "fills_a_pipe")))
    out, err = process.communicate(timeout=120)
    assert filling.wait(120) == 1  # nobody reads what it prints
    filling.communicate()
    assert process.returncode == 1 and "limits.stuck_s" in err and not out
    assert "holds_on_to_everything" in (tmp_path / "stuck-rank-00000.txt").read_text()
    assert not (tmp_path / "run.lock").exists()
    (tmp_path / "run").touch()
    process = start(tmp_path / "run", "holds_on_to_everything", 0.2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "could not be written" in err


@pytest.mark.slow
def test_a_process_that_was_stopped_goes_on(tmp_path):
    process = start(tmp_path, "moves", 4)
    assert process.stdout.readline() == "moving\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)  # longer than stuck_s: what is tested is that the time counts for nothing
    process.send_signal(signal.SIGCONT)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "ended well\n"), err


def test_a_rank_that_waits_for_others_says_for_whom(tmp_path, monkeypatch):
    """Also where limits.stuck_s is below limits.collective_s."""
    monkeypatch.setattr(rank_monitor, "BEAT", 0.02)
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    here, there = place.RankPosition(), place.RankPosition()
    there.at("step 3")
    calls = [rank_monitor.RankMonitor(one, rank, 2, 1800) for rank, one in enumerate((here, there))]
    monkeypatch.setattr(comm, "here", here)
    monkeypatch.setattr(comm, "_monitor", calls[0])
    here.at("step 3")
    here.enter("gathering values")
    with pytest.raises(Stuck, match=r"'train' began: rank 0 waited \d+ s in step 3: gathering values .* for rank 1 "
                                    r"\(in step 3 for \d+ s\)\. The stacks"), Watchdog(0.1, tmp_path):
        metrics.phase("train")
        time.sleep(60)
    here.leave()
    for call in calls:
        call.close()


PROGRAM = """
import sys, time
from vlrl.monitoring.signals import StopSignals, write_to_terminal
with StopSignals(lambda number: write_to_terminal("saving") or came.append(number), 60, write_to_terminal) as signals:
    came = []
    open(sys.argv[1], "w").write("ready")
    while not came:
        time.sleep(0.01)
    print("finishing", flush=True)  # once the terminal is gone this would end a run before it is saved
    open(sys.argv[1], "w").write(f"saved after {came}")
"""


@pytest.fixture(autouse=True)
def heeded():
    """What was started by nohup does not heed SIGHUP, nor what it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def started(path, before=None):
    """The program in a terminal of its own, and our end of it."""
    ours, theirs = pty.openpty()

    def own_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        if before:
            before()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True, preexec_fn=own_terminal, close_fds=True, pass_fds=(theirs,))
    os.close(theirs)
    while not (path.exists() and path.read_text()):
        assert process.poll() is None
    return process, ours


def test_a_closed_terminal_is_a_signal_and_no_error(tmp_path):
    process, terminal = started(tmp_path / "said")
    os.close(terminal)
    assert process.wait(20) == 0 and (tmp_path / "said").read_text() == f"saved after [{int(signal.SIGHUP)}]"


def test_under_nohup_a_closed_terminal_is_none():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(pytest.fail, 60, str):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@each("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_what_runs_others_is_interrupted_once(number):
    """Its `finally` has the runs save, which a second signal, as shell and kernel send it, does not end."""
    saved = []
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            saved.append(1)
    assert saved and signal.getsignal(number) == before
